"""Offline experts: expert weights stay in the model's file, a bounded part of them in memory.

The experts' tensors are address space without memory behind it. Before a layer reads an expert, its bytes are
read from ``model.safetensors`` to their place in the tensor; least recently used ones give their pages back
when the bound is reached. The kernel works on tensors of the resident model's shape and content, so results
are equal bit for bit. (A map of the file itself would do without the copy, but Linux maps a whole folio of
up to 2 MB at a fault, neighbours included, which no bound survives.)

After a layer, the next layer's router guesses from the layer's hidden states which experts will be wanted,
and a thread reads them while attention runs (Eliseev and Mazur, arXiv 2312.17238, section 3.2).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.attention import Attend
from ernie5.backbone.model.experts import Routing, SparseFeedForward
from ernie5.backbone.model.heads import AudioCodes
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import read_config
from ernie5.kernels import experts as expert_kernels
from ernie5.protocol.errors import InvalidInputError

# Linux's MAP_NORESERVE, which Python names from 3.13 on: experts may exceed the machine's memory.
_NORESERVE = 0x4000
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class OffloadStats:
    """What the store did so far.

    Attributes:
        hits, misses: experts of layer calls that were in memory, or read ahead, and that were not.
        guessed, used: experts read ahead, and those of them that the next layer then wanted.
        bytes_read: of missed and read-ahead experts; ``bytes_dropped`` of those given back.
        resident_bytes, peak_bytes: held now, and at most.
    """

    hits: int = 0
    misses: int = 0
    guessed: int = 0
    used: int = 0
    bytes_read: int = 0
    bytes_dropped: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of wanted experts that were in memory when their layer ran; 0 before the first call."""
        return self.hits / max(1, self.hits + self.misses)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}


