"""The deployment files say what the program understands: commands, variables, ports, images, keys."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from ernie5.protocol.settings import Settings, environment_variable
from ernie_multi import cli
from tests.deployment.conftest import OVERLAYS, ROOT, pod_specs

# Variables that others read: Redis' own client, Ray, and those that compose substitutes.
FOREIGN = re.compile(r"REDISCLI_AUTH|RAY_[A-Z0-9_]+|COMPOSE_PROFILES|BIND_ADDRESS")
SECRETS = {
    "REDIS_PASSWORD",
    "REDISCLI_AUTH",
    "ERNIE_MULTI_SERVICE_API_KEY",
    "ERNIE_MULTI_GATEWAY_API_KEY",
    "ERNIE_MULTI_GATEWAY_TOKENIZERS_KEY",
}


def known_variables() -> set[str]:
    """Each environment variable that a settings class of this project or the program itself reads."""
    for folder, package in (("services", "ernie5."), ("protocol", "ernie5."), ("ernie_multi", "")):
        for path in (ROOT / folder).rglob("*.py"):
            if "Settings)" in path.read_text("utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                importlib.import_module(package + ".".join(parts).removesuffix(".__init__"))
    names = set()
    classes = list(Settings.__subclasses__())
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        names |= set(kind.environment_names.values())
        names |= {environment_variable(kind, (field,)) for field in kind.model_fields}
    for folder in ("ernie_multi", "corpora"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= set(re.findall(r"\"(ERNIE_MULTI_[A-Z]+)\"", path.read_text("utf-8")))
    return names


def dockerfile_targets() -> dict[str, str]:
    """Target -> its instructions."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE)
    return {parts[i + 1]: parts[i + 2] for i in range(1, len(parts), 3)}


def compose_containers(compose: dict[str, Any]) -> Iterator[tuple[str, str, list[str], set[str]]]:
    """(name, image, arguments, variables) of each container that runs our program."""
    for name, service in compose["services"].items():
        if name != "redis":
            yield f"compose {name}", service["image"], service["command"], set(service["environment"])


def kubernetes_containers(
    manifests: dict[str, list[dict[str, Any]]],
) -> Iterator[tuple[str, str, list[str], set[str]]]:
    for overlay, objects in manifests.items():
        maps = {m["metadata"]["name"]: set(m["data"]) for m in objects if m["kind"] == "ConfigMap"}
        for manifest in objects:
            for pod in pod_specs(manifest):
                for container in pod["containers"]:
                    variables = {entry["name"] for entry in container.get("env", ())}
                    for source in container.get("envFrom", ()):
                        variables |= maps[source["configMapRef"]["name"]]
                    if container["image"].startswith("ernie-multi/"):
                        name = (
                            f"{overlay} {manifest['kind']} {manifest['metadata']['name']} {container['name']}"
                        )
                        yield name, container["image"], container.get("args", []), variables


@pytest.fixture
def containers(
    compose: dict[str, Any], manifests: dict[str, list[dict[str, Any]]]
) -> list[tuple[str, str, list[str], set[str]]]:
    found = [*compose_containers(compose), *kubernetes_containers(manifests)]
    assert len(found) > 20
    return found


def test_every_command_exists(containers: list[tuple[str, str, list[str], set[str]]]) -> None:
    command = typer.main.get_command(cli.app)
    for where, _, arguments, _ in containers:
        if arguments:  # KubeRay makes the commands of Ray's containers
            name, *rest = arguments
            assert name in command.commands, where  # type: ignore[attr-defined]
            # Parsing alone: it raises on an unknown service or option.
            command.commands[name].make_context(name, rest)  # type: ignore[attr-defined]


