"""The arithmetic of scales: equal to the numpy reference, to torch's own resampling, to itself in any
batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5.kernels import scales, scales_reference
from ernie5.protocol.grids import GRIDS, schedule_for

SCHEDULES = [
    schedule_for((8, 8)),
    schedule_for((6, 10)),
    schedule_for((7, 5)),
    schedule_for((4, 16)),
    ((1, 1), (2, 3), (3, 4), (5, 9)),
    ((1, 1),),
    ((3, 2),),
]


def latent_for(schedule, bits=16, seed=0, batch=()):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, bits, *schedule[-1], generator=random)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bits", [1, 16, 32])
def test_agrees_with_the_reference(schedule, bits):
    latents = latent_for(schedule, bits, batch=(3,))
    codes = scales.quantise(latents, schedule)
    flat = scales.join_codes(codes)
    assert flat.shape == (3, scales.cells_of(schedule))
    inputs = scales.block_inputs(flat, schedule, bits)
    for item, latent in enumerate(latents.numpy()):
        expected = scales_reference.quantise(latent, schedule)
        for scale, grid in zip(codes, expected):
            np.testing.assert_array_equal(scale[item].numpy(), grid)
        for upto in range(len(schedule) + 1):
            np.testing.assert_allclose(
                scales.accumulate(flat[item], schedule, bits, upto).numpy(),
                scales_reference.accumulate(expected, schedule, bits, upto),
                atol=1e-6,
            )
        np.testing.assert_allclose(
            inputs[item].numpy(), scales_reference.block_inputs(expected, schedule, bits), atol=1e-6
        )
        np.testing.assert_allclose(
            scales.final_sum(flat, schedule, bits)[item].numpy(),
            scales_reference.final_sum(expected, schedule, bits),
            atol=1e-6,
        )


@given(st.tuples(*[st.integers(1, 17)] * 2), st.tuples(*[st.integers(1, 17)] * 2), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_resampling_is_adaptive_mean_and_bilinear(source, target, seed):
    values = torch.randn(2, 3, *source, generator=torch.Generator().manual_seed(seed))
    down = torch.nn.functional.adaptive_avg_pool2d(values, target)
    up = torch.nn.functional.interpolate(values, size=target, mode="bilinear", align_corners=False)
    torch.testing.assert_close(scales.area_down(values, target), down, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scales.bilinear_up(values, target), up, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_batch_gives_the_codes_of_each_alone(grid):
    schedule = schedule_for(grid)
    latents = latent_for(schedule, batch=(2, 5))
    together = scales.join_codes(scales.quantise(latents, schedule))
    for row in range(2):
        for column in range(5):
            alone = scales.join_codes(scales.quantise(latents[row, column], schedule))
            assert torch.equal(together[row, column], alone)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_codes_and_values_are_inverse_up_to_32_bits(integers):
    codes = np.array(integers, dtype=np.uint32)
    values = scales.codes_to_values(codes, 32)
    assert torch.equal(values.abs(), torch.full_like(values, float(np.float32(1 / np.sqrt(32)))))
    np.testing.assert_array_equal(scales.values_to_codes(values).numpy().astype(np.uint32), codes)


def test_bit_zero_is_channel_zero():
    values = scales.codes_to_values(torch.tensor([0b0001, 0b1000]), 4)
    assert torch.equal(values, torch.tensor([[0.5, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.5, 0.5]]))


def test_block_inputs_see_only_earlier_scales():
    schedule = schedule_for((8, 8))
    codes = scales.join_codes(scales.quantise(latent_for(schedule), schedule))
    inputs = scales.block_inputs(codes, schedule, 16)
    start = 0
    for height, width in schedule:
        changed = codes.clone()
        changed[start : start + height * width] ^= 0b1011
        moved = (scales.block_inputs(changed, schedule, 16) != inputs).any(-1)
        # Slots start at scale 1: the slot of a cell of this scale or an earlier one must not move.
        end = start + height * width - 1
        assert not moved[:end].any()
        assert moved[end:].any() == (end < len(moved))
        start += height * width


def test_requantise_of_an_undamaged_history_is_quantise():
    schedule = schedule_for((6, 10))
    latent = latent_for(schedule, batch=(2,))
    codes = scales.quantise(latent, schedule)
    for target, code in zip(scales.requantise(latent, codes, schedule), codes):
        assert torch.equal(target, code)


def test_requantise_mends_flipped_bits():
    schedule = schedule_for((8, 8))
    latent = latent_for(schedule, batch=(8,)) * 0.6
    codes = scales.quantise(latent, schedule)
    flipped = [codes[0] ^ 0b0110_1001, codes[1] ^ 0b1001, *codes[2:]]
    targets = scales.requantise(latent, flipped, schedule)
    for item in range(8):
        expected = scales_reference.requantise(
            latent[item].numpy(), [scale[item].numpy() for scale in flipped], schedule
        )
        for target, want in zip(targets, expected):
            np.testing.assert_array_equal(target[item].numpy(), want)
    assert torch.equal(targets[0], codes[0])

    def error(later):
        mixed = [flipped[0], flipped[1], *later]
        return float((scales.accumulate(mixed, schedule, 16) - latent).norm())

    mended = scales.requantise(latent, [*flipped[:2], targets[2], targets[3]], schedule)
    assert error(mended[2:]) < error(codes[2:])


def test_gradients_pass_through_resampling_after_use_in_inference_mode():
    with torch.inference_mode():
        scales.area_down(torch.ones(1, 11, 13), (3, 4))
    values = torch.randn(1, 11, 13, requires_grad=True)
    scales.area_down(values, (3, 4)).sum().backward()
    assert values.grad is not None and float(values.grad.sum()) == pytest.approx(12, abs=1e-4)


def test_wrong_sizes_are_named():
    schedule = schedule_for((4, 4))
    with pytest.raises(ValueError, match="20 codes do not fill the 21 cells"):
        scales.accumulate(torch.zeros(20, dtype=torch.int64), schedule, 16)
    with pytest.raises(ValueError, match="does not end in the grid"):
        scales.quantise(torch.zeros(16, 4, 5), schedule)
    with pytest.raises(ValueError, match="33 channels"):
        scales.quantise(torch.zeros(33, 4, 4), schedule)
    with pytest.raises(ValueError, match="upto 4"):
        scales.accumulate(torch.zeros(21, dtype=torch.int64), schedule, 16, 4)
    with pytest.raises(ValueError, match="do not fill scale"):
        scales.split_codes([torch.zeros(1, 1), torch.zeros(2, 3)], schedule)
