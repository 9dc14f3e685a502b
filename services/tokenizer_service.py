"""The tokenizer services as Ray Serve applications, and running them until they are stopped.

Each service is one application at ``/text``, ``/audio`` or ``/vision``; replicas answer HTTP and, where a run
and a Redis are named, drain the run's work stream in batches from a background thread.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.settings import load_settings
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


def load_tokenizer(name: str) -> Tokenizer:
    """The shipped tokenizer of a service; only its own dependencies are imported.

    ``ERNIE_MULTI_TEXT_MODEL`` names a SentencePiece model for text instead, as imported networks have one.
    """
    _known(name)
    own = os.environ.get("ERNIE_MULTI_TEXT_MODEL")
    if name == "text" and own:
        from ernie5.tokenizers.text.tokenizer import TextTokenizer

        return TextTokenizer.load(Path(own))
    return load_base(name)


def _known(name: str) -> None:
    if name not in TOKENIZERS:
        raise InvalidInputError(
            f"unknown tokenizer service {name!r}; known: {', '.join(TOKENIZERS)}", param="service"
        )


def build_replica_app(name: str, settings_json: str) -> FastAPI:
    """The application of a replica: loads the tokenizer and wires the work stream to it."""
    from ernie5.services.work_drain import WorkDrain

    logging.getLogger("ernie5").setLevel(logging.INFO)
    settings = TokenizerServiceSettings.model_validate_json(settings_json)
    tokenizer = with_modalities(name, load_tokenizer(name))
    drain = WorkDrain(name, tokenizer, settings)
    return create_app(tokenizer, settings, state=drain.state, on_start=drain.start, on_stop=drain.stop)


def application(name: str, settings: TokenizerServiceSettings) -> Application:
    """The Ray Serve application of one tokenizer service."""
    from ray import serve

    _known(name)
    gpus = settings.gpus_per_replica
    if gpus is None:
        gpus = 1.0 if name == "vision" and _has_gpu() else 0.0
    settings_json = settings.model_dump_json(exclude_defaults=True)

    # Called in the replica; it closes over two strings, so Ray carries no tokenizer and no connection.
    def build() -> FastAPI:
        return build_replica_app(name, settings_json)

    deployment: Any = serve.deployment(serve.ingress(build)())
    return deployment.options(
        name=name,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_queued_requests,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        health_check_period_s=2.0,
        # Replicas share the machine's CPUs; Ray's bookkeeping must not keep one from starting.
        ray_actor_options={"num_cpus": 0.1, "num_gpus": gpus},
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
