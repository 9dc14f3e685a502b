"""Settings of the tokenizer services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from ernie5.protocol.service_settings import RedisSettings, ServiceSettings


class TokenizerServiceSettings(ServiceSettings):
    """A tokenizer service: HTTP, fetching, and the Ray it runs on.

    ``fetch_urls`` lets JSON items name http(s) addresses that the service then reads; ``fetch_private`` lets
    those lie in private networks too. ``run`` names the run whose work stream the replicas drain; without it,
    or without a Redis address, they serve HTTP only; ``work_latent`` adds the latent to its spans.
    ``run_dir`` is where logs go.
    """

    section: ClassVar[str] = "service"
    environment_names: ClassVar[dict[str, str]] = {"run": "ERNIE_MULTI_RUN"}

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
