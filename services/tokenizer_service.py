"""The tokenizer services as Ray Serve applications, and running them until they are stopped.

Each service is one application at ``/text``, ``/audio`` or ``/vision``; replicas answer HTTP and, where a run
and a Redis are named, drain the run's work stream in batches from a background thread. Each service is a pool
of its own: a number of replicas, or a range within which it follows the lag of its stream.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.modalities import ServiceName
from ernie5.protocol.settings import load_settings
from ernie5.services.limited_tokenizer import LimitedTokenizer
from ernie5.services.tokenizer_app import create_app
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from ernie5.tokenizers.base import Tokenizer
from ernie5.tokenizers.modalities import with_modalities
from ernie5.tokenizers.modalities.bases import BASES, load_base

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

__all__ = [
    "TOKENIZERS",
    "application",
    "audio",
    "create_app",
    "load_tokenizer",
    "run_service",
    "run_services",
    "text",
    "vision",
]

logger = logging.getLogger(__name__)

TOKENIZERS = BASES
_EXAMPLES = {
    "text": "curl -H 'Content-Type: text/plain' --data 'Hello' {url}/text/v1/tokenize",
    "audio": "curl -H 'Content-Type: audio/wav' --data-binary @speech.wav {url}/audio/v1/tokenize",
    "vision": "curl -H 'Content-Type: image/png' --data-binary @picture.png {url}/vision/v1/tokenize",
}


def load_tokenizer(name: str, settings: TokenizerServiceSettings | None = None) -> Tokenizer:
    """The shipped tokenizer of a service; only its own dependencies are imported.

    ``ERNIE_MULTI_TEXT_MODEL`` names a SentencePiece model for text instead, as imported networks have one.
    Of ``settings`` the vision pool and the limits count, and the text pool, whose dropout is tried.

    Raises:
        InvalidInputError: an unknown name, a setting that the tokenizer can't follow, or a bad model.
    """
    _known(name)
    settings = settings or TokenizerServiceSettings()
    own = os.environ.get("ERNIE_MULTI_TEXT_MODEL")
    if name == "text":
        from ernie5.tokenizers.text.dropout import BpeDropout
        from ernie5.tokenizers.text.tokenizer import TextTokenizer

        text_tokenizer = TextTokenizer.load(Path(own) if own else None)
        if settings.text.dropout:
            # Refused here where the model has no merges, not with every sample of the run.
            text_tokenizer.ids("a", dropout=BpeDropout(settings.text.dropout))
        return text_tokenizer
    if name == "vision":
        return _load_vision(settings)
    tokenizer = load_base(name)
    seconds = settings.limits.audio_seconds
    if name == "audio" and seconds is not None:
        from ernie5.tokenizers.audio.tokenizer import AudioTokenizer

        assert isinstance(tokenizer, AudioTokenizer)
        own_limits = tokenizer.limits
        # The bound on source samples keeps its rate, so that it doesn't undercut the seconds.
        samples = round(own_limits.samples * seconds / own_limits.seconds)
        tokenizer.limits = replace(own_limits, seconds=seconds, samples=samples)
    return tokenizer


def _load_vision(settings: TokenizerServiceSettings) -> Tokenizer:
    from ernie5.tokenizers.vision.execution import Execution
    from ernie5.tokenizers.vision.preprocessing import ImageLimits
    from ernie5.tokenizers.vision.tokenizer import VisionTokenizer

    asked = {"max_pixels": settings.limits.image_pixels, "max_side": settings.limits.image_side}
    limits = ImageLimits(**{name: value for name, value in asked.items() if value is not None})
    pool = settings.vision
    try:
        execution = Execution(pool.device, pool.dtype, pool.compile)
    except ValueError as error:
        raise InvalidInputError(str(error), param="vision.device") from None
    try:
        return VisionTokenizer.load(
            limits=limits, bits=pool.bits, execution=execution, vit=pool.semantic_features
        )
    except ValueError as error:
        raise InvalidInputError(str(error), param="vision.bits") from None


def _known(name: str) -> None:
    if name not in TOKENIZERS:
        raise InvalidInputError(
            f"unknown tokenizer service {name!r}; known: {', '.join(TOKENIZERS)}", param="service"
        )


def build_replica_app(name: str, settings_json: str, tokenizer: Tokenizer | None = None) -> FastAPI:
    """The application of a replica: loads the tokenizer, unless given, and wires the work stream to it."""
    from ernie5.services.work_drain import WorkDrain

    logging.getLogger("ernie5").setLevel(logging.INFO)
    settings = TokenizerServiceSettings.model_validate_json(settings_json)
    if tokenizer is None:
        tokenizer = with_modalities(name, load_tokenizer(name, settings))
    tokenizer = LimitedTokenizer(tokenizer, settings.limits.bytes)
    drain = WorkDrain(name, tokenizer, settings)
    app = create_app(tokenizer, settings, state=drain.state, on_start=drain.start, on_stop=drain.stop)
    app.state.work_drain = drain
    return app


class TokenizerReplica:
    """What Ray Serve's controller asks of a replica, beside its application (``app``)."""

    app: FastAPI

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The lag that :class:`~ernie5.services.stream_scaling.StreamLagPolicy` follows."""
        return await self.app.state.work_drain.load()


def application(
    name: str, settings: TokenizerServiceSettings, load: Callable[[], Tokenizer] | None = None
) -> Application:
    """The Ray Serve application of one tokenizer service.

    ``load`` makes the tokenizer in each replica instead of the shipped one, with all its modalities.
    """
    from ray import serve

    from ernie5.services.stream_scaling import autoscaling

    _known(name)
    service = cast(ServiceName, name)
    gpus = settings.gpus_per_replica
    if gpus is None:
        wanted = name == "vision" and settings.vision.device != "cpu"
        gpus = 1.0 if wanted and _has_gpu() else 0.0
    settings_json = settings.model_dump_json(exclude_defaults=True)

    # Called in the replica; it closes over strings and a function, so Ray carries no tokenizer and no
    # connection.
    def build() -> FastAPI:
        return build_replica_app(name, settings_json, load() if load is not None else None)

    least, most = settings.replicas_of(service)
    number: dict[str, Any] = (
        {"num_replicas": least}
        if most is None
        else {"autoscaling_config": autoscaling(settings.scaling, least, most)}
    )
    deployment: Any = serve.deployment(serve.ingress(build)(TokenizerReplica))
    return deployment.options(
        name=name,
        **number,
        max_ongoing_requests=settings.max_queued_requests,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        health_check_period_s=2.0,
        # By default replicas share the machine's CPUs: Ray's bookkeeping must not keep one from starting.
        ray_actor_options={"num_cpus": settings.pool(service).cpus, "num_gpus": gpus},
    ).bind()


def _has_gpu() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) >= 1


def text(arguments: dict[str, Any]) -> Application:
    """Builder for a Ray Serve configuration file: ``import_path: ernie5.services.tokenizer_service:text``."""
    return application("text", load_settings(TokenizerServiceSettings, overrides=arguments))


def audio(arguments: dict[str, Any]) -> Application:
    """Builder for a Ray Serve configuration file; see :func:`text`."""
    return application("audio", load_settings(TokenizerServiceSettings, overrides=arguments))


def vision(arguments: dict[str, Any]) -> Application:
    """Builder for a Ray Serve configuration file; see :func:`text`."""
    return application("vision", load_settings(TokenizerServiceSettings, overrides=arguments))


def run_service(
    name: str, settings: TokenizerServiceSettings | None = None, stop: threading.Event | None = None
) -> None:
    """Run one tokenizer service until Ctrl-C; see :func:`run_services`."""
    run_services((name,), settings, stop)


def run_services(
    names: Sequence[str],
    settings: TokenizerServiceSettings | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run tokenizer services on one Ray until SIGINT, SIGTERM or ``stop``; then drain and end all processes.

    Prints the addresses and a command to try once all are ready. Called from the main thread it handles the
    signals itself.

    Raises:
        InvalidInputError: an unknown name or setting.
        UnavailableError: the port is taken or Ray does not start.
    """
    from ernie5.services.ray_runtime import RayRuntime

    settings = settings if settings is not None else load_settings(TokenizerServiceSettings)
    for name in names:
        _known(name)
    stop = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    with RayRuntime(settings) as runtime:
        runtime.deploy({name: application(name, settings) for name in names})
        for name in names:
            print(
                f"{name} tokenizer ready at {runtime.url}/{name} (API: {runtime.url}/{name}/docs)", flush=True
            )
            print(f"  try: {_EXAMPLES[name].format(url=runtime.url)}", flush=True)
        # An event with a time limit lets Python run signal handlers in between.
        while not stop.wait(0.5):
            pass
        print("stopping: finishing requests", file=sys.stderr, flush=True)
    print(f"stopped (process {os.getpid()} leaves nothing behind)", file=sys.stderr, flush=True)
