"""Processes that join a service with what it works on: ingest with a corpus, inference with a model.

Services know the streams, the backbone knows the model, corpora know the media; none of them may know the
others, so they meet here. Each function runs until SIGINT or SIGTERM and reads its settings from the
environment.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.service_settings import RedisSettings, StreamSettings
from ernie5.protocol.settings import Settings, load_settings
from ernie_multi.models import find_model

logger = logging.getLogger(__name__)

_MODEL_POLL_S = 1.0


class IngestSettings(Settings):
    """What ingest walks.

    ``corpus`` is a corpus by name, or a path; ``epochs`` bounds the walk, which is endless without it;
    ``repeats`` lists tasks whose items come more than once an epoch (``digit_draw=3,speech_say=2``).
    """

    section: ClassVar[str] = "ingest"

    corpus: str = "mini"
    split: str = "train"
    seed: int = 0
    epochs: Annotated[int, Field(ge=1)] | None = None
    repeats: str = ""

    @property
    def repeats_by_task(self) -> dict[str, int]:
        """``repeats`` as a mapping.

        Raises:
            InvalidInputError: an entry that is not ``task=number``.
        """
        found = {}
        for entry in filter(None, self.repeats.split(",")):
            task, _, count = entry.partition("=")
            if not count.isdecimal():
                raise InvalidInputError(
                    f"ingest.repeats: {entry!r} is not of the form task=number (digit_draw=3,speech_say=2)",
                    param="ingest.repeats",
                )
            found[task.strip()] = int(count)
        return found


class EngineSettings(Settings):
    """How an inference worker runs its model.

    ``capacity`` requests run in one batch, each of at most ``max_length`` positions. ``threads`` are torch's;
    0 leaves its own number. ``expert_memory`` (``50MB``) bounds the experts' weights in memory, the others
    stay in the model's file; empty holds all. ``device``, ``tf32`` and ``compile`` are those of
    :class:`~ernie5.backbone.execution.Execution`; with ``expert_memory`` a model runs on the CPU.
    """

    section: ClassVar[str] = "engine"

    capacity: Annotated[int, Field(ge=1)] = 16
    max_length: Annotated[int, Field(ge=16)] = 1024
    threads: Annotated[int, Field(ge=0)] = 0
    expert_memory: str = ""
    device: str = "auto"
    tf32: bool = True
    compile: bool = False


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; also says on stderr what runs here, by way of logging."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_ingest() -> None:
    """Walk a corpus and fill the work streams of the run.

    Raises:
        InvalidInputError: a wrong setting, no such corpus, or a run that walks another one.
        UnavailableError: Redis does not answer at the start; later on it is waited for.
    """
    from ernie5.corpora.corpus import open_corpus
    from ernie5.services.ingest import Ingest
    from ernie5.services.redis_client import connect
    from ernie5.services.streams import Producer

    settings = load_settings(IngestSettings)
    stream = load_settings(StreamSettings)
    stop = stop_on_signals()
    corpus = open_corpus(settings.corpus, settings.split, repeats=settings.repeats_by_task)
    ingest = Ingest(
        Producer(connect(load_settings(RedisSettings)), stream.run),
        corpus,
        seed=settings.seed,
        name=":".join(filter(None, (settings.corpus, settings.split, settings.repeats))),
        epochs=settings.epochs,
        high_water=stream.high_water,
        entry_mark=stream.entry_mark,
    )
    logger.info("ingest walks %d samples of %s", len(corpus), settings.corpus)
    metrics = ingest.run(stop)
    print(f"ingest: {metrics.added} samples added, {metrics.unreadable} unreadable", flush=True)


def run_inference() -> None:
    """Answer requests with the model of ``ERNIE_MULTI_MODEL``, else of the newest run.

    A model that has yet to appear is waited for: a stack starts its workers before its first checkpoint is
    written.

    Raises:
        InvalidInputError: a wrong setting, or a model that can't be loaded.
        UnavailableError: Redis does not answer at the start; later on it is waited for.
    """
    settings = load_settings(EngineSettings)
    if settings.expert_memory and settings.device not in ("auto", "cpu"):
        raise InvalidInputError(
            f"expert_memory {settings.expert_memory} leaves experts in the file, which only the CPU reads; "
            f"leave it empty for device {settings.device}, or take cpu",
            param="engine.device",
        )
    stop = stop_on_signals()
    folder = _wait_for_model(stop)
    if folder is None:
        return
    import torch

    from ernie5.backbone.execution import Execution
    from ernie5.backbone.inference.engine import InferenceEngine
    from ernie5.backbone.inference.offload import OffloadedBackbone, load_offloaded, parse_bytes
    from ernie5.backbone.model.placement import place
    from ernie5.backbone.training.checkpoint import load_model
    from ernie5.services.generation_stream import WorkerInfo
    from ernie5.services.inference import InferenceSettings, InferenceWorker
    from ernie5.services.redis_client import connect

    if settings.threads:
        torch.set_num_threads(settings.threads)
    model, tokenizers = (
        load_offloaded(folder, parse_bytes(settings.expert_memory))
        if settings.expert_memory
        else load_model(folder)
    )
    device = "cpu" if settings.expert_memory else settings.device
    where = place(model, Execution(device=device, tf32=settings.tf32, compile=settings.compile))
    engine = InferenceEngine(model, tokenizers, capacity=settings.capacity, max_length=settings.max_length)
    info = WorkerInfo(
        models=(model.config.name,),
        text_vocabulary=model.config.text_vocabulary,
        tokenizers=tokenizers,
        created=int((folder / "model.safetensors").stat().st_mtime),
    )
    client = connect(load_settings(RedisSettings))
    print(f"inference serves {model.config.name} of {folder} on {where}", flush=True)
    InferenceWorker(engine, client, info, load_settings(InferenceSettings)).run(stop)
    if isinstance(model, OffloadedBackbone):
        print(f"inference: experts in the file: {model.store.stats.as_json()}", flush=True)


def _wait_for_model(stop: threading.Event) -> Path | None:
    said = False
    while not stop.is_set():
        try:
            return find_model()
        except InvalidInputError as error:
            if not said:
                logger.warning("waiting for a model: %s", error.message)
                said = True
        stop.wait(_MODEL_POLL_S)
    return None