class ExpertStore:
    """Experts of a model file, of which at most ``capacity`` bytes are in memory.

    ``tensors`` has ``gate_up`` ``[E, 2h, d]`` and ``down`` ``[E, d, h]`` of each layer by state-dict name; an
    expert in them holds its weights from :meth:`use` until room is needed for another.

    Raises:
        InvalidInputError: not a model's file, or a capacity that holds less than one expert.
    """

    def __init__(self, path: Path, config: BackboneConfig, capacity: int) -> None:
        self.path, self.capacity, self.stats = path, capacity, OffloadStats()
        try:
            with safe_open(path, framework="pt"):
                pass  # checks the header and that the file is as long as it says
            self._file = path.open("rb", buffering=0)
            size = int.from_bytes(self._file.read(8), "little")
            header = json.loads(self._file.read(size))
        except FileNotFoundError:
            raise InvalidInputError(f"{path.parent} holds no weights: {path.name} is missing") from None
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(f"{path} can't be read: {error}") from None
        names = [
            (layer, f"layers.{layer}.feed_forward.{leaf}")
            for layer in range(config.layers)
            for leaf in ("gate_up", "down")
        ]
        entries = [(layer, name, *self._entry(header, name, config.experts)) for layer, name in names]
        total = sum(_whole_pages(end - start) for *_, start, end in entries)
        self._memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        # A huge page would bring memory for neighbouring experts along.
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensors: dict[str, Tensor] = {}
        # (layer, expert) to where its weights lie: in the file, in memory, and how many bytes.
        self._places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        place = 0
        for layer, name, shape, dtype, start, end in entries:
            flat = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=place)
            self.tensors[name] = flat.view(shape)
            step = (end - start) // config.experts
            for expert in range(config.experts):
                here = (8 + size + start + expert * step, place + expert * step, step)
                self._places.setdefault((layer, expert), []).append(here)
            place += _whole_pages(end - start)
        self.expert_bytes = sum(length for *_, length in self._places[0, 0])
        if capacity < self.expert_bytes:
            raise InvalidInputError(
                f"an expert memory of {capacity} bytes holds no expert; one takes {self.expert_bytes}",
                param="expert_memory",
            )
        # Least recently used first; True while read ahead and not yet wanted.
        self._held: OrderedDict[tuple[int, int], bool] = OrderedDict()
        self._coming: dict[tuple[int, int], Future[None]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="experts")

    def _entry(
        self, header: dict[str, Any], name: str, experts: int
    ) -> tuple[list[int], torch.dtype, int, int]:
        """Shape, dtype and byte range of a tensor of the file."""
        try:
            entry = header[name]
            shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
            start, end = entry["data_offsets"]
        except KeyError as error:
            raise InvalidInputError(f"{self.path} has no {name} of a known type: {error}") from None
        if shape[0] != experts:
            raise InvalidInputError(
                f"{self.path}: {name} holds {shape[0]} experts, the configuration says {experts}"
            )
        return shape, dtype, start, end

    @property
    def slots(self) -> int:
        """How many experts fit."""
        return self.capacity // self.expert_bytes

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Before a layer reads these experts, at most :attr:`slots` of them: fetch what is missing."""
        wanted = [(layer, expert) for expert in experts]
        for key in wanted:
            if key in self._held:
                self.stats.hits += 1
                self.stats.used += self._held[key]
                self._held[key] = False
                self._held.move_to_end(key)
                if key in self._coming:
                    self._coming.pop(key).result()
        # Room is made first, so that the bound holds at every moment.
        missing = [key for key in wanted if key not in self._held]
        self._make_room(len(missing), keep=set(wanted))
        for key in missing:
            self.stats.misses += 1
            self._note(key, ahead=False)
            self._read(key)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Read ahead what a layer is guessed to want, the likeliest first, as far as the bound allows."""
        keys = [(layer, expert) for expert in experts][: self.slots]
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
        missing = [key for key in keys if key not in self._held]
        self._make_room(len(missing), keep=set(keys))
        for key in missing:
            self.stats.guessed += 1
            self._note(key, ahead=True)
            self._coming[key] = self._reader.submit(self._read, key)

    def _note(self, key: tuple[int, int], *, ahead: bool) -> None:
        self._held[key] = ahead
        self.stats.bytes_read += self.expert_bytes
        self.stats.resident_bytes += self.expert_bytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.resident_bytes)

    def _make_room(self, count: int, keep: set[tuple[int, int]]) -> None:
        excess = len(self._held) + count - self.slots
        victims = [key for key in self._held if key not in keep][: max(0, excess)]
        for key in victims:
            del self._held[key]
            self._drop(key)

    def _read(self, key: tuple[int, int]) -> None:
        for source, place, length in self._places[key]:
            with memoryview(self._memory)[place : place + length] as view:
                if os.preadv(self._file.fileno(), [view], source) != length:
                    raise InvalidInputError(f"{self.path} ends within expert {key[1]} of layer {key[0]}")

    def _drop(self, key: tuple[int, int]) -> None:
        coming = self._coming.pop(key, None)
        if coming is not None and not coming.cancel():
            coming.result()
        for _, place, length in self._places[key]:
            # Only whole pages: those at the edges hold a neighbour's weights too.
            first, last = _whole_pages(place), (place + length) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.stats.bytes_dropped += self.expert_bytes
        self.stats.resident_bytes -= self.expert_bytes


