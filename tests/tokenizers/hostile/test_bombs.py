"""Headers that promise too much, and structures too deep: refused by what they say, before they unfold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tokenizers.hostile.files import document_bombs, picture_bombs, sound_bombs
from tests.tokenizers.hostile.worker import Reply

Tokenise = Callable[..., Reply]
PICTURES, SOUNDS, DOCUMENTS = picture_bombs(), sound_bombs(), document_bombs()
SMALL = 64 << 20


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures(tokenise: Tokenise, kind: str) -> None:
    reply = tokenise("image", PICTURES[kind], peak=SMALL)
    assert reply.outcome == "refused" and reply.seconds < 20


@pytest.mark.parametrize("modality", ["sketch", "depth", "video"])
@pytest.mark.parametrize("kind", ["png", "gif"])
def test_pictures_as_other_modalities(tokenise: Tokenise, modality: str, kind: str) -> None:
    assert tokenise(modality, PICTURES[kind], f"image/{kind}", peak=SMALL).outcome == "refused"


@pytest.mark.parametrize("kind", SOUNDS)
def test_sounds(tokenise: Tokenise, kind: str) -> None:
    assert tokenise("speech", SOUNDS[kind]).outcome == "refused"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(tokenise: Tokenise, name: str) -> None:
    modality, content_type, data = DOCUMENTS[name]
    reply = tokenise(modality, data, content_type)
    # A row of half a million empty cells is a table, and comes back.
    assert reply.outcome == ("tokens" if name == "columns" else "refused"), reply
    assert reply.seconds < 30
    assert "passwd" not in reply.message and "root:" not in reply.message


@pytest.mark.parametrize(
    "data",
    [b"\xed\xa0\x80", b"\xff\xfe\x00", b"ok \xc3", b"\xc0\xaf", "a\ud800".encode("utf-16", "surrogatepass")],
)
@pytest.mark.parametrize("modality", ["text", "code", "table", "molecule", "protein"])
def test_text_that_is_no_unicode(tokenise: Tokenise, modality: str, data: bytes) -> None:
    assert tokenise(modality, data).error == "InvalidMediaError"
