"""From unified tokens to what the network sees: the whole of next-group-of-tokens in one place.

One sequence carries every modality (ERNIE 5.0 report, section 2):

* text: position i predicts token i + 1 (NTP).
* a generated picture: the position before it (its grid marker) predicts scale 1; the inputs of a scale-k
  block are the earlier scales, accumulated and resized to the grid of scale k, one slot per predicted cell
  and visible to each other in both directions; a last slot holds the sum of all scales and predicts the end
  marker (NFSP).
* generated sound: a frame predicts the next one, all residual levels depth-wise; the begin marker predicts
  the first frame and the last frame predicts "end" at every level (NCP).
* understood media: features from before quantisation; for sounds, beside the summed code embeddings. There is
  no loss on them.

:func:`lay_out` does one sample in numpy; :mod:`ernie5.backbone.rows` joins samples into rows of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ernie5.backbone.config import BackboneConfig
from ernie5.kernels.scales import area_down, bilinear_up, gain_of
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, SequenceLayout, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary

TOKEN, FEATURE, SCALE, FRAME = range(4)  # what an input position holds
NO_TARGET = -1
MAX_SCALES = 16


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """One sample of n positions, not yet packed. Row numbers count from the sample's start.

    Attributes:
        kind: int8 ``[n]``, one of TOKEN, FEATURE, SCALE, FRAME.
        token: int64 ``[n]``, unified id where kind is TOKEN, else 0.
        position: float32 ``[n, 3]``, Uni-RoPE (t, h, w).
        first_visible: int32 ``[n]``: first row that sees this column.
        hidden: int32 ``[n, 2]``: rows in [start, end) that don't see this column (sparse audio).
        features: per encoder float16 ``[m, K, D]`` for the FEATURE positions in order.
        scale_values, scale_index: float32 ``[c, bits]`` and int64 ``[c]`` for the SCALE positions in order.
        frames: int64 ``[f, Q]`` codes for the FRAME positions in order.
        frame_features: float16 ``[f, D]``, all sound encoders side by side; 0 for generated frames.
        text_target: int64 ``[n]``, NO_TARGET where the text head has nothing to predict.
        text_weight: loss weight of each text target, 1/sqrt of their number in the sample, so that a one-word
            answer is not drowned by pages of prose (the square averaging of InternVL 2.5, arXiv 2412.05271).
        bits_at, bits_target, bits_weight: positions, uint32 codes and loss weights of the vision head; the
            scale 1 cell is predicted at a TOKEN, all others at their SCALE slots.
        audio_at, audio_target: positions and int64 ``[a, Q]`` codes (``audio_codebook`` means "end").
    """

    kind: np.ndarray
    token: np.ndarray
    position: np.ndarray
    first_visible: np.ndarray
    hidden: np.ndarray
    features: dict[str, np.ndarray]
    scale_values: np.ndarray
    scale_index: np.ndarray
    frames: np.ndarray
    frame_features: np.ndarray
    text_target: np.ndarray
    text_weight: float
    bits_at: np.ndarray
    bits_target: np.ndarray
    bits_weight: np.ndarray
    audio_at: np.ndarray
    audio_target: np.ndarray

    def __len__(self) -> int:
        return len(self.kind)


class SampleLayoutBuilder:
    """Appends positions; every method adds one kind of input and its targets."""

    def __init__(self, config: BackboneConfig, vocabulary: UnifiedVocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.kind: list[np.ndarray] = []
        self.token: list[np.ndarray] = []
        self.position: list[np.ndarray] = []
        self.first_visible: list[np.ndarray] = []
        self.hidden: list[np.ndarray] = []
        self.features: dict[str, list[np.ndarray]] = {name: [] for name in config.features}
        self.scale_values: list[np.ndarray] = []
        self.scale_index: list[np.ndarray] = []
        self.frames: list[np.ndarray] = []
        self.frame_features: list[np.ndarray] = []
        self.bits: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.audio: list[tuple[np.ndarray, np.ndarray]] = []
        self.targets: dict[int, int] = {}
        self.text_targets: list[tuple[int, np.ndarray]] = []
        self.length = 0
        self.clock = 0.0  # the next text position of Uni-RoPE

    def _add(self, kind: int, count: int, position: np.ndarray, token: np.ndarray | int = 0) -> int:
        start = self.length
        self.kind.append(np.full(count, kind, np.int8))
        self.token.append(np.full(count, token, np.int64) if isinstance(token, int) else token)
        self.position.append(position)
        self.first_visible.append(np.arange(start, start + count, dtype=np.int32))
        self.hidden.append(np.zeros((count, 2), np.int32))
        self.length += count
        return start

    def _line(self, count: int) -> np.ndarray:
        """Positions of a one-dimensional run: t = h = w, one step each."""
        steps = np.arange(self.clock, self.clock + count, dtype=np.float32)
        self.clock += count
        return np.repeat(steps[:, None], 3, 1)

    def marker(self, token: int, target: bool) -> None:
        if target:
            self.targets[self.length - 1] = token
        self._add(TOKEN, 1, self._line(1), token)

    def text(self, span: TokenSpan, target: bool) -> None:
        assert isinstance(span.layout, SequenceLayout)
        if span.layout.vocabulary_size != self.config.text_vocabulary:
            raise InvalidInputError(
                f"text tokens come from a vocabulary of {span.layout.vocabulary_size}, the model's has "
                f"{self.config.text_vocabulary}; use the tokenizer the model was trained with"
            )
        codes = span.codes.astype(np.int64)
        start = self._add(TOKEN, len(codes), self._line(len(codes)), codes)
        if target and len(codes):
            self.text_targets.append((start - 1, codes))

    def understood_picture(self, span: TokenSpan) -> None:
        assert isinstance(span.layout, ScalesLayout)
        if span.layout.frames != 1:
            raise InvalidInputError(
                f"only single pictures can be read; this span has {span.layout.frames} frames"
            )
        height, width = span.layout.final_grid
        rows, columns = height // 2, width // 2
        count = rows * columns
        for name, feature_width in self.config.features.items():
            values = span.features.get(name)
            if values is None:
                raise InvalidInputError(
                    f"a picture to be understood lacks the {name!r} features; tokenise it with features"
                )
            if values.shape[0] != count or values.shape[2] != feature_width:
                raise InvalidInputError(
                    f"{name!r} features of shape {values.shape} do not fit {count} tokens of {feature_width}"
                )
            self.features[name].append(values)
        grid = np.zeros((rows, columns, 3), np.float32)
        grid[..., 1] = (np.arange(rows, dtype=np.float32)[:, None] + 0.5) * height / rows - 0.5
        grid[..., 2] = (np.arange(columns, dtype=np.float32)[None, :] + 0.5) * width / columns - 0.5
        start = self._add(FEATURE, count, grid.reshape(-1, 3) + np.float32(self.clock))
        self.first_visible[-1][:] = start
        self.clock += max(height, width)

    def generated_picture(self, span: TokenSpan) -> None:
        layout = span.layout
        assert isinstance(layout, ScalesLayout)
        if layout.bits != self.config.bits:
            raise InvalidInputError(f"codes have {layout.bits} bits, the model predicts {self.config.bits}")
        if layout.schedule[0] != (1, 1):
            raise InvalidInputError(f"scale 1 must be a single cell, got {layout.schedule[0]}")
        if layout.frames != 1:
            raise InvalidInputError("only single pictures can be generated; this span has several frames")
        codes = span.codes
        inputs = scale_inputs(codes, layout)
        first = self.length - 1  # the grid marker predicts scale 1
        start = self.picture_slots(layout, inputs)
        cells = layout.cells_per_frame
        at = np.concatenate(([first], np.arange(start, start + cells - 1)))
        self.bits.append((at, codes, scale_weights(layout.schedule)))

    def picture_slots(self, layout: ScalesLayout, inputs: np.ndarray) -> int:
        """Input slots of scales 2.. and of the sum of all scales; returns the first slot's row."""
        start = self.length
        origin = np.float32(self.clock)
        offset = 0
        for index, grid in enumerate(layout.schedule[1:], 1):
            count = grid[0] * grid[1]
            block = self._add(SCALE, count, origin + cell_positions(grid, layout.final_grid))
            self.first_visible[-1][:] = block
            self.scale_values.append(inputs[offset : offset + count])
            self.scale_index.append(np.full(count, index, np.int64))
            offset += count
        self._add(SCALE, 1, origin + cell_positions((1, 1), layout.final_grid))
        self.scale_values.append(inputs[offset:])
        self.scale_index.append(np.full(1, MAX_SCALES - 1, np.int64))
        self.clock += max(layout.final_grid)
        return start

    def sound(self, span: TokenSpan, target: bool) -> None:
        layout, config = span.layout, self.config
        assert isinstance(layout, CodebooksLayout)
        if layout.codebook_size != config.audio_codebook or layout.levels < config.audio_levels:
            raise InvalidInputError(
                f"sound has {layout.levels} levels of {layout.codebook_size} codes, the model reads "
                f"{config.audio_levels} of {config.audio_codebook}"
            )
        codes = span.codes[:, : config.audio_levels].astype(np.int64)
        count = len(codes)
        start = self._add(FRAME, count, self._line(count))
        self.frames.append(codes)
        self.frame_features.append(self._frame_features(span, target))
        if config.audio_mask == "sparse":
            frame = np.arange(count)
            hidden = self.hidden[-1]
            hidden[:, 0] = np.minimum(start + frame + config.audio_window, start + count)
            hidden[:, 1] = start + count
            hidden[frame % config.audio_anchor_every == 0] = 0
        if target:
            end = np.full((1, config.audio_levels), config.audio_codebook, np.int64)
            at = np.arange(start - 1, start + count)
            self.audio.append((at, np.concatenate((codes, end))))

    def _frame_features(self, span: TokenSpan, target: bool) -> np.ndarray:
        widths = self.config.sound_features
        if target or not widths:
            return np.zeros((len(span), sum(widths.values())), np.float16)
        parts = []
        for name, width in widths.items():
            values = span.features.get(name)
            if values is None:
                raise InvalidInputError(
                    f"a sound to be understood lacks the {name!r} features; tokenise it with features"
                )
            if values.shape != (len(span), 1, width):
                raise InvalidInputError(
                    f"{name!r} features of shape {values.shape} do not fit {len(span)} frames of {width}"
                )
            parts.append(values[:, 0])
        return np.concatenate(parts, 1)

    def finish(self) -> SampleLayout:
        config = self.config
        text_target = np.full(self.length, NO_TARGET, np.int64)
        for start, codes in self.text_targets:
            text_target[start : start + len(codes)] = codes
        for start, token in self.targets.items():
            text_target[start] = token
        # The sound's own heads predict its end; the text head then has nothing to say at the last frame.
        for at, _ in self.audio:
            text_target[at[-1]] = NO_TARGET
        empty = np.zeros(0, np.int64)
        return SampleLayout(
            kind=np.concatenate(self.kind),
            token=np.concatenate(self.token),
            position=np.concatenate(self.position),
            first_visible=np.concatenate(self.first_visible),
            hidden=np.concatenate(self.hidden),
            features={name: np.concatenate(parts) for name, parts in self.features.items() if parts},
            scale_values=np.concatenate(self.scale_values)
            if self.scale_values
            else np.zeros((0, config.bits), np.float32),
            scale_index=np.concatenate(self.scale_index) if self.scale_index else empty,
            frames=np.concatenate(self.frames)
            if self.frames
            else np.zeros((0, config.audio_levels), np.int64),
            frame_features=np.concatenate(self.frame_features)
            if self.frame_features
            else np.zeros((0, sum(config.sound_features.values())), np.float16),
            text_target=text_target,
            text_weight=1 / max(1, int((text_target != NO_TARGET).sum())) ** 0.5,
            bits_at=np.concatenate([at for at, _, _ in self.bits]) if self.bits else empty,
            bits_target=np.concatenate([codes for _, codes, _ in self.bits])
            if self.bits
            else np.zeros(0, np.uint32),
            bits_weight=np.concatenate([weight for _, _, weight in self.bits])
            if self.bits
            else np.zeros(0, np.float32),
            audio_at=np.concatenate([at for at, _ in self.audio]) if self.audio else empty,
            audio_target=np.concatenate([codes for _, codes in self.audio])
            if self.audio
            else np.zeros((0, config.audio_levels), np.int64),
        )