def _whole_pages(size: int) -> int:
    """The next multiple of the page size."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class OffloadedFeedForward(SparseFeedForward):
    """A sparse feed-forward that tells the store which experts it is about to read."""

    store: ExpertStore
    layer: int

    def mix(self, x_Td: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, valid_Tk: Tensor | None) -> Tensor:
        chosen = expert_Tk if valid_Tk is None else expert_Tk[valid_Tk]
        experts = chosen.unique().tolist()
        if len(experts) <= self.store.slots:
            self.store.use(self.layer, experts)
            return super().mix(x_Td, expert_Tk, weight_Tk, valid_Tk)
        return self._in_turn(x_Td, expert_Tk, weight_Tk, valid_Tk, experts)

    def _in_turn(
        self,
        x_Td: Tensor,
        expert_Tk: Tensor,
        weight_Tk: Tensor,
        valid_Tk: Tensor | None,
        experts: Sequence[int],
    ) -> Tensor:
        """As many experts at a time as fit, each slot's output apart; then the kernel's sum, by expert."""
        tokens, slots = expert_Tk.shape
        rows = torch.zeros(tokens, slots, x_Td.shape[1])
        for start in range(0, len(experts), self.store.slots):
            part = experts[start : start + self.store.slots]
            self.store.use(self.layer, part)
            here = torch.isin(expert_Tk, torch.tensor(part))
            if valid_Tk is not None:
                here &= valid_Tk
            token, slot = here.nonzero(as_tuple=True)
            rows[token, slot] = super().mix(
                x_Td[token], expert_Tk[token, slot, None], weight_Tk[token, slot, None], None
            )
        if expert_kernels.choose_backend(x_Td) == "grouped":
            # It adds a token's rows by expert, the others by slot.
            rows = rows.gather(1, expert_Tk.argsort(-1)[..., None].expand_as(rows))
        out = torch.zeros_like(rows[:, 0])
        for row in rows.unbind(1):
            out += row
        return out


class OffloadedBackbone(Backbone):
    """A backbone whose experts live in ``store``; everything else is in memory. For inference."""

    def __init__(self, config: BackboneConfig, store: ExpertStore) -> None:
        # On the meta device, so that experts are never allocated; weights are assigned by `load_offloaded`.
        with torch.device("meta"):
            super().__init__(config)
        self.store = store
        for layer in range(config.layers):
            feed_forward = self.feed_forward(layer)
            # The class differs in one method; its parameters are the same.
            feed_forward.__class__ = OffloadedFeedForward
            assert isinstance(feed_forward, OffloadedFeedForward)
            feed_forward.store, feed_forward.layer = store, layer

    def initialise(self, seed: int) -> None:
        """Nothing to draw: weights come from the file."""

    def run(
        self,
        x_BNd: Tensor,
        positions: Tensor,
        attend: Attend,
        routing: Routing,
        *,
        layers: Sequence[int] | None = None,
        audio: AudioCodes | None = None,
    ) -> Tensor:
        order = range(self.config.layers) if layers is None else layers
        following = dict(pairwise(order))

        def guess(block: nn.Module, arguments: tuple[Any, ...], x_BNd: Tensor) -> None:
            after = following.get(arguments[4])
            if after is not None:
                self._guess(after, x_BNd, routing)

        hooks = [self.layers[layer].register_forward_hook(guess) for layer in following]
        try:
            return super().run(x_BNd, positions, attend, routing, layers=layers, audio=audio)
        finally:
            for hook in hooks:
                hook.remove()

    def _guess(self, layer: int, x_BNd: Tensor, routing: Routing) -> None:
        """Prefetch the experts that the layer's router would choose, were its input the layer's own."""
        block, feed_forward = self.layers[layer], self.feed_forward(layer)
        weight, epsilon = block.feed_forward_norm, self.config.norm_epsilon
        assert isinstance(weight, Tensor)
        normed = F.rms_norm(x_BNd.flatten(0, 1), weight.shape, weight, epsilon)
        active = None if routing.experts is None else routing.experts[layer]
        router: Tensor = feed_forward.router
        bias = feed_forward.selection_bias
        if active is not None:
            router, bias = router[active], bias[active]
        logits = F.linear(normed.float(), router.float())
        softmax = self.config.router.score == "softmax"
        scores = (torch.softmax(logits, -1) if softmax else torch.sigmoid(logits)) + bias
        top_k = self.config.top_k if routing.fixed_top_k is None else routing.fixed_top_k[layer]
        chosen = scores.topk(min(top_k, scores.shape[-1]), -1).indices.flatten()
        # The most demanded first: they matter most where not all fit.
        demand = torch.bincount(chosen, minlength=scores.shape[-1])
        likely = demand.argsort(descending=True, stable=True)[: int((demand > 0).sum())]
        self.store.prefetch(layer, (likely if active is None else active[likely]).tolist())


def load_offloaded(folder: Path, expert_memory: int) -> tuple[OffloadedBackbone, dict[str, str]]:
    """The model of a folder with at most ``expert_memory`` bytes of experts in memory, and its tokenizers.

    Raises:
        InvalidInputError: there is no model, its weights don't fit its configuration, or the memory holds
            less than one expert.
    """
    config, tokenizers = read_config(folder)
    path = folder / "model.safetensors"
    store = ExpertStore(path, config, expert_memory)
    model = OffloadedBackbone(config, store)
    state = dict(store.tensors)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name not in state:
                    state[name] = file.get_tensor(name).clone()
        model.load_state_dict(state, assign=True)
    except (SafetensorError, RuntimeError) as error:
        raise InvalidInputError(f"{path} can't be loaded: {error}") from None
    return model.requires_grad_(False).eval(), tokenizers


def parse_bytes(text: str, *, param: str = "expert_memory") -> int:
    """Bytes of ``200MB``, ``1.5GiB``, ``4096``.

    Raises:
        InvalidInputError: not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    if found is None or float(found[1]) <= 0:
        raise InvalidInputError(f"{text!r} is no size; write 200MB or 1.5GiB", param=param)
    return int(float(found[1]) * _UNITS[found[2] or ""])
