"""What the tokenizers keep, how fast they are on one core, and what a service adds.

Usage: python benchmarks/tokenizers.py [--quick] [--without-service] [--rounds N]

On held-out media (built corpora where they are, else the shipped one; the lines say which): the round trip of
every modality's sample file; PSNR of pictures of 64 x 64 beside JPEG and WebP at equal bits, with and without
their header bytes; the share of spoken digits that a judge still recognises. On one core: items and megabytes
of files a second, a batch of 16 against 16 single calls, the share of time that decoding containers takes,
memory by length of the file. Then Ray Serve: processor time of a batch of 16 through a service over that of
the tokenizer in this process. Arms take turns, times are processor time, figures are medians. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the figures are those of one core, here and in the replicas

import numpy as np
import torch
from _measure import (
    machine,
    peak_mb,
    print_json,
    resident_peak_mb,
    show_machine,
    show_table,
    take_turns,
    version_of,
)
from _tokenizer_data import (
    SIDE,
    HeldOut,
    curve,
    pictures,
    psnr,
    sample_segment,
    spoken_digits,
    texts,
)
from PIL import Image

from ernie5.protocol.errors import ErnieMultiError, UnavailableError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import ScalesLayout, TokenSpan
from ernie5.tokenizers.audio.evaluation import JUDGE_SAMPLES, shipped_judge
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.preprocessing import Waveform, read_audio, write_audio
from ernie5.tokenizers.audio.tokenizer import AudioTokenizer
from ernie5.tokenizers.modalities import BUILT_IN, ServiceTokenizer, with_modalities
from ernie5.tokenizers.modalities.bases import load_base
from ernie5.tokenizers.modalities.registry import round_trip
from ernie5.tokenizers.vision.preprocessing import open_image
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer
from ernie5.tokenizers.vision.weights_file import load_weights

BATCH = 16
SERVICES = ("text", "audio", "vision")
OVERHEAD_BAR, TEXT_BAR_MS = 0.25, 4.0


def good(results: list[Any]) -> list[Any]:
    """The results, all of them spans or media; raises the first error."""
    for result in results:
        if isinstance(result, ErnieMultiError):
            raise result
    return results


def round_trips(bases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each modality's sample file: what came back, and whether that is within its stated limit."""
    told: dict[str, dict[str, Any]] = {}
    for name, codec in BUILT_IN.items():
        try:
            figure = round_trip(codec, bases[codec.modality.service])
            told[name] = {"passed": figure.passed, "round_trip": str(figure)}
        except ErnieMultiError as error:
            told[name] = {"passed": False, "round_trip": error.message}
    return told


def image_figures(held_out: HeldOut) -> dict[str, Any]:
    """PSNR and bits a pixel at each bit width of the weights, beside JPEG and WebP at equal bits."""
    curves = {kind: curve(kind, held_out.labels) for kind in ("JPEG", "WEBP")}
    figures: dict[str, Any] = {}
    for bits in widths():
        tokenizer = VisionTokenizer.load(device="cpu", bits=bits)
        rates, decibels = [], []
        for start in range(0, len(held_out.segments), BATCH):
            part = held_out.segments[start : start + BATCH]
            spans = good(tokenizer.encode_segments(part, features=False))
            for span, original in zip(spans, held_out.labels[start : start + BATCH]):
                assert isinstance(span.layout, ScalesLayout)
                rates.append(span.layout.bits * span.codes.size / SIDE**2)
                decibels.append(psnr(np.asarray(tokenizer.decode(span)), original))
        rate = float(np.mean(rates))
        figures[str(tokenizer.bits)] = {
            "bpp": rate,
            "psnr": float(np.mean(decibels)),
            "psnr_median": float(np.median(decibels)),
            **{
                f"{kind.lower()}_{how}": curves[kind].at(rate, payload=how == "payload")
                for kind in curves
                for how in ("payload", "with_header")
            },
        }
    return {
        "by_bits": figures,
        "lowest": {
            kind.lower(): {"bpp": known.bpp[0], "psnr": known.psnr[0], "header_bytes": known.header}
            for kind, known in curves.items()
        },
    }


