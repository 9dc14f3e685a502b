"""Settings of the tokenizer services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ernie5.protocol.modalities import MODALITIES, ServiceName, plugins
from ernie5.protocol.service_settings import Positive, RedisSettings, Seconds, ServiceSettings
from ernie5.protocol.settings import Settings, nearest_name


class PoolSettings(Settings):
    """The replicas of one tokenizer service.

    ``replicas`` is their number (None: the number for all services). With ``max_replicas`` it is the smallest
    number, and :class:`ScalingSettings` says when there are more. ``cpus`` is what Ray sets aside for a
    replica: below 1 it only shares the machine, from 1 on a replica computes in so many threads, unless
    ``OMP_NUM_THREADS`` says otherwise. All replicas of a run need the same number of threads.
    """

    replicas: Positive | None = None
    max_replicas: Positive | None = None
    cpus: Annotated[float, Field(gt=0)] = 0.1

    @model_validator(mode="after")
    def _room_to_grow(self) -> PoolSettings:
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            raise ValueError(f"max_replicas {self.max_replicas} is below replicas {self.replicas or 1}")
        return self


class TextPoolSettings(PoolSettings):
    """The text pool and how the text of a training run is cut.

    ``dropout`` is the share of merges that BPE-dropout leaves out, ``dropout_seed`` belongs to its draws.
    They count for the work stream only, never for HTTP, and all replicas of a run need the same two.
    """

    dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    dropout_seed: Annotated[int, Field(ge=0, lt=2**64)] = 0


class VisionPoolSettings(PoolSettings):
    """The vision pool and how its network runs.

    ``device`` None takes a GPU where the replica sees one. ``dtype`` and ``compile`` (by ``torch.compile``)
    are part of the tokenizer's hash, so that a run never mixes them. So is ``semantic_features``: it adds the
    ``vit`` features that ship, for models whose configuration names them beside ``cnn``. And so is ``bits``,
    those of a cell's code: one of the weights' bit widths (None: the smallest), as many as the model has.
    """

    bits: Positive | None = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    semantic_features: bool = False


class ScalingSettings(Settings):
    """How the replicas of a pool with ``max_replicas`` follow its load.

    One replica is wanted for every ``entries_per_replica`` unsettled entries of the work stream, or for every
    ``requests_per_replica`` HTTP requests in flight, whichever asks for more. Replicas are added once more
    have been wanted for ``up_after_s``; they are removed once the lag would fill fewer replicas to no more
    than ``keep`` of their share, for ``down_after_s``. ``report_every_s`` is how often a replica reports.
    """

    entries_per_replica: Positive = 64
    requests_per_replica: Annotated[float, Field(gt=0)] = 16.0
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    up_after_s: Annotated[float, Field(ge=0)] = 5.0
    down_after_s: Annotated[float, Field(ge=0)] = 60.0
    report_every_s: Seconds = 2.0


class LimitSettings(Settings):
    """What one medium may hold; None leaves the tokenizer's own limit.

    ``bytes`` maps modalities to the size of a file (or of a text in UTF-8); it can be below the tokenizer's
    own limit, not above it.
    """

    bytes: dict[str, Positive] = Field(default_factory=dict)
    image_pixels: Positive | None = None
    image_side: Positive | None = None
    audio_seconds: Seconds | None = None
    video_seconds: Seconds | None = None

    @field_validator("bytes")
    @classmethod
    def _known_modalities(cls, value: dict[str, int]) -> dict[str, int]:
        known = {**MODALITIES, **plugins()}
        for name in value:
            if name not in known:
                nearest = nearest_name(name, known)
                hint = f"did you mean {nearest!r}?" if nearest else f"known: {', '.join(known)}"
                raise ValueError(f"unknown modality {name!r}; {hint}")
        return value


class TokenizerServiceSettings(ServiceSettings):
    """A tokenizer service: HTTP, fetching, and the Ray it runs on.

    ``fetch_urls`` lets JSON items name http(s) addresses that the service then reads; ``fetch_private`` lets
    those lie in private networks too. ``run`` names the run whose work stream the replicas drain; without it,
    or without a Redis address, they serve HTTP only; ``work_latent`` adds the latent to its spans.
    ``max_queued_bytes`` bounds the media that wait in a replica. ``run_dir`` is where logs go.
    """

    section: ClassVar[str] = "service"
    environment_names: ClassVar[dict[str, str]] = {"run": "ERNIE_MULTI_RUN"}

    text: TextPoolSettings = TextPoolSettings()
    audio: PoolSettings = PoolSettings()
    vision: VisionPoolSettings = VisionPoolSettings()
    scaling: ScalingSettings = ScalingSettings()
    limits: LimitSettings = LimitSettings()
    max_queued_bytes: Positive = 256 << 20
    fetch_urls: bool = False
    fetch_private: bool = False
    fetch_max_bytes: Annotated[int, Field(ge=1)] = 32 << 20
    fetch_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    redis: RedisSettings = RedisSettings()
    work_batch_size: Annotated[int, Field(ge=1)] = 32
    work_latent: bool = False
    run_dir: Path | None = None
    ray_address: str | None = None
    ray_cpus: Annotated[int, Field(ge=1)] | None = None
    object_store_bytes: Annotated[int, Field(ge=80_000_000)] = 150_000_000
    gpus_per_replica: Annotated[float, Field(ge=0)] | None = None

    def pool(self, service: ServiceName) -> PoolSettings:
        """The pool of a service."""
        pools: dict[str, PoolSettings] = {"text": self.text, "audio": self.audio, "vision": self.vision}
        return pools[service]

    def replicas_of(self, service: ServiceName) -> tuple[int, int | None]:
        """The number of replicas of a service, and the largest one where it follows the load."""
        pool = self.pool(service)
        return pool.replicas or self.replicas, pool.max_replicas

    @model_validator(mode="after")
    def _pools_can_grow(self) -> TokenizerServiceSettings:
        services: tuple[ServiceName, ...] = ("text", "audio", "vision")
        for service in services:
            least, most = self.replicas_of(service)
            if most is not None and most < least:
                raise ValueError(
                    f"{service}.max_replicas {most} is below the {least} replicas that it starts with; raise "
                    f"it, or set {service}.replicas"
                )
        return self
