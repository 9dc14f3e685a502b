"""Continuous batching: requests of any kind share the steps of one model.

Each step first admits waiting requests (their prompts run packed in one row), then advances every running one
by its next chunk: a text id, a scale of a picture or a frame of a sound. Chunks of equal length and equal
sub-network run as one batch. The result of a request doesn't depend on its neighbours beyond
floating-point rounding, and its random numbers are its own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.execution import moved, on_host
from ernie5.backbone.inference.answer import Answer, Chunk, allowed_ids, can_generate, grid_ids
from ernie5.backbone.inference.cache import KeyValueCache
from ernie5.backbone.inference.heads import BothCodes, DrawnCodes, Said
from ernie5.backbone.inference.prompt import lay_out_prompt
from ernie5.backbone.inference.sampler import draw, draw_bits
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


class InferenceEngine:
    """Answers requests with one model; see :class:`ernie5.protocol.generation.Engine`.

    Args:
        model: in evaluation mode, on the device where it is to answer; see
            :func:`~ernie5.backbone.model.placement.place`.
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
        self.device = model.device
        self.cache = KeyValueCache(model.config, capacity, max_length, model.compute_dtype, self.device)
        self._capacity, self.max_length, self.prefill_positions = capacity, max_length, prefill_positions
        self._waiting: deque[tuple[Answer, SampleLayout]] = deque()
        self._running: dict[str, Answer] = {}
        self._grids = grid_ids(self.vocabulary)
        self._markers = {name: self.vocabulary.marker(name) for name in ("end_turn", "target")}

    def there(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the model's device; nothing waits."""
        return moved(tensor, self.device, non_blocking=True)

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
        row = pack([[layout for _, layout in batch]], total, config).to(self.device, non_blocking=True)
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
        drawn = DrawnCodes(
            model.config, [answer for answer, _ in sounding], [at for _, at in sounding], self.there
        )
        first = batch[0][0].subnetwork
        routing = first.routing().to(self.device, non_blocking=True)
        routing.group = row.group.flatten()
        hidden = model.run(
            model.embeddings(row),
            row.positions,
            attend,
            routing,
            layers=first.layers,
            audio=BothCodes(forced, drawn),
        )[0]
        last = {
            answer.request.id: (answer, hidden[end - 1 : end])
            for (answer, _), end in zip(batch, ends.tolist())
        }
        said = self._hear(last, [answer for answer, _ in sounding], drawn)
        for answer, _ in batch:
            if answer.owed is not None:
                events.append(answer.token_event(answer.owed))
                answer.owed = None
            self._decide(answer, said[answer.request.id], events)

    def _advance(self, answers: list[Answer], events: list[Event]) -> None:
        """One chunk of equal length and kind for several requests."""
        model = self.model
        chunks: list[Chunk] = [answer.chunk for answer in answers if answer.chunk is not None]
        kind, count = chunks[0][0], len(chunks[0][1])
        values = self.there(torch.stack([chunk[1] for chunk in chunks]))
        positions = self.there(torch.from_numpy(np.stack([chunk[2] for chunk in chunks])))
        if kind == "token":
            x = model.embeddings.token[values]
        elif kind == "frame":
            x = model.embeddings.sound(values.flatten(0, 1)).unflatten(0, values.shape[:2])
        else:
            scale = self.there(torch.tensor([self._scale_index(answer) for answer in answers]))
            x = model.embeddings.scales(values.flatten(0, 1), scale.repeat_interleave(count))
            x = x.unflatten(0, values.shape[:2])
        slots = self.there(torch.tensor([answer.slot for answer in answers]))
        start = self.there(torch.tensor([answer.length for answer in answers]))
        width = max(answer.length for answer in answers) + count
        visible = self.cache.visible(slots, start, count, width)
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
        drawn = DrawnCodes(
            model.config, [answer for _, answer in sounding], [index for index, _ in sounding], self.there
        )
        sub = answers[0].subnetwork
        routing = sub.routing().to(self.device, non_blocking=True)
        routing.group = torch.full((len(answers) * count,), _GROUP_OF_CHUNK[kind], device=self.device)
        hidden = model.run(x, positions, attend, routing, layers=sub.layers, audio=drawn)
        last = {answer.request.id: (answer, states) for answer, states in zip(answers, hidden)}
        said = self._hear(last, [answer for _, answer in sounding], drawn)
        for answer in answers:
            self._decide(answer, said[answer.request.id], events)

    def _hear(
        self, last: Mapping[str, tuple[Answer, Tensor]], sounding: Sequence[Answer], drawn: DrawnCodes
    ) -> dict[str, Said]:
        """What each answer's next decision reads, by request, given the hidden states of its last chunk.

        On a CPU the heads run when a decision asks. On another device they run here for all answers
        together, and one wait brings everything to the host, where decisions and draws are made.
        """
        model = self.model
        frames = drawn.frames() if sounding else None
        if self.device.type == "cpu":
            heard = dict(
                zip([answer.request.id for answer in sounding], frames if frames is not None else [])
            )
            return {name: Said(model, states, heard.get(name)) for name, (_, states) in last.items()}
        wanted = {name: self._wanted(answer) for name, (answer, _) in last.items()}
        texts = [name for name, head in wanted.items() if head == "text"]
        pictures = [name for name, head in wanted.items() if head == "bits"]
        made: list[Tensor] = []
        if texts:
            made.append(model.text_logits(torch.stack([last[name][1][-1] for name in texts])))
        cells = [last[name][1] for name in pictures]
        if cells:
            made.append(model.heads.bits(torch.cat(cells)).float())
        if frames is not None:
            made.append(frames)
        copies = iter(on_host(*made))
        found = {name: Said(model, states, None) for name, (_, states) in last.items()}
        if texts:
            for name, row in zip(texts, next(copies)):
                found[name].text = row
        if cells:
            for name, rows in zip(pictures, next(copies).split([len(part) for part in cells])):
                found[name].bits = rows
        if frames is not None:
            for answer, frame in zip(sounding, next(copies)):
                found[answer.request.id].frame = frame
        return found

    @staticmethod
    def _wanted(answer: Answer) -> str | None:
        """The head whose say the next decision of an answer asks for: text, bits, or none further."""
        if answer.open_medium is None:
            return "text"
        if modality_of(answer.open_medium).layout == "codebooks":
            return None
        if answer.layout is None:
            return "text" if answer.params.image_grid is None else None
        return "bits" if len(answer.codes) < len(answer.layout.schedule) else None

    # -- decisions ----------------------------------------------------------------------------------

    def _decide(self, answer: Answer, said: Said, events: list[Event]) -> None:
        """Choose what a request says or feeds next, given what the heads say after its last chunk."""
        if answer.open_medium is None:
            self._decide_text(answer, said, events)
        elif modality_of(answer.open_medium).layout == "codebooks":
            assert said.frame is not None
            self._decide_sound(answer, said.frame, events)
        else:
            self._decide_picture(answer, said, events)
        if answer.request.id in self._running and answer.chunk is not None:
            needed = answer.length + len(answer.chunk[1])
            if needed > self.max_length:
                self._finish(answer, "length", events)

    def _decide_text(self, answer: Answer, said: Said, events: list[Event]) -> None:
        params = answer.params
        if answer.produced >= params.max_tokens:
            self._finish(answer, "length", events)
            return
        logits = said.text_logits()
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

    def _decide_picture(self, answer: Answer, said: Said, events: list[Event]) -> None:
        if answer.layout is None:
            self._choose_grid(answer, said, events)
            return
        layout = answer.layout
        scale = len(answer.codes)
        if scale == len(layout.schedule):  # the closing slot was read
            codes = np.concatenate(answer.codes)
            answer.clock = answer.origin + max(layout.final_grid)
            self._close_medium(answer, layout, codes, events)
            answer.layout = None
            return
        log_odds = said.log_odds()
        height, width = layout.schedule[scale]
        cells = height * width
        uniform = answer.uniforms(cells * layout.bits)
        answer.codes.append(draw_bits(log_odds, uniform, answer.media_temperature))
        answer.usage["image"] += cells
        self._feed_scale(answer)

    def _choose_grid(self, answer: Answer, said: Said, events: list[Event]) -> None:
        wanted = answer.params.image_grid
        if wanted is not None:
            token = self.vocabulary.marker(f"grid_{wanted[0]}x{wanted[1]}")
        else:
            logits = said.text_logits()
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
