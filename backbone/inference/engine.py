"""Continuous batching: requests of any kind share the steps of one model.

Each step first admits waiting requests (their prompts run packed in one row), then advances every running one
by its next chunk: a text id, a scale of a picture or a frame of a sound. Chunks of equal length and equal
sub-network run as one batch. The result of a request doesn't depend on its neighbours beyond
floating-point rounding, and its random numbers are its own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.inference.answer import Answer, Chunk, allowed_ids, can_generate, grid_ids
from ernie5.backbone.inference.cache import KeyValueCache
from ernie5.backbone.inference.prompt import lay_out_prompt
from ernie5.backbone.inference.sampler import draw, draw_bits, draw_rows
from ernie5.backbone.layout import (
    FRAME,
    MAX_SCALES,
    SCALE,
    TOKEN,
    SampleLayout,
    cell_positions,
    history_matrix,
)
from ernie5.backbone.layout import code_signs as signs
from ernie5.backbone.model.heads import TeacherForcing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.kernels.flashmask import flashmask_attention
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.protocol.generation import DoneEvent, Event, FinishReason, Request, SpanEvent
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary

_GROUP_OF_CHUNK = {"token": TOKEN, "frame": FRAME, "scale": SCALE}  # for pools isolated by kind of position

FRAME_RATE, SAMPLE_RATE = 12.5, 16000


class _DrawnCodes:
    """Audio codes drawn level by level, each request with its own numbers and temperature."""

    def __init__(self, engine: InferenceEngine, answers: Sequence[Answer], at: Tensor) -> None:
        self.at = at
        levels = engine.model.config.audio_levels
        self.end = engine.model.config.audio_codebook
        self.temperature = torch.tensor([answer.media_temperature for answer in answers])
        self.uniform = torch.from_numpy(
            np.stack([answer.uniforms(levels) for answer in answers])
            if answers
            else np.zeros((0, levels), np.float32)
        )
        self.codes: list[Tensor] = []

    def choose(self, level: int, logits: Tensor) -> Tensor:
        if level:
            # The first level alone decides whether the sound is over.
            logits = logits.clone()
            logits[:, self.end] = -torch.inf
        drawn = draw_rows(logits.float(), self.uniform[:, level], self.temperature)
        if level:
            drawn = torch.where(self.codes[0] == self.end, self.end, drawn)
        self.codes.append(drawn)
        return drawn

    def frames(self) -> Tensor:
        """int64 ``[A, Q]``."""
        return torch.stack(self.codes, 1)


class InferenceEngine:
    """Answers requests with one model; see :class:`ernie5.protocol.generation.Engine`.

    Args:
        model: in evaluation mode.
        tokenizers: the hashes that the model was trained with, service name to hash; spans of others are
            refused, generated spans carry them.
        capacity: requests in the running batch.
        max_length: positions a request may use, prompt and answer.
    """

    def __init__(
        self,
        model: Backbone,
        tokenizers: Mapping[str, str],
        *,
        capacity: int = 16,
        max_length: int = 1024,
        prefill_positions: int = 4096,
    ) -> None:
        self.model, self.tokenizers = model.eval(), dict(tokenizers)
        self.vocabulary = UnifiedVocabulary(model.config.text_vocabulary)
        self.cache = KeyValueCache(model.config, capacity, max_length, model.compute_dtype)
        self._capacity, self.max_length, self.prefill_positions = capacity, max_length, prefill_positions
        self._waiting: deque[tuple[Answer, SampleLayout]] = deque()
        self._running: dict[str, Answer] = {}
        self._grids = grid_ids(self.vocabulary)
        self._markers = {name: self.vocabulary.marker(name) for name in ("end_turn", "target")}

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def active(self) -> int:
        return len(self._running) + len(self._waiting)

    def submit(self, request: Request, resume: Sequence[Event] = ()) -> None:
        """Take a request; see the protocol. Raises InvalidInputError where it can't be served."""
        self._check_tokenizers(request)
        params = request.params
        foreign = [name for name in params.modalities if not can_generate(name)]
        if foreign:
            raise InvalidInputError(
                f"modalities {', '.join(foreign)} can't be generated; ask for text, code, pictures or sounds",
                param="modalities",
            )
        subnetwork = choose_subnetwork(self.model, params.depth, params.width, params.experts_per_token)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        answer = Answer(request, subnetwork, seed, slot=-1)
        layout = lay_out_prompt(answer, resume, self.model.config, self.vocabulary)
        if len(layout) >= self.max_length:
            raise InvalidInputError(
                f"the conversation takes {len(layout)} positions, this engine holds {self.max_length}; "
                "shorten it or start the engine with a larger max_length",
                param="messages",
            )
        self._waiting.append((answer, layout))

    def cancel(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored."""
        self._waiting = deque(item for item in self._waiting if item[0].request.id != request_id)
        answer = self._running.pop(request_id, None)
        if answer is not None:
            self.cache.free.append(answer.slot)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit what fits, then advance every running request by one chunk."""
        events: list[Event] = []
        # Chunks of the running ones are chosen before admission: a prompt's last position decides at once.
        running = list(self._running.values())
        self._admit(events)
        groups: dict[tuple, list[Answer]] = {}
        for answer in running:
            assert answer.chunk is not None
            kind, values, _ = answer.chunk
            groups.setdefault((answer.subnetwork, len(values), kind), []).append(answer)
        for answers in groups.values():
            self._advance(answers, events)
        return events

    # -- forward passes -----------------------------------------------------------------------------

    def _admit(self, events: list[Event]) -> None:
        """Run waiting prompts, packed into one row per sub-network, and let each say its first word."""
        while self._waiting and self.cache.free:
            subnetwork = self._waiting[0][0].subnetwork
            batch: list[tuple[Answer, SampleLayout]] = []
            total = 0
            while self._waiting and len(batch) < len(self.cache.free):
                answer, layout = self._waiting[0]
                if answer.subnetwork != subnetwork or (
                    batch and total + len(layout) > self.prefill_positions
                ):
                    break
                batch.append(self._waiting.popleft())
                total += len(layout)
            for answer, layout in batch:
                answer.slot = self.cache.free.pop()
                answer.length = len(layout)
                self._running[answer.request.id] = answer
                self.cache.hidden[answer.slot].zero_()
                self.cache.hidden[answer.slot, : len(layout)] = torch.from_numpy(
                    layout.hidden.astype(np.int64)
                )
            self._prefill(batch, total, events)

    def _prefill(self, batch: list[tuple[Answer, SampleLayout]], total: int, events: list[Event]) -> None:
        model, config = self.model, self.model.config
        row = pack([[layout for _, layout in batch]], total, config)
        plan = row.plan()
        ends = np.cumsum([len(layout) for _, layout in batch])
        starts = ends - [len(layout) for _, layout in batch]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for (answer, layout), start in zip(batch, starts):
                here = slice(int(start), int(start) + len(layout))
                self.cache.keys[layer][answer.slot, : len(layout)] = key[0, here]
                self.cache.values[layer][answer.slot, : len(layout)] = value[0, here]
            return flashmask_attention(query, key, value, plan=plan)

        # Sounds told again after a resume carry their own codes; sounds about to begin are drawn below.
        forced = TeacherForcing(row.audio_at, row.audio_target)
        sounding = [
            (answer, int(end) - 1)
            for (answer, _), end in zip(batch, ends)
            if answer.open_medium and modality_of(answer.open_medium).layout == "codebooks"
        ]
        drawn = _DrawnCodes(
            self,
            [answer for answer, _ in sounding],
            torch.tensor([at for _, at in sounding], dtype=torch.long),
        )
        first = batch[0][0].subnetwork
        routing = first.routing()
        routing.group = row.group.flatten()
        hidden = model.run(
            model.embeddings(row),
            row.positions,
            attend,
            routing,
            layers=first.layers,
            audio=_Both(forced, drawn),
        )[0]
        frames = dict(zip([answer.request.id for answer, _ in sounding], drawn.frames() if sounding else []))
        for (answer, _), end in zip(batch, ends):
            if answer.owed is not None:
                events.append(answer.token_event(answer.owed))
                answer.owed = None
            self._decide(answer, hidden[int(end) - 1 : int(end)], frames.get(answer.request.id), events)

    def _advance(self, answers: list[Answer], events: list[Event]) -> None:
        """One chunk of equal length and kind for several requests."""
        model = self.model
        chunks: list[Chunk] = [answer.chunk for answer in answers if answer.chunk is not None]
        kind, count = chunks[0][0], len(chunks[0][1])
        values = torch.stack([chunk[1] for chunk in chunks])
        positions = torch.from_numpy(np.stack([chunk[2] for chunk in chunks]))
        if kind == "token":
            x = model.embeddings.token[values]
        elif kind == "frame":
            x = model.embeddings.sound(values.flatten(0, 1)).unflatten(0, values.shape[:2])
        else:
            scale = torch.tensor([self._scale_index(answer) for answer in answers])
            x = model.embeddings.scales(values.flatten(0, 1), scale.repeat_interleave(count))
            x = x.unflatten(0, values.shape[:2])
        slots = torch.tensor([answer.slot for answer in answers])
        start = torch.tensor([answer.length for answer in answers])
        visible = self.cache.visible(slots, start, count)
        for answer in answers:
            answer.length += count

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.cache.write(layer, slots, start, key, value)
            return self.cache.attend(layer, query, slots, visible)

        sounding = [
            (index, answer)
            for index, answer in enumerate(answers)
            if answer.open_medium and modality_of(answer.open_medium).layout == "codebooks"
        ]
        # Sounds take one position a chunk, so flat positions are the indices of the requests.
        drawn = _DrawnCodes(
            self,
            [answer for _, answer in sounding],
            torch.tensor([index for index, _ in sounding], dtype=torch.long),
        )
        sub = answers[0].subnetwork
        routing = sub.routing()
        routing.group = torch.full((len(answers) * count,), _GROUP_OF_CHUNK[kind])
        hidden = model.run(x, positions, attend, routing, layers=sub.layers, audio=drawn)
        frames = dict(zip([answer.request.id for _, answer in sounding], drawn.frames() if sounding else []))
        for index, answer in enumerate(answers):
            self._decide(answer, hidden[index], frames.get(answer.request.id), events)

    # -- decisions ----------------------------------------------------------------------------------

    def _decide(self, answer: Answer, hidden: Tensor, frame: Tensor | None, events: list[Event]) -> None:
        """Choose what a request says or feeds next, given the hidden states ``[n, d]`` of its last chunk."""
        if answer.open_medium is None:
            self._decide_text(answer, hidden, events)
        elif modality_of(answer.open_medium).layout == "codebooks":
            assert frame is not None
            self._decide_sound(answer, frame, events)
        else:
            self._decide_picture(answer, hidden, events)
        if answer.request.id in self._running and answer.chunk is not None:
            needed = answer.length + len(answer.chunk[1])
            if needed > self.max_length:
                self._finish(answer, "length", events)

    def _decide_text(self, answer: Answer, hidden: Tensor, events: list[Event]) -> None:
        params = answer.params
        if answer.produced >= params.max_tokens:
            self._finish(answer, "length", events)
            return
        logits = self.model.text_logits(hidden[-1])
        logits = logits.masked_fill(~allowed_ids(answer, self.vocabulary), -torch.inf)
        token = draw(logits, float(answer.uniforms(1)[0]), params.temperature, params.top_p, params.top_k)
        if token == self._markers["end_turn"] or token in params.stop_ids:
            self._finish(answer, "stop", events)
            return
        events.append(answer.token_event(token))
        answer.anything = True
        name = self.vocabulary.marker_name(token)
        if name is not None:
            answer.open_medium = name.removeprefix("begin_")
            answer.codes = []
        answer.feed_token(token)

    def _decide_sound(self, answer: Answer, frame: Tensor, events: list[Event]) -> None:
        params, config = answer.params, self.model.config
        over = int(frame[0]) == config.audio_codebook
        limit = params.max_frames is not None and len(answer.codes) >= params.max_frames
        if over or limit or answer.produced >= params.max_tokens:
            codes = np.array(answer.codes, np.int16).reshape(-1, config.audio_levels)
            kept = config.audio_levels if params.audio_levels is None else params.audio_levels
            codes = np.ascontiguousarray(codes[:, : min(kept, config.audio_levels)])
            layout = CodebooksLayout(
                config.audio_codebook,
                codes.shape[1],
                FRAME_RATE,
                SAMPLE_RATE,
                samples=int(len(codes) * SAMPLE_RATE / FRAME_RATE),
            )
            self._close_medium(answer, layout, codes, events)
            return
        answer.usage["audio"] += 1
        answer.codes.append(frame.numpy().astype(np.int16))
        if config.audio_mask == "sparse" and (len(answer.codes) - 1) % config.audio_anchor_every:
            self.cache.hidden[answer.slot, answer.length] = torch.tensor(
                [answer.length + config.audio_window, self.max_length]
            )
        answer.chunk = ("frame", frame[None], np.full((1, 3), answer.clock, np.float32))
        answer.clock += 1

    def _decide_picture(self, answer: Answer, hidden: Tensor, events: list[Event]) -> None:
        if answer.layout is None:
            self._choose_grid(answer, hidden, events)
            return
        layout = answer.layout
        scale = len(answer.codes)
        if scale == len(layout.schedule):  # the closing slot was read
            codes = np.concatenate(answer.codes)
            answer.clock = answer.origin + max(layout.final_grid)
            self._close_medium(answer, layout, codes, events)
            answer.layout = None
            return
        log_odds = self.model.heads.bits(hidden)
        height, width = layout.schedule[scale]
        cells = height * width
        uniform = answer.uniforms(cells * layout.bits)
        answer.codes.append(draw_bits(log_odds.float(), uniform, answer.media_temperature))
        answer.usage["image"] += cells
        self._feed_scale(answer)

    def _choose_grid(self, answer: Answer, hidden: Tensor, events: list[Event]) -> None:
        wanted = answer.params.image_grid
        if wanted is not None:
            token = self.vocabulary.marker(f"grid_{wanted[0]}x{wanted[1]}")
        else:
            logits = self.model.text_logits(hidden[-1])
            mask = torch.zeros(len(logits), dtype=torch.bool)
            mask[list(self._grids)] = True
            logits = logits.masked_fill(~mask, -torch.inf)
            token = draw(logits, float(answer.uniforms(1)[0]), answer.params.temperature)
        events.append(answer.token_event(token))
        answer.layout = ScalesLayout(self.model.config.bits, schedule_for(self._grids[token]))
        answer.feed_token(token)
        answer.origin = answer.clock

    def _feed_scale(self, answer: Answer) -> None:
        """Feed the next scale's slots (the closing slot after the last), from the codes so far."""
        layout = answer.layout
        assert layout is not None
        done = np.concatenate(answer.codes)
        scale = len(answer.codes)
        matrix = history_matrix(layout.schedule)
        first = sum(h * w for h, w in layout.schedule[1:scale])
        grid = layout.schedule[scale] if scale < len(layout.schedule) else (1, 1)
        rows = matrix[first : first + grid[0] * grid[1], : len(done)]
        values = torch.from_numpy(rows @ signs(done, layout.bits))
        positions = cell_positions(grid, layout.final_grid) + np.float32(answer.origin)
        answer.chunk = ("scale", values, positions)

    @staticmethod
    def _scale_index(answer: Answer) -> int:
        assert answer.layout is not None
        scale = len(answer.codes)
        return MAX_SCALES - 1 if scale == len(answer.layout.schedule) else scale

    def _close_medium(
        self,
        answer: Answer,
        layout: ScalesLayout | CodebooksLayout,
        codes: np.ndarray,
        events: list[Event],
    ) -> None:
        name = answer.open_medium
        assert name is not None
        service = modality_of(name).service
        span = TokenSpan(name, layout, codes, self.tokenizers.get(service, ""))
        events.append(SpanEvent(answer.request.id, span))
        if isinstance(layout, CodebooksLayout):
            # Rows after the sound see all of its frames again.
            hidden = self.cache.hidden[answer.slot]
            hidden[:, 1].clamp_(max=answer.length)
        answer.open_medium, answer.codes = None, []
        end = self.vocabulary.marker(f"end_{name}")
        events.append(answer.token_event(end))
        answer.feed_token(end)

    def _finish(self, answer: Answer, reason: FinishReason, events: list[Event]) -> None:
        events.append(DoneEvent(answer.request.id, reason, answer.tally()))
        del self._running[answer.request.id]
        self.cache.free.append(answer.slot)

    def _check_tokenizers(self, request: Request) -> None:
        for segment in request.sequence.segments:
            service = modality_of(segment.span.modality).service
            expected = self.tokenizers.get(service)
            if expected is not None and segment.span.tokenizer != expected:
                raise TokenizerMismatchError(
                    f"the {segment.span.modality} tokens come from tokenizer {segment.span.tokenizer[:12]}, "
                    f"the model was trained with {expected[:12]}; serve the tokenizer it was trained with"
                )


class _Both:
    """Two audio passes at disjoint positions of one forward pass."""

    def __init__(self, forced: TeacherForcing, drawn: _DrawnCodes) -> None:
        self.forced, self.drawn = forced, drawn
        self.at = torch.cat((forced.at, drawn.at))

    def choose(self, level: int, logits: Tensor) -> Tensor:
        split = len(self.forced.at)
        choices: list[Callable[[int, Tensor], Tensor]] = [self.forced.choose, self.drawn.choose]
        return torch.cat(
            [choose(level, part) for choose, part in zip(choices, (logits[:split], logits[split:]))]
        )
