"""The backbone on a GPU: the trainer's step and the engine's, right first, then timed.

Usage: benchmarks/gpu.sh (after the attention kernels), or: python benchmarks/gpu_backbone.py [--preset base]

1. Losses of a few steps of training and greedy answers, the same on the CPU and on the GPU (float32 without
   TF32).
2. Tokens a second of the trainer's step on packed rows of text, pictures and sounds, and of answering text:
   float32 without and with TF32, bf16 on float32 master weights, each plain and compiled.

A figure is the median of whole steps, the host's part included; the first steps, which compile and tune, are
left out. What fails is named, and does not stop the rest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ernie5.backbone.config import BackboneConfig, preset
from ernie5.backbone.execution import CPU, Execution, wait_for
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.model.placement import place
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.protocol.generation import GenerationParams, Request
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.samples import Role
from ernie5.protocol.tokens import (
    CodebooksLayout,
    ScalesLayout,
    SequenceLayout,
    TokenSegment,
    TokenSequence,
    TokenSpan,
)

EXACT = Execution(device="cuda", tf32=False)
# (name, compute dtype, TF32)
PRECISIONS = (("fp32", "float32", False), ("tf32", "float32", True), ("bf16_masters", "bfloat16", True))
_WARM_UP, _STEPS = 4, 8


def samples(config: BackboneConfig, seed: int) -> Iterator[tuple[int, TokenSequence]]:
    """Endless random samples: a text, a picture to read and one to draw, a sound to write down, in turn."""
    rng = np.random.default_rng(seed)

    def text(role: Role, length: int) -> TokenSegment:
        codes = rng.integers(0, config.text_vocabulary, length).astype(np.int32)
        return TokenSegment(TokenSpan("text", SequenceLayout(config.text_vocabulary), codes, ""), role)

    def picture(role: Role) -> TokenSegment:
        layout = ScalesLayout(config.bits, schedule_for((8, 8)))
        codes = rng.integers(0, 1 << config.bits, layout.cells_per_frame).astype(np.uint32)
        features = {
            name: rng.standard_normal((16, 4, width)).astype(np.float16)
            for name, width in config.features.items()
        }
        return TokenSegment(TokenSpan("image", layout, codes, "", features=features), role)

    def sound(role: Role, frames: int = 40) -> TokenSegment:
        layout = CodebooksLayout(config.audio_codebook, config.audio_levels, 12.5, 16000, frames * 1280)
        codes = rng.integers(0, config.audio_codebook, (frames, config.audio_levels)).astype(np.int16)
        features = {
            name: rng.standard_normal((frames, 1, width)).astype(np.float16)
            for name, width in config.sound_features.items()
        }
        return TokenSegment(TokenSpan("speech", layout, codes, "", features=features), role)

    position = 0
    while True:
        segments = (
            (text("target", 200),),
            (picture("context"), text("target", 20)),
            (text("context", 20), picture("target")),
            (sound("context"), text("target", 20)),
        )[position % 4]
        yield position, TokenSequence(str(position), segments)
        position += 1


def train(
    config: BackboneConfig, training: TrainingConfig, execution: Execution
) -> tuple[list[float], list[float], list[int]]:
    """Losses, seconds and tokens of every step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, training, Path(folder), {}, execution=execution)
        losses, seconds, tokens = [], [], []
        for report in trainer.run(samples(config, seed=0)):
            losses.append(report.loss)
            seconds.append(report.seconds)
            tokens.append(report.tokens)
    return losses, seconds, tokens