def lay_out(sequence: TokenSequence, config: BackboneConfig, vocabulary: UnifiedVocabulary) -> SampleLayout:
    """Lay one sample out.

    Raises:
        InvalidInputError: spans that the model can't take (foreign vocabulary, bit width or codebook, missing
            features, an unknown layout).
    """
    builder = SampleLayoutBuilder(config, vocabulary)
    lay_out_events(builder, sequence)
    return builder.finish()


def lay_out_events(builder: SampleLayoutBuilder, sequence: TokenSequence) -> None:
    """Append a sample's markers and spans to ``builder``, targets with their losses."""
    for event, target in sequence.events(builder.vocabulary):
        if isinstance(event, int):
            builder.marker(event, target)
        elif isinstance(event.layout, SequenceLayout):
            builder.text(event, target)
        elif isinstance(event.layout, ScalesLayout):
            if target:
                builder.generated_picture(event)
            else:
                builder.understood_picture(event)
        else:
            builder.sound(event, target)


def cell_positions(grid: tuple[int, int], final: tuple[int, int]) -> np.ndarray:
    """(0, h, w) of a grid's cells on the final grid, scales aligned on their geometric centres; float32
    ``[cells, 3]`` (report section 2.2.3: cell i of n lies at (i + 0.5) H / n - 0.5)."""
    out = np.zeros((*grid, 3), np.float32)
    out[..., 1] = ((np.arange(grid[0], dtype=np.float32) + 0.5) * final[0] / grid[0] - 0.5)[:, None]
    out[..., 2] = ((np.arange(grid[1], dtype=np.float32) + 0.5) * final[1] / grid[1] - 0.5)[None, :]
    return out.reshape(-1, 3)


