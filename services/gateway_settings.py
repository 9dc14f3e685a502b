"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ernie5.protocol.service_settings import RedisSettings, Seconds, ServiceSettings

Count = Annotated[int, Field(ge=1)]


class GatewaySettings(ServiceSettings):
    """The OpenAI-compatible gateway.

    ``tokenizers_url`` is where the tokenizer services lie (``/text``, ``/audio`` and ``/vision`` below it); a
    service that runs elsewhere has an address of its own. ``tokenizers_key`` is their key,
    ``tokenizers_retry_s`` how long a service may be away (a replica being replaced). ``fetch_urls``
    lets messages name http(s) pictures. ``idle_timeout_s`` is how long an answer may make no progress.
    """

    section: ClassVar[str] = "gateway"
    environment_names: ClassVar[dict[str, str]] = {"api_key": "ERNIE_MULTI_API_KEY"}

    port: int = Field(default=8080, ge=0, le=65535)
    redis: RedisSettings = RedisSettings()
    tokenizers_url: str = "http://127.0.0.1:8000"
    text_url: str | None = None
    audio_url: str | None = None
    vision_url: str | None = None
    tokenizers_key: str | None = Field(default=None, repr=False)
    tokenizers_timeout_s: Seconds = 60.0
    tokenizers_retry_s: Annotated[float, Field(ge=0)] = 10.0
    fetch_urls: bool = False
    fetch_private: bool = False
    fetch_max_bytes: Count = 32 << 20
    fetch_timeout_s: Seconds = 10.0
    max_messages: Count = 256
    max_media: Count = 32
    default_max_tokens: Count = 512
    idle_timeout_s: Seconds = 120.0
    keep_alive_s: Seconds = 15.0

    def service_url(self, service: str) -> str:
        """The address of a tokenizer service, without a slash at its end."""
        own = {"text": self.text_url, "audio": self.audio_url, "vision": self.vision_url}[service]
        return (own or f"{self.tokenizers_url.rstrip('/')}/{service}").rstrip("/")
