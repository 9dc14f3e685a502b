"""Hypothesis strategies for every value of the contract; tests reach them by ``st.from_type(TokenSpan)``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Role, Sample, Segment
from ernie5.protocol.tokens import (
    CodebooksLayout,
    ResizePad,
    ScalesLayout,
    SequenceLayout,
    TokenSegment,
    TokenSequence,
    TokenSpan,
)

text = st.text(st.characters(codec="utf-8"), max_size=12)
roles: st.SearchStrategy[Role] = st.sampled_from(("context", "target"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
metadata = st.dictionaries(text, json_values, max_size=3)
hashes = st.text("0123456789abcdef", min_size=1, max_size=32)


def modalities(layout: str) -> st.SearchStrategy[str]:
    """A known modality of that layout, or a plug-in's."""
    known = [name for name, modality in MODALITIES.items() if modality.layout == layout]
    return st.sampled_from([*known, "plugin"])


@st.composite
def transforms(draw: st.DrawFn) -> ResizePad:
    size = st.integers(1, 10_000)
    height, width, top, left = draw(size), draw(size), draw(st.integers(0, 50)), draw(st.integers(0, 50))
    margin = st.integers(0, 50)
    return ResizePad(
        draw(size),
        draw(size),
        height,
        width,
        top,
        left,
        top + height + draw(margin),
        left + width + draw(margin),
    )


sequence_layouts = st.builds(SequenceLayout, st.integers(1, 2**31 - 1))
scales_layouts = st.builds(
    ScalesLayout,
    bits=st.integers(1, 32),
    schedule=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4).map(tuple),
    frames=st.integers(1, 3),
    transform=st.none() | transforms(),
)
codebooks_layouts = st.builds(
    CodebooksLayout,
    codebook_size=st.integers(1, 2**15),
    levels=st.integers(1, 16),
    frame_rate=st.floats(0.001, 1e6),
    sample_rate=st.floats(0.001, 1e6),
    samples=st.integers(0, 2**40 - 1),
    channels=st.integers(1, 1024),
)


@st.composite
def codes_for(draw: st.DrawFn, layout: SequenceLayout | ScalesLayout | CodebooksLayout) -> np.ndarray:
    if isinstance(layout, SequenceLayout):
        size = draw(st.integers(0, 20))
        return draw(hnp.arrays(np.int32, size, elements=st.integers(0, layout.vocabulary_size - 1)))
    if isinstance(layout, ScalesLayout):
        size = layout.cells_per_frame * layout.frames
        return draw(hnp.arrays(np.uint32, size, elements=st.integers(0, 2**layout.bits - 1)))
    shape = (draw(st.integers(0, 8)), layout.levels)
    return draw(hnp.arrays(np.int16, shape, elements=st.integers(0, layout.codebook_size - 1)))


halves = hnp.arrays(
    np.float16,
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=3),
    elements=st.floats(-100, 100, width=16),
)


@st.composite
def spans(draw: st.DrawFn) -> TokenSpan:
    layout = draw(sequence_layouts | scales_layouts | codebooks_layouts)
    return TokenSpan(
        modality=draw(modalities(layout.kind)),
        layout=layout,
        codes=draw(codes_for(layout)),
        tokenizer=draw(hashes),
        features=draw(st.dictionaries(text, halves, max_size=2)),
        latent=draw(st.none() | halves),
        metadata=draw(metadata),
    )


sequences = st.builds(
    TokenSequence,
    sample_id=hashes,
    segments=st.lists(st.builds(TokenSegment, spans(), roles), max_size=3).map(tuple),
    metadata=metadata,
)


@st.composite
def segments(draw: st.DrawFn, *, read: bool = False) -> Segment:
    """A segment; with ``read`` one whose payload is there, not a reference."""
    payloads: list[dict[str, st.SearchStrategy]] = [{"text": text}, {"data": st.binary(max_size=40)}]
    if not read:
        payloads.append({"reference": text})
    payload = draw(st.one_of([st.fixed_dictionaries(choice) for choice in payloads]))
    return Segment(
        modality=draw(st.sampled_from([*MODALITIES, "plugin"])),
        role=draw(roles),
        content_type=draw(st.none() | text),
        metadata=draw(metadata),
        **payload,
    )


samples = st.builds(Sample, segments=st.lists(segments(read=True), min_size=1, max_size=4).map(tuple))


for kind, strategy in {
    SequenceLayout: sequence_layouts,
    ScalesLayout: scales_layouts,
    CodebooksLayout: codebooks_layouts,
    ResizePad: transforms(),
    TokenSpan: spans(),
    TokenSequence: sequences,
    Segment: segments(),
    Sample: samples,
}.items():
    st.register_type_strategy(kind, strategy)


@pytest.fixture(scope="session")
def small_spans() -> list[TokenSpan]:
    """One small span of each layout, with all its optional parts."""
    return [
        TokenSpan(
            "text", SequenceLayout(8192), np.array([0, 5, 8191], np.int32), "ab", metadata={"speaker": "é"}
        ),
        TokenSpan(
            "image",
            ScalesLayout(16, ((1, 1), (2, 2)), 1, ResizePad(3, 5, 3, 5, 1, 1, 8, 8)),
            np.arange(5, dtype=np.uint32),
            "cd",
            {"patches": np.arange(8, dtype=np.float16).reshape(1, 4, 2)},
            np.ones((2, 2, 2), np.float16),
        ),
        TokenSpan(
            "speech",
            CodebooksLayout(256, 2, 12.5, 16000.0, 3000),
            np.array([[1, 255], [0, 7], [3, 4]], np.int16),
            "ef",
        ),
    ]