def widths() -> list[int]:
    """Bit widths of the shipped vision weights, the smallest first."""
    model, _ = load_weights()
    return sorted(model.config.bit_widths)


def speech_figures(held_out: HeldOut) -> dict[str, Any]:
    """The judge's accuracy on clips decoded from 8 and 4 levels, over that on the originals."""
    tokenizer, judge = AudioTokenizer.load(), shipped_judge()
    right: dict[str, list[bool]] = {"original": [], "8": [], "4": []}
    for segment, digit in zip(held_out.segments, held_out.labels):
        assert segment.data is not None
        original = read_audio(segment.data, segment.content_type)
        span = tokenizer.encode(original, features=False)
        heard = {"original": original} | {str(levels): tokenizer.decode(span, levels) for levels in (8, 4)}
        for name, waveform in heard.items():
            right[name].append(_recognised(judge, waveform) == digit)
    shares = {name: float(np.mean(values)) for name, values in right.items()}
    return {
        "clips": len(held_out.segments),
        "judge_original": shares["original"],
        "ratio_8_levels": shares["8"] / max(shares["original"], 1e-9),
        "ratio_4_levels": shares["4"] / max(shares["original"], 1e-9),
    }


def _recognised(judge: torch.nn.Module, waveform: Waveform) -> int:
    samples = torch.from_numpy(np.array(waveform.samples[:JUDGE_SAMPLES]))
    padded = torch.nn.functional.pad(samples, (0, JUDGE_SAMPLES - len(samples)))
    with torch.inference_mode():
        return int(judge(log_mel(padded[None])).argmax())


def container_arm(name: str, segments: list[Segment]) -> Callable[[], object] | None:
    """Decoding the files alone; None where the medium is a text and has no container."""
    codec = BUILT_IN[name]
    if name in ("text", "code"):
        return None
    files = [(segment.payload, segment.content_type) for segment in segments]
    if name == "image":
        return lambda: [open_image(data) for data, _ in files]
    if name in ("speech", "sound"):
        return lambda: [read_audio(data, content_type) for data, content_type in files]
    if codec.wraps_base:
        return video_container(files)
    return lambda: [codec.read_checked(data, content_type) for data, content_type in files]


def video_container(files: list[tuple[bytes, str | None]]) -> Callable[[], object] | None:
    """Decoding clips, where this version of the vision tokenizer reads any."""
    try:
        from ernie5.tokenizers.vision.video.files import read_clip
    except ImportError:
        return None
    return lambda: [read_clip(data) for data, _ in files]


def speed(
    tokenizers: dict[str, ServiceTokenizer], media: dict[str, list[Segment]], rounds: int
) -> dict[str, dict[str, float | None]]:
    """Of each modality: items and MB a second in a batch, the batch's gain, the container's share."""
    figures: dict[str, dict[str, float | None]] = {}
    for name, segments in media.items():
        tokenizer = tokenizers[BUILT_IN[name].modality.service]
        encode = partial(tokenizer.encode_segments, features=False)
        spans: list[TokenSpan] = good(encode(segments))
        arms: dict[str, Callable[[], object]] = {
            "batch": lambda encode=encode, segments=segments: encode(segments),  # type: ignore[misc]
            "single": lambda encode=encode, segments=segments: [encode([one]) for one in segments],  # type: ignore[misc]
            "decode": partial(tokenizer.decode_spans, spans),
        }
        if (container := container_arm(name, segments)) is not None:
            arms["container"] = container
        timed = take_turns(arms, rounds=rounds, threads=1)
        batch_s = timed.median("batch") or float("nan")
        size = sum(len(segment.payload) for segment in segments)
        figures[name] = {
            "items": len(segments),
            "items_per_s": len(segments) / batch_s,
            "mb_per_s": size / batch_s / 1e6,
            "decoded_items_per_s": len(segments) / (timed.median("decode") or float("nan")),
            "batch_gain": timed.ratio("single", "batch"),
            "container_share": 1 / ratio if (ratio := timed.ratio("batch", "container")) else 0.0,
        }
        print(f"  {name} measured", flush=True)
    return figures


