"""Every deployment file is what its consumer's own schema says: compose, Kubernetes, KubeRay, Ray Serve."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu", "gpu")
TOOLS = Path(sys.executable).parent


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def check_kubernetes(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / "kubernetes-validate"), "--strict", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_compose_follows_its_specification(tmp_path: Path) -> None:
    path = ROOT / "docker-compose.yml"
    assert check_compose(path).returncode == 0, check_compose(path).stdout

    misspelt = yaml.safe_load(path.read_text("utf-8"))
    misspelt["services"]["redis"]["heathcheck"] = misspelt["services"]["redis"].pop("healthcheck")
    (tmp_path / "compose.yml").write_text(yaml.safe_dump(misspelt))
    assert check_compose(tmp_path / "compose.yml").returncode != 0, "a misspelt key passes the check"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_objects_follow_their_schemas(
    overlay: str, rendered: dict[str, Path], tmp_path: Path
) -> None:
    done = check_kubernetes(rendered[overlay])
    assert done.returncode == 0, done.stdout + done.stderr

    wrong = [
        item
        for item in yaml.safe_load_all(rendered[overlay].read_text("utf-8"))
        if item["kind"] == "Deployment"
    ]
    wrong[0]["spec"]["template"]["spec"]["containers"][0]["port"] = 80
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong[0]))
    assert check_kubernetes(tmp_path / "wrong.yaml").returncode != 0, "an unknown field passes the check"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_custom_resources_follow_their_schemas(
    overlay: str,
    manifests: dict[str, list[dict[str, Any]]],
    custom_resource_schemas: dict[tuple[str, str], dict[str, Any]],
) -> None:
    checked = 0
    for manifest in manifests[overlay]:
        key = (manifest["kind"].lower(), manifest["apiVersion"])
        if key in custom_resource_schemas:
            validator = jsonschema.Draft202012Validator(custom_resource_schemas[key])
            errors = [
                f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(manifest)
            ]
            assert not errors, "\n".join(errors)
            manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["replica"] = 1
            assert list(validator.iter_errors(manifest)), "an unknown field passes the check"
            del manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["replica"]
            checked += 1
    assert checked == 3


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_serve_accepts_the_applications(overlay: str, manifests: dict[str, list[dict[str, Any]]]) -> None:
    """Ray Serve's own schema, and builders that exist."""
    schema = pytest.importorskip("ray.serve.schema")
    services = {m["metadata"]["name"]: m for m in manifests[overlay] if m["kind"] == "RayService"}
    assert set(services) == {"text", "audio", "vision"}
    for name, service in services.items():
        config = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
        (application,) = config.applications
        assert application.route_prefix == f"/{name}"
        module, builder = application.import_path.split(":")
        assert callable(getattr(importlib.import_module(module), builder))
        # What a replica asks for fits into the worker that the pod offers, or it would wait for ever.
        cluster = service["spec"]["rayClusterConfig"]
        (workers,) = cluster["workerGroupSpecs"]
        (deployment,) = application.deployments
        asked = deployment.ray_actor_options
        assert asked.num_cpus <= float(workers["rayStartParams"]["num-cpus"])
        assert (asked.num_gpus or 0) <= float(workers["rayStartParams"].get("num-gpus", 0))
        assert deployment.autoscaling_config["max_replicas"] <= workers["maxReplicas"]
        assert cluster["rayVersion"] == pinned_version("ray")


def test_the_documented_overlay_moves_every_image_to_a_registry(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    (overlay,) = (
        block for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "images:" in block
    )
    shutil.copytree(ROOT / "k8s", tmp_path / "ernie-multi" / "k8s")
    (tmp_path / "kustomization.yaml").write_text(overlay, "utf-8")
    command = [str(TOOLS / "kubectl"), "kustomize", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    images = set(re.findall(r"image: (\S+)", done.stdout))
    assert {image for image in images if not image.startswith("registry.example/")} == {"redis:7.2-bookworm"}
    assert len(images) == 7


def pinned_version(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))
