"""`ernie-multi chat`: a conversation in the terminal with a running gateway, media included.

A line is a message. ``/image FILE`` and ``/audio FILE`` lay a medium into the next message, ``/new`` starts
over and ``/quit`` ends. Pictures and sounds of the answers are written to files, whose names are printed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "ERNIE_MULTI_API_KEY"
_IMAGE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
}


class Conversation:
    """The messages so far, and the media that wait for the next one."""

    def __init__(self, client: httpx.Client, model: str, out: Path, max_tokens: int | None = None) -> None:
        self.client, self.model, self.out, self.max_tokens = client, model, out, max_tokens
        self.messages: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []
        self._files = 0

    def attach(self, kind: str, path: Path) -> None:
        """Lay a picture or a sound into the next message.

        Raises:
            InvalidInputError: the file can't be read, or its name has an unknown ending.
        """
        try:
            data = base64.b64encode(path.expanduser().read_bytes()).decode()
        except OSError as error:
            raise InvalidInputError(f"{path}: {error.strerror}", param=kind) from None
        suffix = path.suffix.lower()
        if kind == "audio":
            audio = {"data": data, "format": suffix.removeprefix(".") or "wav"}
            self.waiting.append({"type": "input_audio", "input_audio": audio})
        elif suffix in _IMAGE_TYPES:
            url = f"data:{_IMAGE_TYPES[suffix]};base64,{data}"
            self.waiting.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise InvalidInputError(f"{path}: a picture ends in {', '.join(_IMAGE_TYPES)}", param=kind)

    def ask(self, text: str) -> Iterator[str]:
        """Send a message; yields pieces of the answer as they come, and a line for each medium written."""
        content: Any = [*self.waiting, *([{"type": "text", "text": text}] if text else [])]
        if not self.waiting:
            content = text
        self.waiting = []
        self.messages.append({"role": "user", "content": content})
        answer, media, sound, rate = "", False, b"", 0
        try:
            for delta in self._deltas():
                if piece := delta.get("content"):
                    answer += piece
                    yield piece
                for image in delta.get("images", ()):
                    header, _, data = image["image_url"]["url"].partition(",")
                    suffix = header.removeprefix("data:image/").partition(";")[0]
                    yield f"\n[{self._write(suffix, base64.b64decode(data))}]\n"
                    media = True
                if data := delta.get("audio", {}).get("data"):
                    sound += base64.b64decode(data)
                    rate = delta["audio"]["sample_rate"]
        except ErnieMultiError:
            self.messages.pop()
            raise
        if sound:
            yield f"\n[{self._write('wav', wav(sound, rate))}]\n"
            media = True
        self.messages.append({"role": "assistant", "content": answer or ("[media]" if media else "")})

    def _deltas(self) -> Iterator[dict[str, Any]]:
        # Only samples without headers can be joined from pieces.
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "audio": {"format": "pcm16", "voice": "default"},
            "max_tokens": self.max_tokens,
        }
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for event in events_of(response.iter_lines()):
                    if "error" in event:
                        raise UnavailableError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"]
        except httpx.HTTPError as error:
            raise UnavailableError(f"the gateway at {self.client.base_url} is gone: {error}") from None

    def _write(self, suffix: str, data: bytes) -> Path:
        """Write a medium under the first free name."""
        self.out.mkdir(parents=True, exist_ok=True)
        while True:
            self._files += 1
            path = self.out / f"answer-{self._files}.{suffix}"
            try:
                with path.open("xb") as file:
                    file.write(data)
                return path
            except FileExistsError:
                continue


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON values of server-sent events; comments are skipped, ``[DONE]`` ends."""
    for line in lines:
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line[6:])


def wav(samples: bytes, rate: int) -> bytes:
    """A WAV file of 16-bit samples of one channel at ``rate`` (Hz)."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples)
    return file.getvalue()


def _refusal(response: httpx.Response) -> ErnieMultiError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    kind = InvalidInputError if response.status_code < 500 else UnavailableError
    return kind(f"the gateway answers {response.status_code}: {message}")


def connect(url: str, model: str | None) -> tuple[httpx.Client, str]:
    """A client of the gateway and the model to talk to: the one named, else the first it serves.

    Raises:
        UnavailableError: no gateway answers, or it has no model.
        InvalidInputError: it refuses the key, or does not serve the model.
    """
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=300.0))
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"no gateway answers at {url} ({error}); start one with `ernie-multi up`, or name one by --url"
        ) from None
    if response.status_code != 200:
        raise _refusal(response)
    served = [entry["id"] for entry in response.json()["data"]]
    if not served:
        raise UnavailableError(f"the gateway at {url} has no inference worker")
    if model is not None and model.partition(":")[0] not in served:
        raise InvalidInputError(f"{url} serves {', '.join(served)}, not {model!r}", param="model")
    return client, model or served[0]


def run(
    *,
    model: str | None = None,
    url: str | None = None,
    out: Path = Path("answers"),
    max_tokens: int | None = None,
    lines: TextIO | None = None,
    screen: TextIO | None = None,
) -> None:
    """Talk until ``/quit`` or the end of input (``lines``, standard input unless given)."""
    lines, screen = lines or sys.stdin, screen or sys.stdout
    client, chosen = connect(url or DEFAULT_URL, model)
    with contextlib.closing(client):
        conversation = Conversation(client, chosen, out, max_tokens)
        print(f"{chosen} at {client.base_url}; /image FILE, /audio FILE, /new, /quit", file=screen)
        while True:
            print("> ", end="", file=screen, flush=True)
            line = lines.readline()
            if not line:
                print(file=screen)
                return
            command, _, rest = line.strip().partition(" ")
            try:
                if command == "/quit":
                    return
                if command == "/new":
                    conversation = Conversation(client, chosen, out, max_tokens)
                elif command in ("/image", "/audio"):
                    conversation.attach(command[1:], Path(rest.strip()))
                elif command.startswith("/"):
                    print(f"unknown command {command}", file=screen)
                elif line.strip() or conversation.waiting:
                    for piece in conversation.ask(line.strip()):
                        print(piece, end="", file=screen, flush=True)
                    print(file=screen)
            except ErnieMultiError as error:
                print(f"error: {error.message}", file=screen)
