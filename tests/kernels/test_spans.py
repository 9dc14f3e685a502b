"""Multimodal rows against their definitions, pair by pair."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ernie5.kernels.flashmask import spans
from tests.kernels.test_masks import assert_sees, part_of, partitions


@st.composite
def described_spans(draw):
    """A span and its definition ``sees(row, column)`` for rows of the span (None: rows behind it)."""
    kind = draw(st.sampled_from(["text", "blocks", "image", "sound", "video"]))
    if kind == "text":
        return spans.text(draw(st.integers(0, 6))), lambda row, j: row is None or j <= row
    if kind == "blocks":
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        return spans.blocks(sizes), lambda row, j: row is None or part_of(sizes, j) <= part_of(sizes, row)
    if kind == "image":
        height, width, radius = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4)))
        return (
            spans.image_window(height, width, radius),
            lambda row, j: row is None or abs(row // width - j // width) <= radius,
        )
    if kind == "sound":
        frames, window = draw(st.tuples(st.integers(0, 8), st.integers(1, 9)))
        every = draw(st.none() | st.integers(1, 9))
        return (
            spans.sound_window(frames, window, every),
            lambda row, j: row is None or (j <= row and (row - j < window or bool(every and j % every == 0))),
        )
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dropped = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    window = draw(st.none() | st.integers(1, 5))

    def sees(row: int | None, j: int) -> bool:
        frame = part_of(sizes, j)
        if row is None:
            return not dropped[frame]
        age = part_of(sizes, row) - frame
        return age == 0 or (age > 0 and not dropped[frame] and (window is None or age < window))

    return spans.video(sizes, dropped, window), sees


@given(st.lists(st.lists(described_spans(), max_size=3), max_size=3), st.integers(0, 4), st.integers(1, 40))
def test_packed_documents_of_spans(documents, padding, rows):
    # Where each position lies: (document, number of the span in it, place in the span, definition).
    where = []
    for number, document in enumerate(documents):
        for index, (span, sees) in enumerate(document):
            where += [(number, index, place, sees) for place in range(len(span))]
    where += [(len(documents), 0, place, lambda row, j: j <= row) for place in range(padding)]
    columns = len(where)
    if not columns:
        return

    def sees(p: int, j: int) -> bool:
        if p < 0 or where[p][0] != where[j][0] or where[j][1] > where[p][1]:
            return False
        row = where[p][2] if where[j][1] == where[p][1] else None
        return where[j][3](row, where[j][2])

    mask = spans.packed(rows, columns, [[span for span, _ in document] for document in documents])
    assert mask.shape == (1, 1, columns, 3, 2)
    assert_sees(mask, rows, columns, sees)


@given(st.data(), st.integers(1, 24), st.integers(1, 24), st.integers(0, 3))
def test_each_document_has_its_own_window(data, rows, columns, sinks):
    lengths = data.draw(partitions(columns, 1))
    windows = data.draw(st.lists(st.integers(1, 26), min_size=len(lengths), max_size=len(lengths)))

    def sees(p: int, j: int) -> bool:
        document = part_of(lengths, j)
        place = j - sum(lengths[:document])
        return part_of(lengths, p) == document and j <= p and (p - j < windows[document] or place < sinks)

    mask = spans.dynamic_window(rows, columns, lengths, torch.tensor(windows), sinks)
    assert_sees(mask, rows, columns, sees)


def test_windows_follow_the_documents_length():
    tiers = ((0, 100), (400, 50), (1000, 20))
    assert spans.windows_by_length([1, 100, 400, 401, 1000, 1001, 10**6], tiers).tolist() == [
        *(100, 100, 100),
        *(50, 50),
        *(20, 20),
    ]


def test_cost_per_token_is_flat_beyond_the_window():
    """Tiles per row strip of a document much longer than its window: the window's, whatever the length."""
    from ernie5.kernels.flashmask import MaskPlan

    most = []
    for length in (8192, 32768):
        windows = spans.windows_by_length([length], ((0, 1024), (4096, 512)))
        tiles = MaskPlan.from_intervals(
            spans.dynamic_window(length, length, [length], windows), length
        ).row_tiles()
        most.append(int(tiles.offsets.diff().max()))
    assert most == [9, 9]
