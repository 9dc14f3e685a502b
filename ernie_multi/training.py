"""Training runs: `ernie-multi train` with everything it needs, and the trainer as a service of its own.

``train`` starts a Redis (unless ``REDIS_URL`` names one), the tokenizer services and ingest as processes, and
trains in this one; every token comes out of a tokenizer service and through Redis. The trainer service does
only the last part, against a stack that runs elsewhere.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.service_settings import RedisSettings, StreamSettings
from ernie5.protocol.settings import Settings, load_settings
from ernie5.services.processes import ProcessSpec, Supervisor
from ernie_multi.networks import check_resumed, check_start, network_of, take_weights
from ernie_multi.stack import command_of, free_port, redis_for
from ernie_multi.training_stream import corpus_length, samples_of, wait_for_tokenizers

if TYPE_CHECKING:
    from ernie5.backbone.config import BackboneConfig
    from ernie5.backbone.execution import Execution
    from ernie5.backbone.training.trainer import StepReport, Trainer, TrainingConfig

logger = logging.getLogger(__name__)

_READY_S = 300.0
_WATCH_S = 1.0


class TrainerSettings(Settings):
    """The trainer service.

    ``out`` receives checkpoints and metrics; a run that has a checkpoint there goes on from it. ``rows`` and
    ``row_length`` shape a step, see :class:`~ernie5.backbone.training.trainer.TrainingConfig`. ``elastic``,
    ``allocation`` and ``mean_experts`` are those of :func:`train`; ``device``, ``tf32`` and ``compile`` those
    of :class:`~ernie5.backbone.execution.Execution`.
    """

    section: ClassVar[str] = "trainer"

    out: Path = Path("runs/trainer")
    preset: str | None = None
    elastic: str | None = None
    allocation: str | None = None
    mean_experts: Annotated[float | None, Field(ge=1)] = None
    steps: Annotated[int, Field(ge=1)] = 1000
    rows: Annotated[int, Field(ge=1)] = 4
    row_length: Annotated[int, Field(ge=16)] = 1024
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    checkpoint_every: Annotated[int, Field(ge=1)] = 200
    compute_dtype: str = "float32"
    seed: int = 0
    threads: Annotated[int, Field(ge=0)] = 0
    device: str = "auto"
    tf32: bool = True
    compile: bool = False


@dataclass
class TrainingResult:
    """What a run did: the newest checkpoint, steps done, samples left out by reason, seconds of stepping."""

    checkpoint: Path
    steps: int
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def train(
    data: str,
    out: Path,
    *,
    preset: str | None = None,
    elastic: str | None = None,
    allocation: str | None = None,
    mean_experts: float | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    resume: bool = False,
    seed: int = 0,
    overrides: dict[str, Any] | None = None,
    repeats: dict[str, int] | None = None,
    start_from: Path | None = None,
    validate_every: int | None = None,
    device: str = "auto",
    tf32: bool = True,
    compile: bool = False,
    console: Console | None = None,
    while_running: Callable[[str, int], None] | None = None,
) -> TrainingResult:
    """Train on a corpus, starting what is needed; leaves ``out/step-…`` and ``out/metrics.jsonl``.

    Args:
        data: a corpus by name, or a path.
        out: the run's folder; its name is the run's name on the stream.
        preset, elastic, allocation, mean_experts: the network, see :func:`~ernie_multi.networks.network_of`.
        steps: how many; ``minutes`` chooses the number from the speed of a timed pass instead.
        resume: go on from the newest checkpoint in ``out``, with its training options where none are given
            here; without it a folder with checkpoints is refused.
        overrides: further fields of ``TrainingConfig``.
        repeats: samples an epoch for each item of a task.
        start_from: a model folder whose network and weights the run begins with, instead of ``preset``.
        validate_every: steps between measurements of sub-models on the corpus's held-out samples.
        device, tf32, compile: how to run, see :class:`~ernie5.backbone.execution.Execution`.
        while_running: called once with the Redis address and the tokenizers' port when all is up.

    Raises:
        InvalidInputError: no such corpus or preset, a folder that holds another run, or options that this
            network can't be trained with. All of it is found before anything is started.
        UnavailableError: a process did not come up, or ended for good; a checkpoint is written then.
    """
    from ernie5.backbone.execution import Execution, choose_device
    from ernie5.backbone.training.checkpoint import checkpoints
    from ernie5.backbone.training.trainer import TrainingConfig
    from ernie5.corpora.corpus import open_corpus
    from ernie_multi.interop import TEXT_MODEL

    console = console or Console(stderr=True)
    execution = Execution(device=device, tf32=tf32, compile=compile)
    choose_device(device)
    corpus = open_corpus(data, repeats=repeats)
    found = checkpoints(out)
    if found and not resume:
        raise InvalidInputError(
            f"{out} holds checkpoints of an earlier run; go on with --resume, or name another folder",
            param="out",
        )
    network = network_of(
        preset,
        start_from,
        found[-1] if found else None,
        elastic=elastic,
        allocation=allocation,
        mean_experts=mean_experts,
    )
    given = {**({} if steps is None else {"steps": steps}), **(overrides or {})}
    training = TrainingConfig(**{"seed": seed, **(_options_of(found[-1], seed) if found else {}), **given})
    out.mkdir(parents=True, exist_ok=True)
    run = out.resolve().name
    console.print(
        f"{len(corpus)} samples of {data}: {', '.join(f'{k} {v}' for k, v in corpus.tasks.items())}"
    )
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_for(out))
        supervisor = stack.enter_context(Supervisor(out))
        port = free_port()
        environment = {
            "REDIS_URL": redis_url,
            "ERNIE_MULTI_RUN": run,
            "ERNIE_MULTI_STREAM_RUN": run,
            "ERNIE_MULTI_SERVICE_PORT": str(port),
            "ERNIE_MULTI_SERVICE_RUN_DIR": str(out),
            "ERNIE_MULTI_INGEST_CORPUS": data,
            "ERNIE_MULTI_INGEST_SEED": str(training.seed),
            "ERNIE_MULTI_INGEST_REPEATS": ",".join(f"{k}={v}" for k, v in (repeats or {}).items()),
            # The trainer needs the cores; a tokenizer replica is busy in the first epoch only.
            "OMP_NUM_THREADS": "1",
        }
        if start_from is not None and (start_from / TEXT_MODEL).is_file():
            environment["ERNIE_MULTI_TEXT_MODEL"] = str((start_from / TEXT_MODEL).resolve())
        with console.status(f"starting the tokenizer services (log: {out / 'logs' / 'tokenizers.log'})"):
            supervisor.start(
                [
                    ProcessSpec(
                        "tokenizers",
                        command_of("text", "audio", "vision"),
                        env=environment,
                        ready=f"http://127.0.0.1:{port}/vision/ready",
                        ready_timeout_s=_READY_S,
                        port=port,
                        restarts=3,
                    ),
                    ProcessSpec("ingest", command_of("ingest"), env=environment, restarts=3),
                ]
            )
        if while_running is not None:
            while_running(redis_url, port)

        def check_processes() -> None:
            for name, status in supervisor.ended().items():
                log = out / "logs" / f"{name}.log"
                raise UnavailableError(f"{name} ended with status {status}; its log is {log}")

        return _train_here(
            redis_url,
            run,
            network,
            training,
            out,
            minutes=minutes,
            console=console,
            check_peers=check_processes,
            start_from=start_from,
            validation=None if validate_every is None else (data, validate_every),
            execution=execution,
        )


def _options_of(checkpoint: Path, seed: int) -> dict[str, Any]:
    """The training options that a checkpoint was written with."""
    options: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())["training"]
    if seed not in (0, options["seed"]):
        raise InvalidInputError(
            f"{checkpoint} was trained with seed {options['seed']}, not {seed}; leave the seed out to go on",
            param="seed",
        )
    return options


def run_trainer() -> None:
    """The trainer service: train on the stream of ``REDIS_URL`` until ``ERNIE_MULTI_TRAINER_STEPS``.

    SIGTERM and Ctrl-C write a checkpoint before the process ends.
    """
    from ernie5.backbone.execution import Execution
    from ernie5.backbone.training.checkpoint import checkpoints
    from ernie5.backbone.training.trainer import TrainingConfig

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = load_settings(TrainerSettings)
    stream = load_settings(StreamSettings)
    url = load_settings(RedisSettings)
    training = TrainingConfig(
        steps=settings.steps,
        rows=settings.rows,
        row_length=settings.row_length,
        learning_rate=settings.learning_rate,
        checkpoint_every=settings.checkpoint_every,
        compute_dtype=settings.compute_dtype,
        seed=settings.seed,
        threads=settings.threads,
    )
    found = checkpoints(settings.out)
    network = network_of(
        settings.preset,
        None,
        found[-1] if found else None,
        elastic=settings.elastic,
        allocation=settings.allocation,
        mean_experts=settings.mean_experts,
    )
    result = _train_here(
        url,
        stream.run,
        network,
        training,
        settings.out,
        console=Console(stderr=True),
        execution=Execution(device=settings.device, tf32=settings.tf32, compile=settings.compile),
    )
    print(f"trainer: {result.steps} steps, newest checkpoint {result.checkpoint}", flush=True)


def _train_here(
    redis: RedisSettings | str,
    run: str,
    config: BackboneConfig,
    training: TrainingConfig,
    out: Path,
    *,
    minutes: float | None = None,
    console: Console,
    check_peers: Callable[[], None] = lambda: None,
    start_from: Path | None = None,
    validation: tuple[str, int] | None = None,
    execution: Execution,
) -> TrainingResult:
    """Train on a stream that exists; ``check_peers`` raises where one that it needs is gone for good.

    ``validation`` names a corpus with held-out samples and the steps between two measurements on them.
    """
    import torch

    from ernie5.backbone.training.checkpoint import checkpoints
    from ernie5.backbone.training.trainer import Trainer
    from ernie5.services.redis_client import connect
    from ernie5.services.streams import Position, RunStream, TokenFeed
    from ernie_multi.validation import held_out_validation

    stream = RunStream(connect(redis), run)
    hashes = wait_for_tokenizers(stream, check_peers)
    skipped: Counter[str] = Counter()

    def on_skip(position: int, reason: str) -> None:
        skipped[reason] += 1
        logger.warning("sample %d is left out: %s", position, reason)

    threads = torch.get_num_threads()
    check_resumed(out, hashes)
    if start_from is not None:
        check_start(start_from, hashes)
    trainer = Trainer(config, training, out, hashes, execution=execution, on_skip=on_skip)
    if trainer.resume():
        console.print(f"going on from step {trainer.step}, sample {trainer.position}")
    elif start_from is not None:
        take_weights(trainer.model, start_from)
        console.print(f"starting from the weights of {start_from}")
    curves = None
    if validation is not None:
        corpus, every = validation
        curves = held_out_validation(corpus, config, hashes, out, every=every, row_length=training.row_length)
        curves.resume(trainer.step)
    length = corpus_length(stream, check_peers)
    if minutes is not None:
        training = trainer.training = _sized(trainer, minutes, training)

    def want_checkpoint() -> None:
        trainer.checkpoint_wanted = True

    asked: list[int] = []

    def check() -> None:
        if asked:
            raise KeyboardInterrupt
        check_peers()

    start = Position.of(trainer.position, length)
    with TokenFeed(stream, start, timeout_s=_WATCH_S, on_checkpoint_asked=want_checkpoint) as feed:
        trainer.on_checkpoint = lambda position: feed.commit(Position.of(position, length))
        began = time.perf_counter()
        reports = trainer.run(samples_of(feed, length, skipped, check))
        for report in _shown(_until_signal(trainer, reports, asked), trainer, console):
            if curves is not None:
                curves.after(trainer.model, report.step)
        seconds = time.perf_counter() - began
    if curves is not None:
        curves.close()
    # The trainer gives each of its threads one core; what follows has them all again.
    torch.set_num_threads(threads)
    if skipped:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in skipped.most_common(3))
        console.print(f"{sum(skipped.values())} samples were left out ({reasons})")
    return TrainingResult(checkpoints(out)[-1], trainer.step, skipped, seconds)


def _sized(trainer: Trainer, minutes: float, training: TrainingConfig) -> TrainingConfig:
    """The number of steps that takes about ``minutes``, from a timed pass over rows of noise."""
    seconds = trainer.time_step()
    return training.model_copy(update={"steps": trainer.step + max(1, round(minutes * 60 / seconds))})


def _until_signal(trainer: Trainer, reports: Iterator[StepReport], asked: list[int]) -> Iterator[StepReport]:
    """End after the step during which SIGINT or SIGTERM came, with a checkpoint.

    ``asked`` receives the signals, for those who wait for samples.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in numbers}
    try:
        for report in reports:
            yield report
            if asked:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, UnavailableError):
        if trainer.step:
            trainer.checkpoint()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(reports: Iterator[StepReport], trainer: Trainer, console: Console) -> Iterator[StepReport]:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    said = time.monotonic()
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("", total=trainer.training.steps, completed=trainer.step, losses="")
        for report in reports:
            losses = " ".join(f"{name} {value:.3f}" for name, value in report.losses.items())
            progress.update(bar, completed=report.step, losses=losses)
            if not console.is_terminal and time.monotonic() - said > 30:
                said = time.monotonic()
                console.print(
                    f"step {report.step}/{trainer.training.steps}: {losses}, "
                    f"{report.tokens / report.seconds:.0f} tokens/s, sample {report.next_position}"
                )
            yield report