def answer(model: Backbone, count: int, tokens: int) -> tuple[list[list[int]], float]:
    """Greedy texts of ``count`` requests in one batch, and the seconds that all took."""
    engine = InferenceEngine(model, {}, capacity=count, max_length=256 + tokens)
    rng = np.random.default_rng(1)
    for number in range(count):
        codes = rng.integers(0, model.config.text_vocabulary, 100 + number).astype(np.int32)
        span = TokenSpan("text", SequenceLayout(model.config.text_vocabulary), codes, "")
        request = TokenSequence("", (TokenSegment(span, "context"),))
        engine.submit(
            Request(str(number), request, GenerationParams(max_tokens=tokens, temperature=0.0, seed=0))
        )
    said: dict[str, list[int]] = {str(number): [] for number in range(count)}
    wait_for(model.device)
    started = time.perf_counter()
    while engine.active:
        for event in engine.step():
            if hasattr(event, "token"):
                said[event.request_id].append(event.token)
    return list(said.values()), time.perf_counter() - started


def loud(config: BackboneConfig, execution: Execution, dtype: torch.dtype = torch.float32) -> Backbone:
    """A random model whose arg-maxima are far from ties."""
    model = Backbone(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.compute_dtype = dtype
    place(model, execution)
    return model.eval()


def check() -> dict[str, Any]:
    """The CPU's losses and answers against the GPU's."""
    config = preset("nano")
    training = TrainingConfig(steps=4, rows=2, row_length=512, warmup=1)
    (cpu, *_), (gpu, *_) = (train(config, training, execution) for execution in (CPU, EXACT))
    worst = max(abs(a - b) / abs(b) for a, b in zip(gpu, cpu))
    (here, _), (there, _) = (answer(loud(config, execution), 4, 16) for execution in (CPU, EXACT))
    same = sum(a == b for left, right in zip(here, there) for a, b in zip(left, right))
    total = sum(map(len, here))
    print(
        f"training: losses differ by {worst:.1e} at most; answers: {same} of {total} tokens equal", flush=True
    )
    return {"loss_error": worst, "equal_tokens": same, "tokens": total, "ok": worst < 1e-3 and same == total}


def arms(config: BackboneConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by precision and compilation, of training and of answering."""
    found: dict[str, Any] = {}
    for name, dtype, tf32 in PRECISIONS:
        for compiled in (False, True):
            arm = f"{name}{'_compiled' if compiled else ''}"
            execution = Execution(device="cuda", tf32=tf32, compile=compiled)

            def training(dtype: str = dtype, execution: Execution = execution) -> float:
                plan = TrainingConfig(
                    steps=_WARM_UP + _STEPS,
                    rows=options.rows,
                    row_length=options.length,
                    microbatch_rows=options.rows,
                    compute_dtype=dtype,
                )
                _, seconds, tokens = train(config, plan, execution)
                rates = [count / took for count, took in zip(tokens, seconds)]
                return statistics.median(rates[_WARM_UP:])

            def answering(dtype: str = dtype, execution: Execution = execution) -> float:
                model = loud(config, execution, getattr(torch, dtype))
                answer(model, options.requests, 16)
                said, seconds = answer(model, options.requests, 64)
                return sum(map(len, said)) / seconds

            found[arm] = {
                "training_tokens_per_s": attempt(f"{arm}, training", training),
                "answering_tokens_per_s": attempt(f"{arm}, answering", answering),
            }
            print(arm, json.dumps(found[arm]), flush=True)
    return found


def attempt(what: str, measure: Callable[[], float]) -> float | str:
    """A figure, or what kept it from being measured."""
    try:
        return round(measure(), 1)
    except Exception as error:
        # One arm's failure is a finding; the others' figures are wanted all the same.
        print(f"  {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return f"{type(error).__name__}: {str(error)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="base", help="network of part 2 (default base)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="positions of a row (default 2048)")
    parser.add_argument("--requests", type=int, default=16, help="answered together (default 16)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "preset": options.preset,
        "rows": options.rows,
        "length": options.length,
        "requests": options.requests,
    }
    print(", ".join(f"{name} {value}" for name, value in report.items()), flush=True)
    try:
        report["check"] = check()
    except Exception as error:
        report["check"] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(f"check: {report['check']['error']}", flush=True)
    report["arms"] = arms(preset(options.preset), options)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report)
    (options.out / "gpu_backbone.json").write_text(text + "\n")
    print(text)
    return 0 if report["check"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
