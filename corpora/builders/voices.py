"""Spoken clips: two synthesisers with many voices, and recordings of people from the packages.

Clips are mono float32 at 16 kHz, cut to the speech, with the peak at 0.8. Their Ogg Opus files are the
same bytes each time: an Ogg stream's serial number, drawn at random by the encoder, is set from the
content. SciPy and soundfile are imported where they are used.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path

import numpy as np

from ernie5.corpora.builders.packages import require_tool, unpack
from ernie5.corpora.splits import HELD_OUT_VOICES, draw

SAMPLE_RATE = 16000
PEAK = 0.8
OPUS_COMPRESSION = 0.85
"""libsndfile's 0-1 scale; about 40 kbit/s, 21 dB signal-to-noise on synthetic and 34 dB on human digits."""

SILENCE = (0.01, 0.03)
"""Level relative to the peak below which a clip counts as silence: the least and the most."""
RUMBLE = 80.0
"""Hertz below which recordings are filtered: offsets and the thump at the start of some."""

ACCENTS: dict[str, tuple[str, ...]] = {
    "en": ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc"),
    "zh": ("cmn",),
    "es": ("es", "es-419"),
    "fr": ("fr-fr", "fr-be", "fr-ch"),
    "it": ("it",),
    "ru": ("ru",),
}
"""Language to the synthesiser's voices for it."""

MORE_ACCENTS: dict[str, tuple[str, ...]] = {
    "de": ("de",),
    "pt": ("pt", "pt-br"),
    "ja": ("ja",),
    "ko": ("ko",),
    "id": ("id",),
    "tr": ("tr",),
    "fa": ("fa",),
    "ar": ("ar",),
}
"""Languages that the corpus of sounds adds."""

# fmt: off
TIMBRES: tuple[str, ...] = (
    "plain", "m1", "m2", "m3", "m4", "m5", "m6", "m8", "f1", "f2", "f3", "f4", "Alex", "Alicia", "Andrea",
    "Denis", "Gene", "Henrique", "Hugo", "Lee", "Marco", "Mario", "Michael", "adam", "anika", "antonio",
    "aunty", "belinda", "benjamin", "caleb", "david", "ed", "edward", "grandma", "gustave", "iven", "john",
    "linda", "max", "michel", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert",
    "sandro", "shelby", "steph", "travis", "victor", "zac",
)
# fmt: on
"""Timbres for training; :data:`ernie5.corpora.splits.HELD_OUT_VOICES` names those of the test split."""

MORE_TIMBRES: tuple[str, ...] = (
    "Andy", "Diogo", "Gene2", "Jacky", "Mike", "Nguyen", "Storm", "edward2", "grandpa", "iven2", "iven3",
    "iven4", "klatt", "klatt2", "klatt3", "klatt4", "klatt5", "klatt6", "marcelo", "robosoft", "robosoft3",
    "robosoft5", "steph2", "steph3", "whisper", "whisperf", "croak",
)  # fmt: skip
"""Timbres that the corpus of sounds adds for training, whispers and robots among them."""

TEST_TIMBRES: tuple[str, ...] = tuple(
    sorted(name.removeprefix("espeak-") for name in HELD_OUT_VOICES if name.startswith("espeak-"))
)
FLITE_VOICES: tuple[str, ...] = ("kal", "kal16", "rms", "slt", "awb")

RECORDED: dict[str, tuple[str, str]] = {
    "asterisk-en": ("en", "wav"),
    "asterisk-es": ("es", "wav"),
    "asterisk-fr": ("fr", "wav"),
    "asterisk-it": ("it", "wav"),
    "asterisk-ru": ("ru", "wav"),
    "menardi-it": ("it", "wav"),
    "armelle-fr": ("fr", "gsm"),
    "july-es": ("es", "gsm"),
}
"""Package with one person's recordings to language and file format."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A clip to make: what is said, how, and by which voice (``source-name``)."""

    text: str
    language: str
    voice: str
    accent: str = ""
    rate: float = 1.0
    pitch: int = 50
    file: Path | None = None

    @property
    def held_out(self) -> bool:
        """Whether the voice belongs to the test split."""
        return self.voice in HELD_OUT_VOICES