def code_signs(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bit channels as ±1/sqrt(bits), float32 ``[n, bits]``; bit 0 is channel 0."""
    ones = (codes[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return (ones.astype(np.float32) * 2 - 1) / np.float32(np.sqrt(bits))


def scale_inputs(codes: np.ndarray, layout: ScalesLayout) -> np.ndarray:
    """Inputs of the slots of scales 2.. and of the closing slot, float32 ``[cells - 1 + 1, bits]``."""
    return history_matrix(layout.schedule) @ code_signs(codes, layout.bits)


@lru_cache(maxsize=64)
def history_matrix(schedule: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The linear map from all cells' values to the inputs of all slots, float32 ``[slots, cells]``.

    The slots are those of ``kernels.scales.block_inputs`` and, last, ``final_sum``. Both are linear in
    the values, so pushing a basis through the resampling once turns each picture into one product.
    """
    sizes = [height * width for height, width in schedule]
    starts = np.cumsum([0, *sizes])
    matrix = np.zeros((starts[-1] - sizes[0] + 1, starts[-1]), np.float32)
    for scale, grid in enumerate(schedule):
        basis = torch.eye(sizes[scale]).view(-1, *grid)
        contribution = bilinear_up(basis, schedule[-1]) * gain_of(scale)
        columns = slice(starts[scale], starts[scale + 1])
        for later in range(scale + 1, len(schedule)):
            rows = slice(starts[later] - sizes[0], starts[later + 1] - sizes[0])
            matrix[rows, columns] = area_down(contribution, schedule[later]).flatten(1).T.numpy()
        matrix[-1, columns] = contribution.mean((1, 2)).numpy()
    return matrix


def scale_weights(schedule: Sequence[tuple[int, int]]) -> np.ndarray:
    """Loss weight of each cell, proportional to 1/sqrt(area of its scale), mean 1 (Infinity's balance of
    early against late scales)."""
    areas = np.concatenate([np.full(h * w, h * w, np.float32) for h, w in schedule])
    weights = 1 / np.sqrt(areas)
    return (weights / weights.mean()).astype(np.float32)
