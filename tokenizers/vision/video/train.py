"""The recipe that trains the earlier slices of the video tokenizer on frozen picture weights, on one core.

    train_video(load_video_data(folder), image, digest, minutes=15, out=Path("runs/video-tokenizer"))

A run is bounded by minutes of the processor or by steps, writes a checkpoint now and then, and goes on from
it with ``resume=True``. It ends with the slices in float16, a card with the held-out figures, and strips.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ernie5.protocol.grids import schedule_for
from ernie5.tokenizers.vision.model import STRIDE, VisionModel
from ernie5.tokenizers.vision.training.checkpoint import (
    FILE,
    Checkpoint,
    named,
    optimizer_state,
    restore_optimizer,
    round_to_half,
    write_json,
)
from ernie5.tokenizers.vision.training.driver import Length, drive
from ernie5.tokenizers.vision.training.metrics import ssim
from ernie5.tokenizers.vision.training.optimizer import follow_cosine
from ernie5.tokenizers.vision.training.quantiser import BitBalance, quantise_straight_through
from ernie5.tokenizers.vision.video.data import ClipSampler, VideoData, held_out_clips
from ernie5.tokenizers.vision.video.evaluation import compare, evaluate_video, write_strips
from ernie5.tokenizers.vision.video.model import TemporalConfig, VideoModel, count_video_parameters
from ernie5.tokenizers.vision.video.weights import FORMAT_VERSION, load_video_weights, save_video_weights


@dataclass(frozen=True, slots=True)
class VideoTrainingOptions:
    """Settings of one run; losses are weighted sums, as for pictures (see :func:`_loss`)."""

    clips: int = 4
    frames: int = 4
    learning_rate: float = 1e-3
    average_decay: float = 0.995
    train_encoder: bool = False
    """Off, a frame has the codes of a picture and the decoder alone learns from the frames before. On, signs
    pass gradients only by estimate, and against frozen picture weights that lost 0.5 to 1 dB."""
    narrow_share: float = 0.6
    squared_weight: float = 20.0
    decibel_weight: float = 0.05
    structure_weight: float = 0.25
    balance_weight: float = 0.02
    commitment_weight: float = 0.01
    evaluate_seconds: float = 120.0
    seed: int = 0


def train_video(
    data: VideoData,
    image: VisionModel,
    image_digest: str,
    *,
    out: Path,
    minutes: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    start_from: Path | None = None,
    config: TemporalConfig | None = None,
    options: VideoTrainingOptions | None = None,
    card: dict[str, object] | None = None,
) -> dict[str, object]:
    """Train, evaluate, and write the slices (``video.*``), ``strips.png`` and ``metrics.json`` to ``out``.

    Args:
        data: see :func:`~ernie5.tokenizers.vision.video.data.load_video_data`.
        image: the picture network, which stays as it is.
        image_digest: sha256 of its weights; the slices will fit no others.
        out: folder of the run.
        minutes: training time, in minutes of the processor, evaluation not counted; or
        steps: number of steps. Exactly one of the two.
        resume: go on from ``out``'s checkpoint if there is one.
        start_from: ``video.safetensors`` to begin with, trained for these or similar picture weights.
        config: sizes of the slices.
        options: settings of the optimisation.
        card: more entries for the card (data, licences, command).

    Returns:
        The held-out figures (of the float16 weights).
    """
    length = Length(minutes, steps)
    if start_from is not None:
        model, _ = load_video_weights(image, None, start_from)
    else:
        model = VideoModel(image, config)
    run = _VideoRun(data, model, image_digest, options or VideoTrainingOptions(), out)
    seconds = run.options.evaluate_seconds
    drive(run, "video tokenizer", length, pause_seconds=seconds, resume=resume)
    run.save()
    final = run.averaged()
    round_to_half(final.past)
    figures = evaluate_video(final, data)
    write_strips(final, data, out / "strips.png")
    write_json(out / "metrics.json", {"figures": figures, "curve": run.curve})
    save_video_weights(
        final,
        image_digest,
        out / "video.safetensors",
        {
            **(card or {}),
            "parameters": count_video_parameters(final),
            "steps": run.step,
            "training_seconds": round(run.seconds, 1),
            "options": asdict(run.options),
            "figures": figures,
        },
    )
    return figures


class _VideoRun:
    """State of a training run: slices, their average, optimiser, counters."""

    def __init__(
        self, data: VideoData, model: VideoModel, image_digest: str, options: VideoTrainingOptions, out: Path
    ) -> None:
        torch.manual_seed(options.seed)
        self.data, self.options, self.out, self.image_digest = data, options, out, image_digest
        self.model = model.eval()
        self.model.image.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = {name: value.clone() for name, value in model.past.state_dict().items()}
        for name, slices in model.past.items():
            slices.requires_grad_(options.train_encoder or name.startswith("decoder"))
        self.optimizer = torch.optim.AdamW(
            (value for value in model.past.parameters() if value.requires_grad),
            options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.sampler = ClipSampler(data, clips=options.clips, frames=options.frames, seed=options.seed)
        self.balance = BitBalance()
        self.step, self.seconds, self.error = 0, 0.0, 0.01
        self.curve: list[dict[str, object]] = []

    def advance(self, progress: float) -> float:
        """One step at ``progress`` in [0, 1) of the run; returns the running mean squared error."""
        started = time.process_time()
        options = self.options
        follow_cosine([self.optimizer], self.step, progress, warm_up=30, least=0.01)
        loss, squared = _loss(self.model, self.sampler.draw(self.step), options, self.balance, self.step)
        self.model.past.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.past.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(options.average_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, value in self.model.past.state_dict().items():
                self.average[name].lerp_(value, 1 - decay)
        self.error += 0.02 * (squared - self.error)
        self.seconds += time.process_time() - started
        return self.error

    def averaged(self) -> VideoModel:
        """A model of the averaged slices, on the same picture network."""
        model = VideoModel(self.model.image, self.model.config)
        model.past.load_state_dict(self.average)
        return model.eval()

    def note(self) -> str:
        return f"{-10 * math.log10(self.error):.2f} dB"

    def log(self) -> None:
        bits = self.model.image.config.bit_widths[0]
        clips = held_out_clips(self.data, self.options.frames)["animated"]
        figures = compare(self.averaged(), clips, bits)
        self.curve.append({"step": self.step, "seconds": round(self.seconds, 1), **figures})
        write_json(self.out / "metrics.json", {"curve": self.curve})

    def save(self) -> None:
        tensors = named("past", self.model.past.state_dict()) | named("average", self.average)
        tensors |= named("adamw", optimizer_state(self.optimizer)) | named("balance", self.balance.state())
        counters = {"step": self.step, "seconds": self.seconds, "error": self.error, "curve": self.curve}
        labels = {"format": str(FORMAT_VERSION), "image": self.image_digest}
        Checkpoint(tensors, counters, labels).write(self.out / FILE)

    def restore(self) -> None:
        """Load the checkpoint of ``out``, if there is one.

        Raises:
            ValueError: it belongs to other picture weights.
        """
        path = self.out / FILE
        checkpoint = Checkpoint.read(path)
        if checkpoint is None:
            return
        if checkpoint.labels["image"] != self.image_digest:
            raise ValueError(
                f"{path} belongs to picture weights with sha256 {checkpoint.labels['image']}, these have "
                f"{self.image_digest}; begin a run of its own from its video.safetensors (--init)"
            )
        self.model.past.load_state_dict(checkpoint.part("past"))
        self.average = checkpoint.part("average")
        self.balance.restore(checkpoint.part("balance"))
        restore_optimizer(self.optimizer, checkpoint.part("adamw"))
        counters = checkpoint.counters
        self.step, self.seconds = counters["step"], counters["seconds"]
        self.error, self.curve = counters["error"], counters["curve"]


def _loss(
    model: VideoModel, clips: Tensor, options: VideoTrainingOptions, balance: BitBalance, step: int
) -> tuple[Tensor, float]:
    """Weighted sum of the errors, bit balance and commitment; and the plain squared error.

    Of frames after the first, which nothing trained here touches. A share of the clips is decoded from a
    smaller bit width.
    """
    count, frames = clips.shape[:2]
    widths = model.image.config.bit_widths
    random = torch.Generator().manual_seed(options.seed * 1_000_003 + step + 750_000_000)
    bits = torch.full((count,), widths[-1])
    if len(widths) > 1:
        narrow = torch.rand(count, generator=random) < options.narrow_share
        smaller = torch.tensor(widths)[torch.randint(len(widths) - 1, (count,), generator=random)]
        bits = torch.where(narrow, smaller, bits)
    schedule = schedule_for((clips.shape[3] // STRIDE, clips.shape[4] // STRIDE))
    _, latent = model.encode_clips(clips)
    coded = quantise_straight_through(
        latent.flatten(0, 1), schedule, None, bits.repeat_interleave(frames), balance
    )
    decoded = model.decode_clips(coded.total.unflatten(0, (count, frames)))[:, 1:].flatten(0, 1)
    wanted = clips[:, 1:].flatten(0, 1)
    squared = ((decoded - wanted) ** 2).mean((1, 2, 3))
    absolute = (decoded - wanted).abs().mean((1, 2, 3))
    error = options.squared_weight * squared + absolute
    error = error + options.structure_weight * (1 - ssim(decoded, wanted))
    error = error + options.decibel_weight * torch.log(squared + 1e-4)
    loss = (
        error.mean()
        + options.balance_weight * coded.balance_loss
        + options.commitment_weight * coded.commitment_loss
    )
    return loss, float(squared.detach().mean())