def random_utterance(text: str, language: str, key: str, timbres: tuple[str, ...] = TIMBRES) -> Utterance:
    """``text`` in a timbre, accent, rate and pitch that ``key`` chooses."""
    timbre = timbres[draw(f"timbre {key}", len(timbres))]
    accents = ACCENTS[language]
    return Utterance(
        text,
        language,
        f"espeak-{timbre}",
        accent=accents[draw(f"accent {key}", len(accents))],
        rate=0.8 + draw(f"rate {key}", 50) / 100,
        pitch=20 + draw(f"pitch {key}", 61),
    )


def resample(clip: np.ndarray, rate: int, target: int = SAMPLE_RATE) -> np.ndarray:
    """``clip`` [n] from ``rate`` to ``target`` hertz."""
    from scipy.signal import resample_poly

    if rate == target:
        return clip.astype(np.float32)
    divisor = gcd(rate, target)
    return resample_poly(clip, target // divisor, rate // divisor).astype(np.float32)


def cut_to_speech(clip: np.ndarray) -> np.ndarray:
    """``clip`` scaled to :data:`PEAK`, silence before and after cut to 30 and 50 ms, 5 ms faded at each end.

    Speech begins and ends with 30 ms above twice the background's level (kept within :data:`SILENCE`), so
    that the click of a microphone does not count.

    Raises:
        ValueError: the clip is silent.
    """
    peak = float(np.abs(clip).max()) if clip.size else 0.0
    if peak < 1e-3:
        raise ValueError("the clip is silent")
    window = SAMPLE_RATE // 100
    count = len(clip) // window
    level = np.sqrt(np.mean(clip[: count * window].reshape(count, window) ** 2, axis=1))
    if count < 3:
        raise ValueError(f"the clip has {len(clip)} samples, too few for a word")
    loud = level > np.clip(2 * np.percentile(level, 5), SILENCE[0] * peak, SILENCE[1] * peak)
    sustained = np.flatnonzero(loud[2:] & loud[1:-1] & loud[:-2])
    if sustained.size == 0:
        raise ValueError("the clip is silent")
    start = max(0, sustained[0] * window - SAMPLE_RATE * 3 // 100)
    end = min(len(clip), (sustained[-1] + 3) * window + SAMPLE_RATE // 20)
    clip = clip[start:end].astype(np.float32)
    clip *= PEAK / np.abs(clip).max()
    fade = np.linspace(0, 1, SAMPLE_RATE // 200, dtype=np.float32)
    clip[: len(fade)] *= fade
    clip[-len(fade) :] *= fade[::-1]
    return clip


def _read_wav(data: bytes) -> np.ndarray:
    import soundfile

    clip, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return resample(clip.mean(axis=1), rate)


def read_recording(path: Path) -> np.ndarray:
    """A recording as mono float32 [n] at 16 kHz, rumble removed; ``.gsm`` files are raw 8 kHz GSM 06.10."""
    import soundfile
    from scipy.signal import butter, sosfiltfilt

    if path.suffix == ".gsm":
        clip, rate = soundfile.read(
            path, dtype="float32", format="RAW", subtype="GSM610", samplerate=8000, channels=1
        )
    else:
        clip, rate = soundfile.read(path, dtype="float32", always_2d=True)
        clip = clip.mean(axis=1)
    high_pass = butter(4, RUMBLE, "highpass", fs=SAMPLE_RATE, output="sos")
    return sosfiltfilt(high_pass, resample(clip, rate)).astype(np.float32)


def speak(utterance: Utterance) -> np.ndarray:
    """The utterance as a clip, float32 [n], cut to the speech.

    A recording's ``rate`` plays it faster or slower, pitch included, as a tape does.

    Raises:
        UnavailableError: the synthesiser is not installed.
        subprocess.CalledProcessError: it refuses the voice.
    """
    source, _, name = utterance.voice.partition("-")
    if utterance.file is not None:
        clip = read_recording(utterance.file)
        if utterance.rate != 1.0:
            clip = resample(clip, round(SAMPLE_RATE * utterance.rate / 100) * 100)
        return cut_to_speech(clip)
    if source == "espeak":
        voice = utterance.accent if name == "plain" else f"{utterance.accent}+{name}"
        speed, pitch = str(round(165 * utterance.rate)), str(utterance.pitch)
        command = [
            require_tool("espeak-ng"),
            "-v",
            voice,
            "-s",
            speed,
            "-p",
            pitch,
            "--stdout",
            "--",
            utterance.text,
        ]
        return cut_to_speech(
            _read_wav(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        )
    if source == "flite":
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            stretch = f"duration_stretch={1 / utterance.rate:.2f}"
            command = [
                require_tool("flite"),
                "-voice",
                name,
                "--setf",
                stretch,
                "-t",
                utterance.text,
                "-o",
                file.name,
            ]
            subprocess.run(command, capture_output=True, check=True, timeout=60)
            return cut_to_speech(_read_wav(Path(file.name).read_bytes()))
    raise ValueError(f"voice {utterance.voice!r} is neither recorded nor of a known synthesiser")


def recordings(package: str, home: Path) -> dict[str, Path]:
    """The recordings of one person: name inside the package (``digits/7``) to file."""
    _, suffix = RECORDED[package]
    sounds = unpack(package, home) / "usr" / "share" / "asterisk" / "sounds"
    found: dict[str, Path] = {}
    for path in sorted(sounds.rglob(f"*.{suffix}")):
        # Debian splits one of the packages over two roots, sounds/digits/es and sounds/es/digits.
        name = path.relative_to(sounds).with_suffix("").as_posix()
        name = name.split("/", 1)[1] if not name.startswith("digits/") else name
        if not name.startswith("silence/"):
            found.setdefault(name, path)
    return found


# ----------------------------------------------------------------------------- Ogg Opus, to the byte


@lru_cache(maxsize=1)
def _crc_table() -> np.ndarray:
    table = np.zeros(256, dtype=np.uint32)
    for index in range(256):
        value = index << 24
        for _ in range(8):
            value = ((value << 1) ^ 0x04C11DB7) & 0xFFFFFFFF if value & 0x80000000 else value << 1
        table[index] = value
    return table


def _crc(page: bytes) -> int:
    table, value = _crc_table().tolist(), 0
    for byte in page:
        value = ((value << 8) & 0xFFFFFFFF) ^ table[(value >> 24) ^ byte]
    return value


def fix_serial(stream: bytes, serial: int) -> bytes:
    """An Ogg stream with its serial number replaced and its page checksums renewed (RFC 3533, section 6)."""
    pages, position = [], 0
    while position < len(stream):
        if stream[position : position + 4] != b"OggS":
            raise ValueError(f"no Ogg page at byte {position}")
        segments = stream[position + 26]
        body = sum(stream[position + 27 : position + 27 + segments])
        end = position + 27 + segments + body
        page = bytearray(stream[position:end])
        page[14:18] = serial.to_bytes(4, "little")
        page[22:26] = bytes(4)
        page[22:26] = _crc(bytes(page)).to_bytes(4, "little")
        pages.append(bytes(page))
        position = end
    return b"".join(pages)


def opus(clip: np.ndarray) -> bytes:
    """``clip`` [n] at 16 kHz as Ogg Opus; equal clips give equal bytes."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(
        buffer, clip, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=OPUS_COMPRESSION
    )
    serial = int.from_bytes(hashlib.blake2b(clip.tobytes(), digest_size=4).digest(), "little")
    return fix_serial(buffer.getvalue(), serial)


_SPOKEN_NAME = re.compile(r"[a-z]+( [a-z]+)?")


def is_speakable(name: str, language: str) -> bool:
    """Whether a name is short plain words: two English words at most, or four Han characters."""
    if language == "zh":
        return re.fullmatch("[\u4e00-\u9fff]{1,4}", name) is not None
    return len(name) <= 16 and _SPOKEN_NAME.fullmatch(name) is not None
