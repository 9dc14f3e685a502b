"""The deployment files as they are applied: compose as written, Kubernetes as kustomize renders it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu", "gpu")


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of rendered manifests of each overlay, by the real kubectl."""
    kubectl = Path(sys.executable).parent / "kubectl"
    folder = tmp_path_factory.mktemp("k8s")
    files = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            [str(kubectl), "kustomize", str(ROOT / "k8s" / "overlays" / overlay)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        files[overlay] = folder / f"{overlay}.yaml"
        files[overlay].write_text(done.stdout, "utf-8")
    return files


@pytest.fixture(scope="session")
def manifests(rendered: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """All objects of each overlay."""
    return {name: list(yaml.safe_load_all(path.read_text("utf-8"))) for name, path in rendered.items()}


@pytest.fixture(scope="session")
def custom_resource_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, apiVersion) -> JSON schema, from the folder that CRD_SCHEMAS names."""
    folder = os.environ.get("CRD_SCHEMAS")
    if not folder:
        pytest.skip(
            "CRD_SCHEMAS is not set: it names a folder of custom resources' schemas, KIND-GROUP-VERSION.json"
        )
    found = {}
    for path in Path(folder).glob("*.json"):
        kind, group, version = path.stem.rsplit("-", 2)
        found[kind, f"{group}/{version}"] = json.loads(path.read_text("utf-8"))
    assert found, f"{folder} holds no schema"
    return found


def pod_specs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specifications inside a workload, wherever its kind keeps them."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    if manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
        return [spec["template"]["spec"]]
    return []
