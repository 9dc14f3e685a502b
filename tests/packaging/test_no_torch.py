"""The text tokenizer's and the gateway's images hold no torch: their modules must import without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = ("torch", "torchaudio", "torchvision", "safetensors", "transformers")

# Refuses the blocked packages as if they were absent, then imports each module.
PROGRAM = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[2:]:
    importlib.import_module(module)
print(sorted({name.split(".")[0] for name in sys.modules} & set(sys.argv[1].split(","))))
"""


def modules_of(folder: str) -> list[str]:
    """All modules of a folder of the tree, by their installed names."""
    return sorted(
        "ernie5." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / folder).rglob("*.py")
    )


def import_without(blocked: tuple[str, ...], modules: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, ",".join(blocked), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("folder", ["protocol", "tokenizers/text", "tokenizers/modalities"])
def test_the_folder_imports_without_torch(folder: str) -> None:
    modules = modules_of(folder)
    assert modules
    done = import_without(BLOCKED, modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_gateway_imports_without_torch() -> None:
    modules = [name for name in modules_of("services") if "gateway" in name.split(".")[-1]]
    if not modules:
        pytest.skip("services/ has no gateway yet")
    done = import_without(BLOCKED, modules)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    assert import_without(("sentencepiece",), ["ernie5.tokenizers.text"]).returncode != 0


def test_the_text_tokenizer_works_without_torch() -> None:
    code = (
        "from ernie5.tokenizers.text import TextTokenizer as T; t = T.load(); print(t.text(t.ids('七 cats')))"
    )
    program = PROGRAM.replace("print(", "exec(sys.stdin.read())\nprint(")
    command = [sys.executable, "-X", "utf8", "-c", program, ",".join(BLOCKED), "ernie5.tokenizers.text"]
    done = subprocess.run(
        command, input=code, capture_output=True, encoding="utf-8", check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "七 cats"
