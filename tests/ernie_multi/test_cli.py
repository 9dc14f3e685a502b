"""The command line: what it prints when the user errs, and that each command reaches a function that takes
what it is given."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

import ernie_multi
from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie_multi import cli
from ernie_multi.commands import deferred
from ernie_multi.commands.stack import Service
from ernie_multi.commands.tokenizer import Tokenizer


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    code = ended.value.code
    captured = capsys.readouterr()
    return (0 if code is None else int(code)), captured.out, captured.err


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`service` writes its options into the environment; take that back after each test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


# Every command with all of its options, as a user would give them.
INVOCATIONS = [
    *(["service", name, "--port", "0", "--run", "r"] for name in Service),
    ["service", "text", "audio", "vision", "--replicas", "2"],
    ["up", "--out", "runs/x", "--port", "1", "--tokenizers-port", "2", "--model", "m", "--detach"],
    ["down", "--out", "runs/x"],
    ["status", "--out", "runs/x"],
    ["train", "--data", "mini", "--out", "o", "--preset", "nano", "--steps", "2", "--resume", "--seed", "3"],
    ["train", "--data", "mini", "--out", "o", "--init", "m", "--validate-every", "5"],
    ["train", "--data", "mini", "--out", "o", "--device", "cuda:1", "--no-tf32", "--compile"],
    [
        "train",
        "-d",
        "mini",
        "-o",
        "o",
        "--elastic",
        "report",
        "--allocation",
        "null",
        "--mean-experts",
        "1.5",
    ],
    ["export-hf", "m", "o", "--depth", "0.5", "--width", "0.5", "--top-k", "1", "--dtype", "bfloat16"],
    ["import-hf", "h", "o", "--experts", "4", "--top-k", "1", "--expert-width", "16", "--seed", "1"],
    ["import", "h", "o", "--experts", "4", "--top-k", "1", "--expert-width", "16", "--seed", "1"],
    ["export", "m", "o", "--depth", "0.6", "--budget-memory", "20MB", "--tune", "3", "--tasks", "a,b"],
    ["elastic", "m", "--no-latency", "--json"],
    ["modalities", "--json"],
    ["routing", "m", "--samples", "9", "--depth", "0.5"],
    ["demo", "--out", "o", "--steps", "2", "--minutes", "1", "--quick"],
    ["chat", "--model", "m", "--url", "http://127.0.0.1:1", "--out", "o"],
    ["corpus", "build", "mini", "--out", "o"],
    ["corpus", "list"],
]


@pytest.mark.parametrize("arguments", INVOCATIONS, ids=lambda arguments: " ".join(arguments[:2]))
def test_each_command_calls_a_function_that_takes_its_options(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def recorded(module: str, name: str) -> Any:
        return lambda *args, **kwargs: calls.append((module, name, args, kwargs))

    monkeypatch.setattr(deferred, "function", recorded)
    code, _, errors = run(arguments, capsys)
    assert code == 0, errors
    ((module, name, args, kwargs),) = calls
    function = getattr(importlib.import_module(module), name)
    inspect.signature(function).bind(*args, **kwargs)


@pytest.mark.parametrize("name", list(Tokenizer))
@pytest.mark.parametrize("action", ["train", "evaluate"])
def test_tokenizer_recipes_describe_their_options(
    action: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ernie_multi", "tokenizer", action, name, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"ernie-multi tokenizer {action} {name}" in " ".join(done.stdout.split()) and "--out" in done.stdout
    )


def test_service_options_reach_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(deferred, "function", lambda module, name: lambda *args: seen.update(os.environ))
    arguments = [
        "--host",
        "127.0.0.2",
        "--port",
        "8123",
        "--run",
        "one",
        "--redis-url",
        "redis://127.0.0.1:1/0",
    ]
    code, _, errors = run(["service", "text", *arguments], capsys)
    assert code == 0, errors
    from ernie5.protocol.service_settings import RedisSettings, StreamSettings
    from ernie5.protocol.settings import load_settings
    from ernie5.services.tokenizer_settings import TokenizerServiceSettings

    service = load_settings(TokenizerServiceSettings, environ=seen)
    assert (service.host, service.port, service.run) == ("127.0.0.2", 8123, "one")
    assert service.redis.url == load_settings(RedisSettings, environ=seen).url == "redis://127.0.0.1:1/0"
    assert load_settings(StreamSettings, environ=seen).run == "one"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("port 1 is taken", param="port"), 2),
        (UnavailableError("Redis does not answer"), 1),
        (FileNotFoundError(2, "No such file or directory", "/none"), 1),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
    ],
)
def test_an_expected_error_is_one_line(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(module: str, name: str) -> Any:
        raise error

    monkeypatch.setattr(deferred, "function", failing)
    ended, out, errors = run(["corpus", "list"], capsys)
    assert ended == code
    assert out == ""
    assert errors.startswith("ernie-multi: ") and errors.count("\n") == 1
    if isinstance(error, ModuleNotFoundError):
        assert "pip install 'ernie-multi[train]'" in errors


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: str, name: str) -> Any:
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(deferred, "function", failing)
    with pytest.raises(ZeroDivisionError):
        cli.main(["corpus", "list"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["service", "nothing"],
        ["service", "text", "gateway"],
        ["service", "text", "--port", "70000"],
        ["predict"],
        ["predict", "--image", "/no/such/picture.png"],
        ["train", "--out", "o"],
        ["unknown"],
    ],
)
def test_wrong_usage_ends_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(arguments, capsys)
    assert code == 2
    assert errors and "Traceback" not in errors


def test_help_and_version_import_no_framework() -> None:
    code = (
        "import sys; from ernie_multi import cli\n"
        "try: cli.main(['version'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'redis', 'fastapi', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == [ernie_multi.__version__, "[]"]
