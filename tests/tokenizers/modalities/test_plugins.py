"""A distribution of a third party adds a modality through its entry point, with ids of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ernie5.protocol import modalities
from ernie5.protocol.modalities import MODALITIES, PLUGIN_GROUP, Modality, modality_of, plugins
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import MARKERS, UnifiedVocabulary
from ernie5.protocol.wire import decode_span, encode_span
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.modalities import load_registry, round_trip, with_modalities
from ernie5.tokenizers.modalities.bases import load_base

SOURCE = Path(__file__).parent / "palette_plugin"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example distribution, built and installed by pip into a folder of its own."""
    source = tmp_path_factory.mktemp("source") / "palette"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*command, "--target", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(target))
    plugins.cache_clear()
    yield
    plugins.cache_clear()
    sys.modules.pop("palette", None)


def entry(name: str, loaded: Any) -> Any:
    """An entry point that loads ``loaded`` (raises it, where it is an error)."""

    def load() -> Any:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return SimpleNamespace(name=name, value=f"example:{name}", load=load)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes entry points appear as if their distributions were installed."""

    def make(*entries: Any) -> None:
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: entries if group == PLUGIN_GROUP else ()
        )
        plugins.cache_clear()

    yield make
    plugins.cache_clear()


def test_the_example_is_listed_and_its_sample_comes_back(installed: None) -> None:
    registry = load_registry()
    assert registry.problems == {} and list(registry.codecs)[-1] == "palette"
    assert modality_of("palette") == Modality("palette", "sequence", "text", slot=0)
    assert round_trip(registry.codecs["palette"], load_base("text")).passed


def test_the_service_takes_the_example(installed: None) -> None:
    tokenizer = with_modalities("text", load_base("text"))
    assert tokenizer.modalities[-1] == "palette"
    assert tokenizer.content_types["text/x-palette"] == "palette"
    segments = [Segment(modality="palette", text="#4E79A7 #f28e2b"), Segment(modality="palette", text="red")]
    span, error = tokenizer.encode_segments(segments)
    assert isinstance(span, TokenSpan) and "a palette holds colours" in str(error)
    assert decode_span(encode_span(span)) == span
    (medium,) = tokenizer.decode_spans([span])
    assert medium == Medium(b"#4e79a7\n#f28e2b\n", "text/x-palette")


def test_the_example_has_markers_of_its_own(installed: None) -> None:
    vocabulary = UnifiedVocabulary(8192)
    begin, end = vocabulary.marker("begin_palette"), vocabulary.marker("end_palette")
    assert (begin, end) == (8192 + 80, 8192 + 81)
    assert begin - 8192 not in MARKERS.values() and end - 8192 not in MARKERS.values()
    assert vocabulary.marker_name(begin) == "begin_palette" and vocabulary.marker_name(end) == "end_palette"
    assert vocabulary.marker_name(8192 + 82) is None
    (span,) = with_modalities("text", load_base("text")).encode_segments(
        [Segment(modality="palette", text="#ffffff")]
    )
    assert isinstance(span, TokenSpan)
    sequence = TokenSequence("0", (TokenSegment(span, "context"),))
    assert [event for event, _ in sequence.events(vocabulary) if isinstance(event, int)][-2:] == [begin, end]


def test_without_it_nothing_knows_the_modality(offer: Any) -> None:
    offer()
    with pytest.raises(ValueError, match="unknown modality 'palette'; known: text, code"):
        modality_of("palette")
    with pytest.raises(ValueError, match="unknown marker"):
        UnifiedVocabulary(1).marker("begin_palette")


@pytest.mark.parametrize(
    ("loaded", "why"),
    [
        (ImportError("no numbers"), "can't be imported: ImportError: no numbers"),
        (SimpleNamespace(), "needs an attribute `modality`"),
        (SimpleNamespace(modality=Modality("smells", "sequence", "text")), "with the name 'smell'"),
        (SimpleNamespace(modality=Modality("smell", "rings", "text")), "no known layout"),  # type: ignore[arg-type]
        (SimpleNamespace(modality=Modality("smell", "sequence", "nose")), "no known layout"),  # type: ignore[arg-type]
        (SimpleNamespace(modality=Modality("smell", "sequence", "text", slot=8)), "slot 8"),
        (SimpleNamespace(modality=Modality("smell", "sequence", "text")), "not a Codec"),
    ],
)
def test_a_broken_plugin_is_told_and_left_out(offer: Any, loaded: Any, why: str) -> None:
    offer(entry("smell", loaded))
    registry = load_registry()
    assert list(registry.codecs) == list(MODALITIES)
    assert why in registry.problems["smell"] and "example:smell" in registry.problems["smell"]


def test_names_and_slots_belong_to_one_plugin(offer: Any) -> None:
    def smell(name: str, slot: int | None) -> Any:
        return entry(name, SimpleNamespace(modality=Modality(name, "sequence", "text", slot=slot)))

    offer(smell("image", 0), smell("smell", 1), smell("smell", 2))
    problems = load_registry().problems
    assert "name of a modality of ernie-multi" in problems["image"]
    assert "also offered as" in problems["smell"]
    offer(smell("smell", 3), smell("taste", 3))
    with pytest.raises(ValueError, match="'smell' and 'taste' both want marker slot 3"):
        modalities.plugin_slots()
    offer(smell("smell", None))
    with pytest.raises(ValueError, match="declares no marker slot"):
        UnifiedVocabulary(1).marker("begin_smell")
