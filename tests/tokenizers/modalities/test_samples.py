"""Every modality's sample file goes through the shipped tokenizers, the wire and the network's layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ernie5.backbone.config import preset
from ernie5.backbone.layout import lay_out
from ernie5.protocol.errors import ErnieMultiError, TokenizerMismatchError, UnsupportedMediaError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Segment
from ernie5.protocol.spans_json import span_from_json, span_to_json
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.protocol.wire import decode_span, encode_span
from ernie5.tokenizers.base import Medium, Tokenizer
from ernie5.tokenizers.modalities import BUILT_IN, round_trip, with_modalities
from ernie5.tokenizers.modalities.bases import load_base
from ernie5.tokenizers.modalities.registry import Registry
from ernie5.tokenizers.modalities.service import ServiceTokenizer

base = cache(load_base)
OWN = [name for name, codec in BUILT_IN.items() if not codec.wraps_base]


@cache
def service(name: str) -> ServiceTokenizer:
    return with_modalities(name, base(name), Registry(BUILT_IN, {}))


def taken(name: str) -> bool:
    return name in service(MODALITIES[name].service).modalities


def sample(name: str, **more: Any) -> Segment:
    file = BUILT_IN[name].sample
    return Segment(modality=name, data=file.path.read_bytes(), content_type=file.content_type, **more)


def span_of(name: str, features: bool = False) -> TokenSpan:
    (span,) = service(MODALITIES[name].service).encode_segments([sample(name)], features=features)
    assert isinstance(span, TokenSpan), span
    return span


def test_every_modality_has_a_codec_and_ten_have_their_own() -> None:
    assert list(BUILT_IN) == list(MODALITIES)
    assert all(codec.modality is MODALITIES[name] for name, codec in BUILT_IN.items())
    assert len(OWN) >= 10


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_sample_comes_back_within_its_limit(name: str) -> None:
    codec = BUILT_IN[name]
    if not taken(name):
        with pytest.raises(UnsupportedMediaError):
            round_trip(codec, base(codec.modality.service))
        pytest.skip(f"the shipped tokenizers have no weights for {name}")
    figure = round_trip(codec, base(codec.modality.service))
    assert figure.passed, str(figure)


@pytest.mark.parametrize("name", OWN)
def test_a_figure_can_fail(name: str) -> None:
    """A reversed or shortened value is not the original: no comparison may be blind."""
    codec = BUILT_IN[name]
    value = codec.read_checked(codec.sample.path.read_bytes(), codec.sample.content_type)
    spoilt = {
        "depth": lambda: value[::-1],
        "series": lambda: type(value)(value.values[::-1], value.rate),
        "table": lambda: value[:-1],
        "points": lambda: value * 2,
        "boxes": lambda: type(value)(value.width, value.height, value.boxes[::-1]),
        "sketch": lambda: ~value,
        "molecule": lambda: value[:-1],
        "track": lambda: (value[0][::-1],),
        "strokes": lambda: type(value)(value.width, value.height, value.strokes[1:]),
        "protein": lambda: ((value[0][0], value[0][1][:-1]),),
    }[name]()
    assert codec.compare(value, value).passed
    assert not codec.compare(value, spoilt).passed


@pytest.mark.parametrize("name", BUILT_IN)
def test_spans_cross_the_wire_unchanged(name: str) -> None:
    if not taken(name):
        pytest.skip(f"the shipped tokenizers have no weights for {name}")
    span = span_of(name, features=True)
    assert decode_span(encode_span(span)) == span
    assert span_from_json(span_to_json(span, features=True)) == span
    assert span.modality == name and span.tokenizer == base(MODALITIES[name].service).hash
    again = span_of(name, features=True)
    assert np.array_equal(again.codes, span.codes)


@pytest.mark.parametrize("role", ["context", "target"])
@pytest.mark.parametrize("name", OWN)
def test_the_network_takes_every_modality_as_it_is(name: str, role: Any) -> None:
    config = preset("nano")
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    segments = (
        TokenSegment(base("text").encode("what is this?"), "context"),  # type: ignore[attr-defined]
        TokenSegment(span_of(name, features=True), role),
    )
    layout = lay_out(TokenSequence("0", segments), config, vocabulary)
    begin, end = (vocabulary.marker(f"{side}_{name}") for side in ("begin", "end"))
    assert begin in layout.token and end in layout.token
    targets = len(layout.bits_at) + len(layout.audio_at) + int((layout.text_target >= 0).sum())
    assert (targets > len(segments)) == (role == "target")


@pytest.mark.parametrize("name", OWN)
def test_truncated_samples_are_taken_or_refused(name: str) -> None:
    tokenizer = service(MODALITIES[name].service)
    data = sample(name).data or b""
    content_type = BUILT_IN[name].sample.content_type
    cuts = sorted({len(data) * step // 24 for step in range(1, 24)} - {0})
    segments = [Segment(modality=name, data=data[:cut], content_type=content_type) for cut in cuts]
    for result in tokenizer.encode_segments(segments, features=False):
        assert isinstance(result, TokenSpan) or (isinstance(result, ErnieMultiError) and result.status < 500)


@pytest.mark.parametrize("name", ["text", "audio", "vision"])
def test_a_service_mixes_its_modalities_in_one_batch(name: str) -> None:
    tokenizer = service(name)
    assert isinstance(tokenizer, Tokenizer)
    names = [modality for modality in tokenizer.modalities if modality in BUILT_IN]
    assert len(names) >= 3
    segments = [sample(modality) for modality in names]
    segments.insert(1, Segment(modality=names[-1], data=b"\xff\x00 no medium"))
    results = tokenizer.encode_segments(segments, features=False)
    assert isinstance(results[1], ErnieMultiError)
    spans = [result for result in results if isinstance(result, TokenSpan)]
    assert [span.modality for span in spans] == names
    alone = [tokenizer.encode_segments([segment], features=False)[0] for segment in segments]
    assert [span for span in alone if isinstance(span, TokenSpan)] == spans
    media = tokenizer.decode_spans(spans)
    assert all(isinstance(medium, Medium) and medium.data for medium in media)
    kept = [modality for modality in names if modality in OWN]
    assert [
        medium.content_type
        for medium, span in zip(media, spans)
        if isinstance(medium, Medium) and span.modality in OWN
    ] == [BUILT_IN[modality].content_types[0] for modality in kept]


def test_containers_are_chosen_by_content_type_and_others_refused() -> None:
    span = span_of("track")
    (medium,) = service("text").decode_spans([span], content_type="application/geo+json")
    assert isinstance(medium, Medium) and medium.data.startswith(b'{"type": "LineString"')
    for wrong in ("image/png", "text/plain"):
        (error,) = service("text").decode_spans([span], content_type=wrong)
        assert isinstance(error, UnsupportedMediaError) and "application/gpx+xml" in error.message


def test_spans_of_another_tokenizer_are_refused() -> None:
    span = span_of("depth")
    foreign = TokenSpan("depth", span.layout, span.codes, "00")
    (error,) = service("vision").decode_spans([foreign])
    assert isinstance(error, TokenizerMismatchError)


def test_a_codec_that_breaks_harms_only_its_own_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("bug")

    monkeypatch.setattr(type(BUILT_IN["track"]), "read", broken)
    results = service("text").encode_segments([sample("track"), sample("table")])
    assert isinstance(results[0], ErnieMultiError) and results[0].status == 500
    assert isinstance(results[1], TokenSpan)


def test_content_types_tell_modalities_only_where_one_claims_them() -> None:
    assert service("text").content_types["application/gpx+xml"] == "track"
    assert service("audio").content_types["text/csv"] == "series"
    assert service("vision").content_types["model/ply"] == "points"
    assert "image/png" not in service("vision").content_types
