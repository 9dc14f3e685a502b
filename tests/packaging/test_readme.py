"""What the README prints is what the program answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from starlette.testclient import TestClient

from ernie5.services.tokenizer_service import create_app, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_shown_answer_of_the_text_service_is_true() -> None:
    ((text, path, answer),) = re.findall(
        r"--data '(.+)' http://127\.0\.0\.1:8000/text(\S+)\n(\{.+\})\n", README
    )
    client = TestClient(create_app(load_tokenizer("text")), base_url="http://127.0.0.1:8000")
    response = client.post(path, content=text.encode(), headers={"Content-Type": "text/plain"})
    assert response.status_code == 200, response.text
    assert response.json() == json.loads(answer)


def test_every_link_and_path_exists() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for folder in re.findall(r"^\| `([a-z_0-9]+/)`", README, flags=re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_the_picture_is_what_its_script_draws() -> None:
    drawn: dict[str, object] = {}
    script = ROOT / "docs" / "pictures" / "overview.py"
    exec(compile(script.read_text("utf-8"), str(script), "exec"), drawn)
    svg = drawn["svg"]
    assert callable(svg)
    assert svg() == script.with_suffix(".svg").read_text("utf-8")
