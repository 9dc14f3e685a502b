"""A client of the tokenizer services: media to spans and back, over HTTP in the wire format."""

from __future__ import annotations

import asyncio

import httpx

from ernie5.protocol.errors import ErnieMultiError, UnavailableError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, decode_spans, encode_spans
from ernie5.services.gateway_settings import GatewaySettings
from ernie5.tokenizers.base import Medium

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class ServiceError(ErnieMultiError):
    """An error that a tokenizer service answered, passed on as it is."""

    def __init__(self, message: str, *, param: str | None, type: str, status: int) -> None:
        super().__init__(message, param=param)
        self.type, self.status = type, status


class TokenizerClient:
    """Calls the services named in the settings; close it with :meth:`aclose`."""

    def __init__(self, settings: GatewaySettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {}
        if settings.tokenizers_key is not None:
            headers["Authorization"] = f"Bearer {settings.tokenizers_key}"
        self._settings = settings
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(settings.tokenizers_timeout_s, connect=5.0),
            trust_env=False,
            transport=transport,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def tokenize(self, medium: Medium, modality: str, *, param: str | None = None) -> TokenSpan:
        """The span of a medium, with features for understanding.

        Raises:
            ServiceError: what the service found wrong with the medium.
            UnavailableError: the service does not answer.
        """
        response = await self._post(
            modality,
            "tokenize",
            medium.data,
            medium.content_type,
            TOKENS_CONTENT_TYPE,
            {"modality": modality, "features": "true"},
            param,
        )
        return decode_spans(response.content)[0]

    async def detokenize(self, span: TokenSpan, content_type: str) -> Medium:
        """The medium of a span in the wanted container; raises as :meth:`tokenize`."""
        response = await self._post(
            span.modality, "detokenize", encode_spans([span]), TOKENS_CONTENT_TYPE, content_type, {}, None
        )
        return Medium(response.content, response.headers.get("content-type", content_type))

    async def _post(
        self,
        modality: str,
        what: str,
        body: bytes,
        content_type: str,
        accept: str,
        query: dict[str, str],
        param: str | None,
    ) -> httpx.Response:
        service = modality_of(modality).service
        url = f"{self._settings.service_url(service)}/v1/{what}"
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.tokenizers_retry_s
        pause = _FIRST_PAUSE_S
        while True:
            # Repeating is safe: tokenising changes nothing and gives the same codes.
            try:
                response = await self._client.post(
                    url, content=body, params=query, headers={"Content-Type": content_type, "Accept": accept}
                )
                if response.status_code == 200:
                    return response
                _raise_told(response, service, param)
                problem = f"HTTP {response.status_code}"
            except httpx.HTTPError as error:
                problem = type(error).__name__
            if loop.time() + pause > give_up:
                raise UnavailableError(f"the {service} tokenizer service at {url} does not answer: {problem}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _raise_told(response: httpx.Response, service: str, param: str | None) -> None:
    """Raise what the service itself says is wrong.

    While a replica is being replaced, the proxy in front of it answers 404 or 500 in a form of its own; such
    an answer raises nothing here and is worth another try.
    """
    try:
        told = response.json()["error"]
        message, kind = str(told["message"]), str(told["type"])
    except (ValueError, KeyError, TypeError):
        return
    if response.status_code in (401, 403):
        raise UnavailableError(f"the {service} tokenizer service refused the gateway: {message}")
    if response.status_code >= 500:
        raise UnavailableError(f"the {service} tokenizer service failed: {message}")
    raise ServiceError(message, param=param, type=kind, status=response.status_code)