def memory_of(kind: str, size: float) -> float:
    """MiB by which encoding one item raises this process's memory, the file itself not counted.

    ``image``: a PNG of ``size`` pixels a side; ``speech``: ``size`` seconds of sound in WAV; ``stream``: the
    same read and encoded block by block.
    """
    torch.set_num_threads(1)
    if kind == "image":
        ramp = np.indices((int(size), int(size))).sum(0) % 256
        buffer = io.BytesIO()
        Image.fromarray(ramp.astype(np.uint8)).convert("RGB").save(buffer, "PNG", compress_level=1)
        base: Any = VisionTokenizer.load(device="cpu")
        segments = [sample_segment("image"), Segment(modality="image", data=buffer.getvalue())]
    else:
        clip = read_audio(sample_segment("speech").data or b"", "audio/ogg").samples
        samples = np.resize(clip, int(size * 16_000)).astype(np.float32)
        base = AudioTokenizer.load()
        segments = [
            sample_segment("speech"),
            Segment(modality="speech", data=write_audio(Waveform(samples, 16_000))[0]),
        ]
        del samples
    if kind == "stream":
        return _streamed_mb(base, [segment.data or b"" for segment in segments])
    warm_up, measured = segments
    good(base.encode_segments([warm_up], features=False))
    return resident_peak_mb(lambda: good(base.encode_segments([measured], features=False)))


def _streamed_mb(tokenizer: AudioTokenizer, files: list[bytes]) -> float:
    from ernie5.tokenizers.audio.streaming import encode_file

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{place}.audio" for place in range(len(files))]
        for path, data in zip(paths, files):
            path.write_bytes(data)
        files.clear()
        warm_up, measured = paths
        codes = sum(len(part) for part in encode_file(tokenizer, warm_up))
        assert codes
        return resident_peak_mb(lambda: sum(len(part) for part in encode_file(tokenizer, measured)))


