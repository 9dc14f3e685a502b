"""Settings: precedence of their sources, refusal of unknown names, errors that name the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.service_settings import RedisSettings, ServiceSettings, StreamSettings
from ernie5.protocol.settings import Settings, environment_variable, load_settings


class Optimizer(Settings):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    labels: dict[str, int] = Field(default_factory=dict)


class Training(Settings):
    steps: int = 10
    deterministic: bool = False
    note: str | None = None
    optimizer: Optimizer = Optimizer()


class Program(Settings):
    training: Training = Training()
    stream: StreamSettings = StreamSettings()
    service: ServiceSettings = ServiceSettings()
    redis: RedisSettings = RedisSettings()


class Named(Settings):
    section: ClassVar[str] = "named"
    size: int = 1


def written(folder: Path, values: object, name: str = "settings.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@given(
    explicit=st.none() | st.integers(1, 99),
    environment=st.none() | st.integers(100, 199),
    file=st.none() | st.integers(200, 299),
)
def test_explicit_beats_environment_beats_file_beats_default(
    tmp_path_factory: pytest.TempPathFactory, explicit: int | None, environment: int | None, file: int | None
) -> None:
    folder = tmp_path_factory.mktemp("settings")
    path = written(folder, {"training": {"steps": file}}) if file is not None else None
    environ = {"ERNIE_MULTI_TRAINING_STEPS": str(environment)} if environment is not None else {}
    loaded = load_settings(Program, path, {"training.steps": explicit}, environ)
    expected = next((value for value in (explicit, environment, file) if value is not None), 10)
    assert loaded.training.steps == expected


@given(
    st.floats(1e-9, 10.0),
    st.booleans(),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1),
)
def test_every_type_of_value_is_read_from_the_environment(lr: float, deterministic: bool, note: str) -> None:
    environ = {
        "ERNIE_MULTI_TRAINING_OPTIMIZER_LR": repr(lr),
        "ERNIE_MULTI_TRAINING_OPTIMIZER_BETAS": json.dumps([lr, 0.5]),
        "ERNIE_MULTI_TRAINING_OPTIMIZER_LABELS": '{"a": 3}',
        "ERNIE_MULTI_TRAINING_DETERMINISTIC": str(deterministic).lower(),
        "ERNIE_MULTI_TRAINING_NOTE": note,
    }
    training = load_settings(Program, environ=environ).training
    assert training.optimizer == Optimizer(lr=lr, betas=(lr, 0.5), labels={"a": 3})
    assert (training.deterministic, training.note) == (deterministic, note)


def test_each_field_has_its_variable() -> None:
    assert (
        environment_variable(Program, ("training", "optimizer", "lr")) == "ERNIE_MULTI_TRAINING_OPTIMIZER_LR"
    )
    assert load_settings(Named, environ={"ERNIE_MULTI_NAMED_SIZE": "7"}).size == 7


def test_an_empty_variable_is_unset() -> None:
    assert load_settings(Program, environ={"ERNIE_MULTI_TRAINING_STEPS": "", "REDIS_URL": ""}) == Program()


def test_yaml_and_json_files_read_alike(tmp_path: Path) -> None:
    yaml = tmp_path / "settings.yaml"
    yaml.write_text(
        "training:\n  steps: 3\n  optimizer: {lr: 0.5, labels: {x: 1}}\nstream:\n", encoding="utf-8"
    )
    values = {"training": {"steps": 3, "optimizer": {"lr": 0.5, "labels": {"x": 1}}}}
    loaded = load_settings(Program, yaml, environ={})
    assert loaded == load_settings(Program, written(tmp_path, values), environ={})
    assert loaded.training.optimizer.lr == 0.5


def test_nested_and_dotted_overrides_leave_neighbours_alone(tmp_path: Path) -> None:
    path = written(tmp_path, {"training": {"steps": 3, "note": "file", "optimizer": {"labels": {"a.b": 1}}}})
    overrides = {"training": {"note": "mine"}, "training.optimizer.lr": 0.25, "training.deterministic": None}
    training = load_settings(Program, path, overrides, {}).training
    assert (training.steps, training.note, training.optimizer.lr) == (3, "mine", 0.25)
    assert training.optimizer.labels == {"a.b": 1}
    assert overrides["training"] == {"note": "mine"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stream": {"higt_water": 5}}, "unknown setting 'stream.higt_water'; did you mean 'high_water'?"),
        ({"stream.HIGH_WATER": 5}, "unknown setting 'stream.HIGH_WATER'; did you mean 'high_water'?"),
        ({"strem": {}}, "unknown setting 'strem'; did you mean 'stream'?"),
        ({"training.optimizer.zzz": 1}, "unknown setting 'training.optimizer.zzz'; known: lr, betas, labels"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(overrides: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as explicit:
        load_settings(Program, overrides=overrides, environ={})
    assert explicit.value.message == message
    if not any("." in name for name in overrides):
        path = written(tmp_path, overrides)
        with pytest.raises(InvalidInputError) as from_file:
            load_settings(Program, path, environ={})
        assert from_file.value.message.startswith(message)


def test_an_unknown_name_is_refused_when_a_class_is_made_directly() -> None:
    with pytest.raises(ValidationError, match="did you mean 'high_water'"):
        StreamSettings(higt_water=5)  # type: ignore[call-arg]


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="did you mean ERNIE_MULTI_STREAM_HIGH_WATER"):
        load_settings(Program, environ={"ERNIE_MULTI_STREAM_HIGT_WATER": "5"})


@pytest.mark.parametrize(
    "variable", ["ERNIE_MULTI_MODEL", "ERNIE_MULTI_REDIS_PORT_6379_TCP", "ERNIE_MULTI_STREAM_COLOUR", "PATH"]
)
def test_variables_of_others_are_left_alone(variable: str) -> None:
    """Kubernetes adds variables named after its services; the face has variables of its own."""
    assert load_settings(Program, environ={variable: "tcp://10.0.0.1"}) == Program()


@pytest.mark.parametrize(
    ("values", "param", "parts"),
    [
        ({"stream": {"high_water": 0}}, "stream.high_water", ["greater than or equal to 1", "got 0"]),
        ({"training": {"optimizer": {"lr": "fast"}}}, "training.optimizer.lr", ["number", "got 'fast'"]),
        ({"training": {"optimizer": {"lr": float("inf")}}}, "training.optimizer.lr", ["finite"]),
        ({"training": 5}, "training", ["got 5"]),
        ({"stream": {"run": "a:b"}}, "stream.run", ["pattern", "got 'a:b'"]),
        (
            {"stream": {"high_water": 5, "entry_mark": 5}},
            "stream",
            ["entry_mark 5 must be above high_water 5"],
        ),
    ],
)
def test_a_bad_value_is_refused_with_path_and_source(
    values: dict, param: str, parts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(values).replace("Infinity", ".inf"), encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        load_settings(Program, path, environ={})
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")
    for part in parts:
        assert part in caught.value.message


def test_the_variable_of_a_bad_value_is_named() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^training\.steps: .*got 'ten' \(from ERNIE_MULTI_TRAINING_STEPS\)$"
    ):
        load_settings(Program, environ={"ERNIE_MULTI_TRAINING_STEPS": "ten"})
    with pytest.raises(InvalidInputError, match="ERNIE_MULTI_TRAINING_OPTIMIZER_BETAS is not JSON"):
        load_settings(Program, environ={"ERNIE_MULTI_TRAINING_OPTIMIZER_BETAS": "[1, 2"})


@pytest.mark.parametrize("content", [b"[1, 2]", b"training: [", b"\xff\xfe\x00", b"5", b"a: b: c"])
@pytest.mark.parametrize("name", ["settings.yaml", "settings.json"])
def test_a_file_that_holds_no_mapping_is_refused(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=name):
        load_settings(Program, tmp_path / name, environ={})


def test_a_missing_file_is_refused_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="can't be read"):
        load_settings(Program, tmp_path / "none.yaml", environ={})
    (tmp_path / "empty.yaml").touch()
    assert load_settings(Program, tmp_path / "empty.yaml", environ={}) == Program()


def test_a_yaml_file_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("training: !!python/object/apply:os.getcwd []\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="can't be parsed"):
        load_settings(Program, path, environ={})


def test_redis_takes_the_conventional_variables_but_prefers_its_own() -> None:
    environ = {"REDIS_URL": "redis://one:6379/0", "REDIS_PASSWORD": "first-secret"}
    redis = load_settings(RedisSettings, environ=environ)
    assert (redis.url, redis.password) == ("redis://one:6379/0", "first-secret")
    environ |= {"ERNIE_MULTI_REDIS_URL": "rediss://two:6380", "ERNIE_MULTI_REDIS_TLS_CA": "/ca.pem"}
    assert load_settings(RedisSettings, environ=environ).url == "rediss://two:6380"
    assert load_settings(Program, environ=environ).redis.tls_ca == Path("/ca.pem")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "http://x"}, "must start with redis://"),
        ({"url": "redis://"}, "names no host"),
        ({"url": "redis://x:99999"}, "can't be parsed"),
        ({"url": "redis://x", "tls_ca": "/ca.pem"}, "need a rediss:// url"),
        ({"url": "rediss://x", "tls_cert": "/c.pem"}, "go together"),
    ],
)
def test_an_unusable_redis_address_is_refused(values: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_settings(RedisSettings, overrides=values, environ={})


def test_secrets_appear_in_no_text() -> None:
    redis = RedisSettings(url="redis://user:hidden@host:6379/0", password="hidden")
    service = ServiceSettings(api_key="hidden-key")
    assert "hidden" not in f"{redis} {redis!r} {redis.shown} {service}"
    assert redis.shown == "redis://host:6379/0"
    with pytest.raises(InvalidInputError) as caught:
        load_settings(ServiceSettings, environ={"ERNIE_MULTI_SERVICE_API_KEY": "hidden\n"})
    assert "hidden" not in caught.value.message
    with pytest.raises(InvalidInputError) as caught:
        load_settings(RedisSettings, environ={"REDIS_URL": "http://user:hidden@host"})
    assert "hidden" not in caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServiceSettings(host=host).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "localhost.example.org", ""])
def test_any_other_address_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidInputError, match="api_key is required: set ERNIE_MULTI_SERVICE_API_KEY"):
        load_settings(ServiceSettings, overrides={"host": host}, environ={})
    environ = {"ERNIE_MULTI_SERVICE_API_KEY": "sesame-open"}
    assert not load_settings(ServiceSettings, overrides={"host": host}, environ=environ).loopback


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Program().training = Training()  # type: ignore[misc]