def test_images_run_the_commands_of_their_targets() -> None:
    command = typer.main.get_command(cli.app)
    targets = dockerfile_targets()
    for target in ("text", "audio", "vision", "gateway", "trainer", "inference"):
        (found,) = re.findall(r"^CMD (.+)$", targets[target], flags=re.MULTILINE)
        assert yaml.safe_load(found) == ["service", target]
        command.commands["service"].make_context("service", [target])  # type: ignore[attr-defined]
    assert re.search(r'^ENTRYPOINT \["ernie-multi"\]$', targets["base"], flags=re.MULTILINE)


def test_every_variable_is_read_by_someone(containers: list[tuple[str, str, list[str], set[str]]]) -> None:
    known = known_variables()
    assert {"REDIS_URL", "ERNIE_MULTI_SERVICE_PORT"} <= known
    for where, _, _, variables in containers:
        unknown = {name for name in variables - known if not FOREIGN.fullmatch(name)}
        assert not unknown, f"{where}: {sorted(unknown)}"


def test_every_process_has_the_key_and_the_password(
    containers: list[tuple[str, str, list[str], set[str]]],
) -> None:
    """The key goes only to those that answer or ask over HTTP."""
    for where, image, _, variables in containers:
        assert {"REDIS_URL", "REDIS_PASSWORD", "ERNIE_MULTI_RUN"} <= variables, where
        keys = {name for name in variables if name.endswith("_KEY")}
        if image.startswith(("ernie-multi/text:", "ernie-multi/audio:", "ernie-multi/vision:")):
            assert keys == {"ERNIE_MULTI_SERVICE_API_KEY"}, where
        elif "ingest" in where or "trainer" in where or "inference" in where:
            assert not keys, where
        else:
            assert keys == {"ERNIE_MULTI_GATEWAY_API_KEY", "ERNIE_MULTI_GATEWAY_TOKENIZERS_KEY"}, where


def test_images_are_built_here_at_this_version(
    compose: dict[str, Any], containers: list[tuple[str, str, list[str], set[str]]]
) -> None:
    import ernie_multi

    targets = dockerfile_targets()
    for where, image, _, _ in containers:
        name, _, tag = image.removeprefix("ernie-multi/").partition(":")
        assert name in targets and tag == ernie_multi.__version__, where
    for name, service in compose["services"].items():
        if "build" in service:
            assert service["image"].startswith(f"ernie-multi/{service['build']['target']}:"), name