def service_figures(
    tokenizers: dict[str, ServiceTokenizer], media: dict[str, list[Segment]], rounds: int
) -> dict[str, Any]:
    """The cost of each service with a batch of 16; see :mod:`_tokenizer_service`."""
    from _tokenizer_service import cost, running

    figures: dict[str, Any] = {}
    with running(SERVICES) as url:
        for service, name in (("text", "text"), ("audio", "speech"), ("vision", "image")):
            segments = media[name]
            alone = partial(tokenizers[service].encode_segments, segments, features=False)
            figures[name] = cost(url, service, segments, alone, rounds)
            print(f"  {service} service measured", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer media and rounds, a few minutes")
    parser.add_argument("--tiny", action="store_true", help="the least that goes through, for the tests")
    parser.add_argument("--without-service", action="store_true", help="don't start Ray Serve")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    small = options.quick or options.tiny
    rounds = options.rounds or (1 if options.tiny else 3 if options.quick else 7)
    torch.set_num_threads(1)
    facts = machine(1) | {name: version_of(name) for name in ("ray", "pillow", "soundfile", "sentencepiece")}
    show_machine(facts)
    print(", ".join(f"{name} {facts[name]}" for name in ("ray", "pillow", "soundfile", "sentencepiece")))

    bases = {service: load_base(service) for service in SERVICES}
    trips = round_trips(bases)
    passed = sum(trip["passed"] for trip in trips.values())
    tokenizers = {service: with_modalities(service, base) for service, base in bases.items()}
    drawings = pictures(16 if options.tiny else 100 if small else 600)
    digits = spoken_digits(16 if options.tiny else 100 if small else 1000)
    writings = texts(BATCH)
    image, speech = image_figures(drawings), speech_figures(digits)
    first = next(iter(image["by_bits"].values()))
    print(f"\npictures of {SIDE} x {SIDE}: {drawings.source}; mean PSNR, dB")
    print("JPEG and WebP at the same bits a pixel; payload: without the bytes of an all-white picture")
    show_table(
        [{"bits": bits} | known for bits, known in image["by_bits"].items()],
        ["bits", "bpp", "psnr", "jpeg_payload", "jpeg_with_header", "webp_payload", "webp_with_header"],
    )
    for kind, known in image["lowest"].items():
        print(
            f"lowest {kind}: {known['bpp']:.3f} bpp with its {known['header_bytes']:.0f} header bytes, "
            f"{known['psnr']:.2f} dB"
        )
    print(f"\nspeech: {digits.source}; judge's accuracy on decoded clips over that on originals")
    show_table([speech], list(speech))

    samples = {name: [sample_segment(name)] * BATCH for name, trip in trips.items() if _taken(name, bases)}
    media = samples | {
        "image": drawings.segments[:BATCH],
        "speech": digits.segments[:BATCH],
        "text": writings.segments[:BATCH],
    }
    print("\nspeed on one core, batches of 16")
    speeds = speed(tokenizers, media, rounds)
    data_of = {"image": drawings.source, "speech": digits.source, "text": writings.source}
    show_table(
        [
            {"modality": name, "media": data_of.get(name, "sample file")} | known | trips[name]
            for name, known in speeds.items()
        ],
        [
            "modality",
            "media",
            "items_per_s",
            "mb_per_s",
            "decoded_items_per_s",
            "batch_gain",
            "container_share",
            "passed",
            "round_trip",
        ],
    )

    seconds = (10, 60) if small else (10, 60, 600)
    sizes = {"image": (64, 1000) if small else (64, 1000, 4000), "speech": seconds, "stream": seconds}
    memory = {
        f"{kind}_{size}": peak_mb(memory_of, kind, float(size))
        for kind, known in sizes.items()
        for size in known
    }
    print("\nmemory of one item beyond its file, MiB (pixels a side; seconds)")
    show_table([memory], list(memory))

    costs: dict[str, Any] = {}
    if not options.without_service:
        try:
            costs = service_figures(tokenizers, media, 1 if options.tiny else 5 if options.quick else 15)
        except UnavailableError as error:
            print(f"no figures of the services: {error}")
    if costs:
        print("\na batch of 16 through Ray Serve (JSON in, wire out), processor time in ms")
        show_table(
            [
                {
                    "media": name,
                    "in_process": 1e3 * known.alone_s,
                    "service": 1e3 * known.service_s,
                    **known.parts,
                    "overhead": known.overhead,
                    "extra_ms": known.extra_ms,
                    "wall_ms": known.wall_ms,
                }
                for name, known in costs.items()
            ],
            [
                "media",
                "in_process",
                "service",
                "client",
                "proxy",
                "replica",
                "overhead",
                "extra_ms",
                "wall_ms",
            ],
        )

    def column(key: str) -> dict[str, float | None]:
        return {name: known[key] for name, known in speeds.items()}

    print_json(
        {
            "machine": facts,
            "data": {"image": drawings.source, "speech": digits.source, "text": writings.source},
            "modalities": passed,
            "modalities_known": len(BUILT_IN),
            "image_psnr": first["psnr"],
            "image_bpp": first["bpp"],
            "jpeg_psnr_same_bpp": first["jpeg_payload"],
            "jpeg_psnr_same_bpp_with_header": first["jpeg_with_header"],
            "webp_psnr_same_bpp": first["webp_payload"],
            "webp_psnr_same_bpp_with_header": first["webp_with_header"],
            "image": image,
            "speech_recognised_ratio": speech["ratio_8_levels"],
            "speech": speech,
            "items_per_s": column("items_per_s"),
            "mb_per_s": column("mb_per_s"),
            "decoded_items_per_s": column("decoded_items_per_s"),
            "batch_gain": column("batch_gain"),
            "container_share": column("container_share"),
            "peak_mb_per_item": memory,
            "service_overhead": {name: known.overhead for name, known in costs.items() if name != "text"},
            "service_overhead_bar": OVERHEAD_BAR,
            "text_overhead_ms": costs["text"].extra_ms if costs else None,
            "text_overhead_bar_ms": TEXT_BAR_MS,
            "service_wall_ms": {name: known.wall_ms for name, known in costs.items()},
        }
    )


def _taken(name: str, bases: dict[str, Any]) -> bool:
    """Whether the weights at hand take a modality: a picture tokenizer may have none for video."""
    codec = BUILT_IN[name]
    return not codec.wraps_base or name in bases[codec.modality.service].modalities


if __name__ == "__main__":
    main()
