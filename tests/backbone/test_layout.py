"""The unified layout: inputs, targets, masks and positions of every kind of segment."""

import numpy as np
import pytest
import torch

from ernie5.backbone.layout import FRAME, NO_TARGET, SCALE, history_matrix, lay_out
from ernie5.backbone.rows import pack
from ernie5.kernels.scales import block_inputs, codes_to_values, final_sum
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.grids import GRIDS, schedule_for
from tests.backbone.samples import NANO, VOCABULARY, mixed, picture, sequence, sound, text


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_text_predicts_the_next_token_and_the_end_of_the_turn(rng):
    question, answer = text(rng, "context", 3), text(rng, "target", 2)
    layout = lay_out(sequence(question, answer), NANO, VOCABULARY)
    marker = VOCABULARY.marker
    expected = [marker("begin_sample"), marker("context"), *question.span.codes]
    expected += [marker("target"), *answer.span.codes, marker("end_turn")]
    assert layout.token.tolist() == expected
    predicted = [(at, t) for at, t in enumerate(layout.text_target.tolist()) if t != NO_TARGET]
    assert predicted == [(5, answer.span.codes[0]), (6, answer.span.codes[1]), (7, marker("end_turn"))]


def test_generated_picture_predicts_every_cell_from_coarser_scales(rng):
    target = picture(rng, "target")
    layout = lay_out(sequence(text(rng, "context", 2), target), NANO, VOCABULARY)
    schedule = target.span.layout.schedule
    assert len(layout.bits_at) == 1 + 4 + 16 and (layout.bits_target == target.span.codes).all()
    # Scale 1 is predicted by the grid marker, right after the begin marker.
    grid = layout.bits_at[0]
    assert layout.token[grid] == VOCABULARY.marker("grid_4x4")
    assert layout.token[grid - 1] == VOCABULARY.marker("begin_image")
    assert layout.text_target[grid - 1] == VOCABULARY.marker("grid_4x4")
    assert (layout.kind[layout.bits_at[1:]] == SCALE).all()
    # The slots' inputs are those of the tokenizer's own arithmetic.
    codes = target.span.codes
    np.testing.assert_allclose(
        layout.scale_values[:-1], block_inputs(codes, schedule, NANO.bits).numpy(), atol=1e-5
    )
    np.testing.assert_allclose(
        layout.scale_values[-1], final_sum(codes, schedule, NANO.bits).numpy(), atol=1e-5
    )
    closing = layout.bits_at[-1] + 1
    assert layout.text_target[closing] == VOCABULARY.marker("end_image")


@pytest.mark.parametrize("grid", GRIDS)
def test_history_matrix_is_the_tokenizers_arithmetic_on_every_grid(grid, rng):
    schedule = schedule_for(grid)
    codes = rng.integers(0, 1 << 8, sum(h * w for h, w in schedule)).astype(np.uint32)
    mapped = history_matrix(schedule) @ codes_to_values(codes, 8).numpy()
    np.testing.assert_allclose(mapped[:-1], block_inputs(codes, schedule, 8).numpy(), atol=2e-6)
    np.testing.assert_allclose(mapped[-1], final_sum(codes, schedule, 8).numpy(), atol=2e-6)


def test_sound_predicts_each_frame_and_its_end_at_every_level(rng):
    target = sound(rng, "target", frames=4, levels=5)
    layout = lay_out(sequence(text(rng, "context", 2), target), NANO, VOCABULARY)
    assert layout.token[layout.audio_at[0]] == VOCABULARY.marker("begin_speech")
    assert (layout.kind[layout.audio_at[1:]] == FRAME).all()
    kept = target.span.codes[:, : NANO.audio_levels]
    assert (layout.audio_target[:-1] == kept).all() and (layout.audio_target[-1] == NANO.audio_codebook).all()
    # The audio heads announce the end; the text head stays silent at the last frame.
    assert layout.text_target[layout.audio_at[-1]] == NO_TARGET


