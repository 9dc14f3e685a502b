"""Protects the operator's limits on media and the way of the vision network, as the settings name them."""

from __future__ import annotations

import asyncio
import io

import httpx
import pytest
from PIL import Image

from ernie5.protocol.errors import InvalidInputError, MediaTooLargeError, UnavailableError
from ernie5.protocol.samples import Segment
from ernie5.services.batching import Batcher
from ernie5.services.limited_tokenizer import LimitedTokenizer, payload_bytes
from ernie5.services.tokenizer_service import build_replica_app, load_tokenizer
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from tests.services.media_files import tone
from tests.services.stream_helpers import ByteTokenizer


def settings_of(**values: object) -> TokenizerServiceSettings:
    return TokenizerServiceSettings.model_validate(values)


def text(value: str) -> Segment:
    return Segment(modality="text", text=value)


def test_what_is_too_large_is_refused_in_its_place_and_never_read() -> None:
    inner = ByteTokenizer("text")
    tokenizer = LimitedTokenizer(inner, {"text": 6})
    results = tokenizer.encode_segments([text("a"), text("ÄÖÜä"), text("ÄÖÜ")])
    assert isinstance(results[1], MediaTooLargeError)
    assert results[1].message == (
        "text of 8 bytes is above this service's limit of 6 bytes; shrink or split it, or raise "
        "ERNIE_MULTI_SERVICE_LIMITS_BYTES"
    )
    assert inner.calls == [2]
    assert payload_bytes(text("\ud800")) == 3, "what is no Unicode is the tokenizer's to refuse"
    assert tokenizer.hash == inner.hash and tokenizer.modalities == inner.modalities


async def test_the_limit_holds_over_http_for_its_modality_only() -> None:
    settings = settings_of(limits={"bytes": {"text": 100}})
    app = build_replica_app("text", settings.model_dump_json(exclude_defaults=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        items = [{"text": "a" * 101, "modality": "code"}, {"text": "a" * 101}]
        refused = await client.post("/v1/tokenize", json={"items": items})
        taken = await client.post("/v1/tokenize", json={"items": items[:1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "items[1]")
    assert "101 bytes is above this service's limit of 100" in refused.json()["error"]["message"]
    assert taken.status_code == 200


def test_sounds_are_bounded_in_seconds() -> None:
    tokenizer = load_tokenizer("audio", settings_of(limits={"audio_seconds": 0.25}))
    short, long = (Segment(modality="speech", data=tone(seconds)) for seconds in (0.2, 0.5))
    good, refused = tokenizer.encode_segments([short, long])
    assert isinstance(refused, MediaTooLargeError) and "0.5 s; the limit is 0" in refused.message
    assert not isinstance(good, Exception)


def test_pictures_are_bounded_in_pixels_and_run_as_asked() -> None:
    settings = settings_of(
        vision={"device": "cpu", "dtype": "bfloat16", "compile": True},
        limits={"image_side": 100, "image_pixels": 3000},
    )
    tokenizer = load_tokenizer("vision", settings)
    assert tokenizer.hash != load_tokenizer("vision").hash, "the hash tells how codes are made"
    for size, message in (((101, 5), "longer than 100 a side"), ((60, 60), "above the limit of 3000")):
        buffer = io.BytesIO()
        Image.new("RGB", size).save(buffer, "PNG")
        (refused,) = tokenizer.encode_segments([Segment(modality="image", data=buffer.getvalue())])
        assert isinstance(refused, MediaTooLargeError) and message in refused.message


def test_a_gpu_that_is_not_there_is_a_clear_error() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(InvalidInputError, match="no CUDA device is here; take device 'cpu'"):
        load_tokenizer("vision", settings_of(vision={"device": "cuda"}))


async def test_waiting_media_are_bounded_in_bytes() -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Gated(ByteTokenizer):
        def encode_segments(self, segments, **options):  # type: ignore[no-untyped-def]
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
            return super().encode_segments(segments, **options)

    batcher = Batcher(Gated("text"), max_items=4, max_queued=100, max_queued_bytes=1000)
    first = asyncio.create_task(batcher.encode([text("a" * 5000)]))  # nothing waits: it is taken
    await asyncio.wait_for(entered.wait(), 30)
    second = asyncio.create_task(batcher.encode([text("b" * 900)]))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="900 bytes of media wait already \\(limit 1000\\)"):
        await batcher.encode([text("c" * 101)])
    third = asyncio.create_task(batcher.encode([text("c" * 100)]))
    await asyncio.sleep(0)
    go_on.set()
    assert [len(result) for result in await asyncio.gather(first, second, third)] == [1, 1, 1]
    await asyncio.to_thread(batcher.close)
