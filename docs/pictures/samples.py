"""Draws what the shipped tokenizers make of media they were not trained on, from the corpus that ships.

python docs/pictures/samples.py

writes vision-samples.png (pictures above their decoded forms) and audio-samples.png (log-mel spectrograms)
beside this file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from ernie5.corpora.corpus import SPLITS, open_corpus
from ernie5.corpora.splits import is_held_out
from ernie5.protocol.samples import Sample
from ernie5.tokenizers.audio.mel import LOG_FLOOR, log_mel
from ernie5.tokenizers.audio.preprocessing import read_audio
from ernie5.tokenizers.audio.tokenizer import FRAME_SAMPLES, AudioTokenizer
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer

HERE = Path(__file__).parent
SIDE, GAP, LABELS = 128, 8, 92
CLIPS = (("en", "espeak-m7"), ("zh", "espeak-f5"), ("it", "menardi-it"))
DIGIT = 7


def held_out_emoji(style: str) -> Iterator[Sample]:
    """Drawings of concepts that the tokenizer met in no style."""
    for split in SPLITS:
        for sample in open_corpus("mini", split, tasks={"emoji_draw"}):
            if sample.metadata["style"] == style and is_held_out(sample.metadata["label"]):
                yield sample


def pictures() -> list[Image.Image]:
    """Four emoji of each style and four handwritten digits, spread over those held out."""
    digits = open_corpus("mini", "test", tasks={"digit_draw"})
    noto, twemoji = (list(held_out_emoji(style)) for style in ("noto", "twemoji"))
    chosen = [*islice(noto[::7], 4), *islice(twemoji[3::7], 4)]
    chosen += [digits[number] for number in (110, 210, 360, 460)]
    opened = []
    for sample in chosen:
        data = sample.segments[-1].data
        assert data is not None
        opened.append(Image.open(io.BytesIO(data)).convert("RGB"))
    return opened


def draw_pictures(path: Path) -> None:
    tokenizer = VisionTokenizer.load(device="cpu")
    originals = pictures()
    rows = {"original": originals, "decoded": [tokenizer.decode(tokenizer.encode(p)) for p in originals]}
    width = LABELS + len(originals) * (SIDE + GAP)
    sheet = Image.new("RGB", (width, len(rows) * (SIDE + GAP) + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for row, (name, drawings) in enumerate(rows.items()):
        top = GAP + row * (SIDE + GAP)
        pen.text((GAP, top + SIDE // 2), name, "black", font, anchor="lm")
        for column, drawing in enumerate(drawings):
            enlarged = drawing.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (LABELS + column * (SIDE + GAP), top))
    sheet.save(path, optimize=True)


def clip(language: str, voice: str) -> torch.Tensor:
    """The digit :data:`DIGIT` in a held-out voice, float32 ``[n]`` at 16 kHz, n in whole frames."""
    for sample in open_corpus("mini", "test", tasks={"speech_say"}):
        about = sample.metadata
        if (about["language"], about["voice"], about.get("digit")) == (language, voice, DIGIT):
            data = sample.segments[-1].data
            assert data is not None
            samples = torch.from_numpy(read_audio(data).samples)
            return F.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
    raise LookupError(f"the corpus has no {DIGIT} in {language} by {voice}")


@torch.inference_mode()
def draw_clips(path: Path) -> None:
    tokenizer = AudioTokenizer.load(device="cpu")
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(2, len(CLIPS))
    for column, (language, voice) in enumerate(CLIPS):
        original = log_mel(clip(language, voice))
        codes = tokenizer.codec.encode(original[None])
        decoded = log_mel(tokenizer.vocoder(tokenizer.codec.decode(codes))[0])
        for axis, mel, name in zip(axes[:, column], (original, decoded), ("original", "decoded")):
            axis.imshow(mel.numpy(), origin="lower", aspect="auto", cmap="magma", vmin=LOG_FLOOR, vmax=2.5)
            axis.set(xticks=[], yticks=[])
            if column == 0:
                axis.set_ylabel(f"{name}\nmel band")
        seconds = original.shape[-1] / 100
        axes[0, column].set_title(f"“{DIGIT}” in {language}, voice {voice}", fontsize=10)
        axes[1, column].set_xlabel(f"{seconds:.2f} s, {codes.shape[1]} frames of {codes.shape[2]} codes")
    figure.savefig(path, dpi=72, metadata={"Software": None})


if __name__ == "__main__":
    draw_pictures(HERE / "vision-samples.png")
    draw_clips(HERE / "audio-samples.png")
