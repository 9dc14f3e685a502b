"""Makes the two media of the examples: a photograph of a cat, and a synthesised meow.

    python examples/make_media.py

``cat.jpg`` is the picture "chelsea" of scikit-image (CC0), scaled to 256 pixels. ``meow.wav`` is computed: a
source whose pitch rises and falls, shaped by three formants that move from /m/ over /i/ and /a/ to /u/, as
the mouth of a cat opens and closes.
"""

from __future__ import annotations

import argparse
import io
import wave
import zipfile
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16000
SECONDS = 0.8
# Time (share of the clip), then the value there; linear between.
PITCH = ((0.0, 420.0), (0.25, 640.0), (0.55, 610.0), (1.0, 380.0))
FORMANTS = (
    ((0.0, 350.0), (0.15, 450.0), (0.45, 1150.0), (0.75, 800.0), (1.0, 420.0)),
    ((0.0, 1300.0), (0.15, 2600.0), (0.45, 1900.0), (0.75, 1250.0), (1.0, 950.0)),
    ((0.0, 2600.0), (0.15, 3500.0), (0.45, 3300.0), (0.75, 3000.0), (1.0, 2800.0)),
)
BANDWIDTHS = (110.0, 160.0, 240.0)
LOUDNESS = ((0.0, 0.0), (0.06, 0.35), (0.3, 1.0), (0.65, 0.8), (0.92, 0.2), (1.0, 0.0))


def curve(points: tuple[tuple[float, float], ...], length: int) -> np.ndarray:
    """Values [length] on the line through ``points``."""
    times, values = zip(*points, strict=True)
    return np.interp(np.linspace(0, 1, length), times, values)


def glottis(pitch: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """A source wave [n]: harmonics of ``pitch`` [n] in hertz, 6 dB softer an octave, with some breath."""
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.006 * np.sin(np.arange(len(pitch)) * 0.0024))) / SAMPLE_RATE
    source = np.zeros_like(phase)
    for harmonic in range(1, 20):
        audible = harmonic * pitch < SAMPLE_RATE / 2
        source += audible * np.sin(harmonic * phase) / harmonic
    return source + 0.02 * noise.standard_normal(len(phase))


def resonate(source: np.ndarray, frequency: np.ndarray, bandwidth: float) -> np.ndarray:
    """A second-order resonator with a moving centre ``frequency`` [n] in hertz, unit gain at zero hertz."""
    radius = np.exp(-np.pi * bandwidth / SAMPLE_RATE)
    first = 2 * radius * np.cos(2 * np.pi * frequency / SAMPLE_RATE)
    second = -(radius**2)
    gain = 1 - first - second
    out = np.zeros(len(source) + 2)
    for n, value in enumerate(source):
        out[n + 2] = gain[n] * value + first[n] * out[n + 1] + second * out[n]
    return out[2:]


def meow() -> np.ndarray:
    """The meow: float64 [12800] at 16 kHz, peak 0.8."""
    length = int(SECONDS * SAMPLE_RATE)
    clip = glottis(curve(PITCH, length), np.random.default_rng(5))
    for points, bandwidth in zip(FORMANTS, BANDWIDTHS, strict=True):
        clip = resonate(clip, curve(points, length), bandwidth)
    clip = np.diff(clip, prepend=0.0) * curve(LOUDNESS, length)  # the lips radiate the derivative
    return 0.8 * clip / np.abs(clip).max()


def write_wav(path: Path, clip: np.ndarray) -> None:
    """Write ``clip`` [n], within -1 and 1, as 16-bit mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((clip * 32767).round().astype("<i2").tobytes())


def write_cat(path: Path, home: Path, width: int = 256) -> None:
    """Fetch the photograph with its package and write it as JPEG, ``width`` pixels wide."""
    from PIL import Image

    from ernie5.corpora.builders.packages import fetch

    with zipfile.ZipFile(fetch("cat", home)) as wheel:
        picture = Image.open(io.BytesIO(wheel.read("skimage/data/chelsea.png"))).convert("RGB")
    height = round(picture.height * width / picture.width)
    picture.resize((width, height), Image.Resampling.LANCZOS).save(path, "JPEG", quality=88)


def main() -> None:
    """Write both files beside this script."""
    from ernie5.corpora.corpus import data_home

    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, default=data_home(), help="folder that keeps fetched packages")
    home = parser.parse_args().home
    write_wav(folder / "meow.wav", meow())
    write_cat(folder / "cat.jpg", home)


if __name__ == "__main__":
    main()