def test_context_media_carry_no_loss(rng):
    layout = lay_out(
        sequence(picture(rng, "context"), sound(rng, "context"), text(rng, "target", 1)), NANO, VOCABULARY
    )
    assert len(layout.bits_at) == len(layout.audio_at) == 0
    assert (layout.text_target != NO_TARGET).sum() == 2


def test_positions_follow_uni_rope(rng):
    layout = lay_out(sequence(picture(rng, "context", (8, 4)), text(rng, "target", 1)), NANO, VOCABULARY)
    line = layout.position[:3]
    assert (line == line[:, :1]).all() and line[:, 0].tolist() == [0, 1, 2]
    cells = layout.position[3 : 3 + 8]
    assert (cells[:, 0] == 3).all()
    # 4 x 2 tokens centred on 2 x 2 cells of an 8 x 4 grid.
    assert sorted({float(h) for h in cells[:, 1] - 3}) == [0.5, 2.5, 4.5, 6.5]
    assert sorted({float(w) for w in cells[:, 2] - 3}) == [0.5, 2.5]
    assert layout.position[11].tolist() == [3 + 8] * 3


def test_mask_is_causal_outside_and_bidirectional_inside_a_scale(rng):
    first = lay_out(sequence(text(rng, "context", 2), picture(rng, "target")), NANO, VOCABULARY)
    second = lay_out(sequence(text(rng, "target", 3)), NANO, VOCABULARY)
    batch = pack([[first, second]], 64, NANO)
    visible = batch.plan().dense()[0, 0]
    blocks = [np.arange(at, at + n) for at, n in ((first.bits_at[1], 4), (first.bits_at[5], 16))]
    scale = np.full(64, -1)
    for number, block in enumerate(blocks):
        scale[block] = number
    document = np.repeat([0, 1, 2], [len(first), len(second), 64 - len(first) - len(second)])
    for row in range(64):
        for column in range(64):
            same = document[row] == document[column]
            together = scale[row] >= 0 and scale[row] == scale[column]
            assert bool(visible[row, column]) == (same and (column <= row or together)), (row, column)


def test_sparse_audio_sees_a_window_and_anchors(rng):
    config = NANO.model_copy(update={"audio_mask": "sparse", "audio_window": 3, "audio_anchor_every": 4})
    layout = lay_out(sequence(sound(rng, "context", 10), text(rng, "target", 1)), config, VOCABULARY)
    batch = pack([[layout]], 32, config)
    visible = batch.plan().dense()[0, 0]
    frames = np.flatnonzero(layout.kind == FRAME)
    after = frames[-1] + 1
    for i, row in enumerate(frames):
        for j, column in enumerate(frames):
            assert bool(visible[row, column]) == (j <= i and (i - j < 3 or j % 4 == 0))
    assert visible[after, frames].all()


def test_packing_is_lossless_for_every_kind(rng):
    layouts = [lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(5)]
    batch = pack([layouts[:3], layouts[3:]], 128, NANO)
    assert len(batch.text_at) == sum((item.text_target != NO_TARGET).sum() for item in layouts)
    assert (batch.bits_target.numpy() == np.concatenate([item.bits_target for item in layouts])).all()
    assert torch.equal(batch.frames, torch.from_numpy(np.concatenate([item.frames for item in layouts])))
    assert batch.samples == 5 + 2  # two rows' padding


def test_foreign_spans_are_refused_with_the_numbers(rng):
    wide = NANO.model_copy(update={"bits": 16})
    with pytest.raises(InvalidInputError, match=r"6 bits.*16"):
        lay_out(sequence(text(rng, "context"), picture(rng, "target")), wide, VOCABULARY)
    with pytest.raises(InvalidInputError, match="levels"):
        lay_out(sequence(sound(rng, "context", levels=2)), NANO, VOCABULARY)
    other = NANO.model_copy(update={"text_vocabulary": 60})
    with pytest.raises(InvalidInputError, match="vocabulary"):
        lay_out(sequence(text(rng, "context")), other, VOCABULARY)