def test_extras_of_images_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    used = re.findall(r"'\.\[([a-z,]+)\]'", (ROOT / "Dockerfile").read_text("utf-8"))
    assert len(used) == 5
    for extras in used:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_small_images_install_no_torch() -> None:
    """The extras of the text and gateway images, with the extras they name, ask for no torch."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]

    def packages(extra: str) -> Iterator[str]:
        for requirement in extras[extra]:
            inner = re.fullmatch(r"ernie-multi\[([a-z,]+)\]", requirement)
            if inner:
                for name in inner[1].split(","):
                    yield from packages(name)
            else:
                yield re.split(r"[\[<>=!~; ]", requirement)[0]

    assert "torch" in set(packages("audio"))
    for extra in ("text", "serve"):
        assert not {"torch", "safetensors", "matplotlib"} & set(packages(extra)), extra


def test_no_secret_is_written_down(
    compose: dict[str, Any], manifests: dict[str, list[dict[str, Any]]]
) -> None:
    for name, service in compose["services"].items():
        for variable in SECRETS & set(service["environment"]):
            value = service["environment"][variable]
            assert re.fullmatch(r"\$\{[A-Z_]+:\?set [A-Z_]+ in \.env .*\}", value), (
                f"{name}: {variable} may be empty"
            )
    for overlay in OVERLAYS:
        assert not [m for m in manifests[overlay] if m["kind"] == "Secret"]
        for manifest in manifests[overlay]:
            for pod in pod_specs(manifest):
                for container in pod["containers"]:
                    for entry in container.get("env", ()):
                        if entry["name"] in SECRETS:
                            assert entry["valueFrom"]["secretKeyRef"]["name"] == "ernie-multi-keys"
    for line in (ROOT / ".env.example").read_text("utf-8").splitlines():
        name, _, value = line.partition("=")
        assert not (name in {"REDIS_PASSWORD", "ERNIE_MULTI_API_KEY"} and value)


def test_ports_are_published_on_loopback_unless_said(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:"), name
    assert "ports" not in compose["services"]["redis"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_unprivileged(overlay: str, manifests: dict[str, list[dict[str, Any]]]) -> None:
    checked = 0
    for manifest in manifests[overlay]:
        for pod in pod_specs(manifest):
            where = f"{manifest['kind']} {manifest['metadata']['name']}"
            assert pod["securityContext"]["runAsNonRoot"] is True, where
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
            for container in pod["containers"]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False, where
                assert security["capabilities"] == {"drop": ["ALL"]}, where
                assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
                assert "memory" in container["resources"]["limits"], where
                checked += 1
    assert checked == 11


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_volumes_and_claims_fit(overlay: str, manifests: dict[str, list[dict[str, Any]]]) -> None:
    claims = {m["metadata"]["name"] for m in manifests[overlay] if m["kind"] == "PersistentVolumeClaim"}
    for manifest in manifests[overlay]:
        for pod in pod_specs(manifest):
            volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims
            templates = {t["metadata"]["name"] for t in manifest["spec"].get("volumeClaimTemplates", ())}
            for container in pod["containers"]:
                mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
                assert mounted <= set(volumes) | templates, manifest["metadata"]["name"]


def test_the_gpu_overlay_asks_for_gpus_where_they_serve(manifests: dict[str, list[dict[str, Any]]]) -> None:
    def gpus(overlay: str) -> set[str]:
        return {
            manifest["metadata"]["name"]
            for manifest in manifests[overlay]
            for pod in pod_specs(manifest)
            for container in pod["containers"]
            if "nvidia.com/gpu" in container["resources"]["limits"]
        }

    assert gpus("cpu") == set()
    assert gpus("gpu") == {"vision"}


def test_urls_in_manifests_name_services_that_exist(manifests: dict[str, list[dict[str, Any]]]) -> None:
    """KubeRay makes NAME-serve-svc for each RayService; the others are written in the manifests."""
    for objects in manifests.values():
        hosts = {m["metadata"]["name"] for m in objects if m["kind"] == "Service"}
        hosts |= {f"{m['metadata']['name']}-serve-svc" for m in objects if m["kind"] == "RayService"}
        values: dict[str, str] = {}
        for manifest in objects:
            values |= manifest["data"] if manifest["kind"] == "ConfigMap" else {}
            for pod in pod_specs(manifest):
                for container in pod["containers"]:
                    values |= {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
        named = {
            name: match[1]
            for name, value in values.items()
            if (match := re.match(r"[a-z]+://([^:/]+)", value))
        }
        assert len(named) == 4
        assert set(named.values()) <= hosts, named


def test_urls_in_compose_name_its_services(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service["environment"].items():
            match = re.match(r"[a-z]+://([^:/]+)", str(value))
            assert match is None or match[1] in compose["services"], f"{name}: {variable}={value}"


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "docker-compose.yml"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            found = re.match(r"^(?:\$ )?(?:\.venv/bin/)?ernie-multi (.+)$", line.strip())
            if found:
                yield f"{path.name}:{number}", shlex.split(found[1], comments=True)


def test_documented_commands_parse() -> None:
    command = typer.main.get_command(cli.app)
    checked = 0
    for where, arguments in documented_commands():
        try:
            context = command.make_context("ernie-multi", list(arguments), resilient_parsing=False)
            with context:
                name, sub, rest = command.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
                sub.make_context(name, rest, parent=context, allow_extra_args=hasattr(sub, "commands"))
        except Exception as error:
            raise AssertionError(f"{where}: {arguments}: {error}") from error
        checked += 1
    assert checked >= 5
