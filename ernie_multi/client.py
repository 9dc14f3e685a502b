"""``ErnieMulti``: ask a trained model about text, a picture and a sound at once."""

from __future__ import annotations

import base64
import mimetypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError, UnavailableError
from ernie5.protocol.generation import GenerationParams
from ernie5.protocol.samples import Segment
from ernie_multi.models import find_model

if TYPE_CHECKING:
    from ernie_multi.local import LocalModel

URL_VARIABLE = "ERNIE_MULTI_URL"
KEY_VARIABLE = "ERNIE_MULTI_API_KEY"
_INPUTS = ("text", "image", "audio")
# OpenAI names the container of a sound, not its content type.
_AUDIO_FORMATS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".oga": "ogg", ".m4a": "m4a"}


@dataclass(frozen=True)
class Prediction:
    """An answer: its text, the first generated picture (PNG) and sound (WAV), and counts of tokens."""

    text: str
    image: bytes | None = None
    audio: bytes | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    finish_reason: str = "stop"


class ErnieMulti:
    """A trained model, in this process or behind a gateway.

    Args:
        model: a model's or a run's folder. Without it and without ``url``: ``ERNIE_MULTI_URL``, then
            ``ERNIE_MULTI_MODEL``, then the newest run below ``runs/``.
        url: address of a gateway (``http://127.0.0.1:8080/v1``); then ``model`` is a name there, which may
            ask for a part of the model (``mini:d60-w50-k1``).
        api_key: for the gateway; default ``ERNIE_MULTI_API_KEY``.
        expert_memory: how much of the experts' weights to hold in memory, ``"50MB"``; the others stay in the
            model's file until they are wanted. Answers are the same. All, by default.

    Raises:
        InvalidInputError: there is no model; the message names `make demo`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        expert_memory: str | None = None,
    ) -> None:
        self._local: LocalModel | None = None
        self._gateway: httpx.Client | None = None
        self._name = ""
        url = url or (os.environ.get(URL_VARIABLE) if model is None else None)
        if url is not None:
            if expert_memory is not None:
                raise InvalidInputError(
                    "expert_memory is for a model in this process; a gateway's workers have their own",
                    param="expert_memory",
                )
            key = api_key or os.environ.get(KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            base = url.rstrip("/")
            base = base if base.endswith("/v1") else f"{base}/v1"
            self._gateway = httpx.Client(base_url=base, headers=headers, timeout=timeout_s, trust_env=False)
            self._name = str(model) if model is not None else ""
            return
        folder = find_model(model)
        from ernie5.backbone.inference.offload import parse_bytes
        from ernie_multi.local import LocalModel

        memory = None if expert_memory is None else parse_bytes(expert_memory)
        self._local = LocalModel(folder, expert_memory=memory)

    def predict(self, inputs: Mapping[str, Any], **options: Any) -> Prediction:
        """Answer a question made of any of ``text``, ``image`` and ``audio``.

        Args:
            inputs: ``text`` is a string; ``image`` and ``audio`` are paths or the bytes of a file. A bare
                name that is no file here may be a shipped example, ``cat.jpg`` or ``meow.wav``.
            options: fields of :class:`~ernie5.protocol.generation.GenerationParams`: ``max_tokens``,
                ``temperature`` (default 0), ``seed``, ``modalities`` (default: the model decides).

        Raises:
            InvalidInputError: no or unknown inputs, or a medium that can't be read.
            UnavailableError: the gateway does not answer.
        """
        unknown = [name for name in inputs if name not in _INPUTS]
        if unknown or not inputs:
            raise InvalidInputError(
                f"inputs are any of {', '.join(_INPUTS)}; got {', '.join(unknown) or 'none'}", param="inputs"
            )
        options = {
            "temperature": 0.0,
            "media_temperature": 0.7,
            "modalities": ("text", "image", "speech"),
            **options,
        }
        if self._gateway is not None:
            return self._ask_gateway(inputs, options)
        assert self._local is not None
        segments = []
        for name, modality in (("image", "image"), ("audio", "speech")):
            if inputs.get(name) is not None:
                data, kind = _medium(inputs[name], name)
                segments.append(Segment(modality=modality, data=data, content_type=kind))
        if inputs.get("text") is not None:
            segments.append(Segment(modality="text", text=str(inputs["text"])))
        (answer,) = self._local.answer([segments], GenerationParams.model_validate(options))
        media = {span.modality: self._local.decode(span).data for span in reversed(answer.spans)}
        usage = answer.usage
        return Prediction(
            text=answer.text,
            image=media.get("image"),
            audio=media.get("speech", media.get("sound")),
            usage={
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            finish_reason=answer.finish_reason,
        )

    def _ask_gateway(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> Prediction:
        assert self._gateway is not None
        parts: list[dict[str, Any]] = []
        if inputs.get("image") is not None:
            data, kind = _medium(inputs["image"], "image")
            encoded = base64.b64encode(data).decode()
            parts.append(
                {"type": "image_url", "image_url": {"url": f"data:{kind or 'image/png'};base64,{encoded}"}}
            )
        if inputs.get("audio") is not None:
            data, _ = _medium(inputs["audio"], "audio")
            suffix = (
                Path(inputs["audio"]).suffix.lower()
                if not isinstance(inputs["audio"], bytes | bytearray)
                else ".wav"
            )
            encoded = base64.b64encode(data).decode()
            sound = {"data": encoded, "format": _AUDIO_FORMATS.get(suffix, "wav")}
            parts.append({"type": "input_audio", "input_audio": sound})
        if inputs.get("text") is not None:
            parts.append({"type": "text", "text": str(inputs["text"])})
        names = {"speech": "audio", "sound": "audio"}
        body = {
            "model": self._name or self._first_model(),
            "messages": [{"role": "user", "content": parts}],
            **options,
            "modalities": sorted({names.get(name, name) for name in options["modalities"]}),
        }
        if "audio" in body["modalities"]:
            body["audio"] = {"voice": "default", "format": "wav"}
        answer = self._post("chat/completions", body)
        choice = answer["choices"][0]
        message = choice["message"]
        image = audio = None
        for picture in message.get("images") or []:
            image = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
            break
        if message.get("audio"):
            audio = base64.b64decode(message["audio"]["data"])
        counts = {name: value for name, value in answer["usage"].items() if isinstance(value, int)}
        return Prediction(message.get("content") or "", image, audio, counts, choice["finish_reason"])

    def _first_model(self) -> str:
        models = self._request("GET", "models")["data"]
        if not models:
            raise UnavailableError("the gateway serves no model; start an inference worker")
        self._name = str(models[0]["id"])
        return self._name

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._gateway is not None
        try:
            response = self._gateway.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self._gateway.base_url} does not answer: {error}") from None
        if response.status_code == 200:
            return dict(response.json())
        try:
            problem = response.json()["error"]
            message, param = str(problem["message"]), problem.get("param")
        except (ValueError, KeyError, TypeError):
            message, param = f"{self._gateway.base_url} answered HTTP {response.status_code}", None
        if response.status_code < 500 and response.status_code not in (401, 403):
            raise InvalidInputError(message, param=param)
        raise (UnavailableError if response.status_code >= 500 else ErnieMultiError)(message, param=param)


def shipped_example(name: str) -> Path:
    """A file of the repository's ``examples/``."""
    return Path(__file__).resolve().parent.parent / "examples" / name


def _medium(value: Any, name: str) -> tuple[bytes, str | None]:
    """Bytes and content type of a path or of bytes."""
    if isinstance(value, bytes | bytearray):
        return bytes(value), None
    path = Path(value)
    if not path.exists() and path.parent == Path() and shipped_example(path.name).exists():
        path = shipped_example(path.name)
    try:
        return path.read_bytes(), mimetypes.guess_type(path.name)[0]
    except OSError as error:
        raise InvalidInputError(f"{name} {str(path)!r} can't be read: {error.strerror}", param=name) from None
