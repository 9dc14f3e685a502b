"""The demo's examination: what is asked on held-out input, and how the answers are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from ernie5.backbone.evaluation.judges import Judge, shift_picture
from ernie5.corpora.corpus import Corpus
from ernie5.corpora.digits import DIGIT_WORDS, digit_value
from ernie5.protocol.generation import GenerationParams
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.audio.evaluation import JUDGE_SAMPLES, in_turn, shipped_judge
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.preprocessing import read_audio, to_codec_rate
from ernie_multi.local import Answer, LocalModel, question_of

T = TypeVar("T")

SIDE = 32
MEDIA_TEMPERATURE = {"image": 0.7, "speech": 0.2}


@dataclass
class Example:
    """One question and its answer, for the report. Media are encoded files."""

    task: str
    question: str
    expected: str
    text: str
    correct: bool | None
    inputs: dict[str, bytes] = field(default_factory=dict)
    outputs: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Examination:
    """Figures by name (0 to 1, with ``…_n``, ``…_judge``, ``…_source``) and examples to look at."""

    figures: dict[str, Any] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)


def picture_array(data: bytes) -> np.ndarray:
    """A picture as grey levels 0..1 on a 32 x 32 canvas of its own border colour, float32."""
    grey = np.asarray(Image.open(BytesIO(data)).convert("L"), np.float32) / 255
    height, width = grey.shape
    if max(height, width) > SIDE:
        small = Image.fromarray((grey * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.asarray(small, np.float32) / 255
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    canvas = np.full((SIDE, SIDE), np.median(border), np.float32)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    canvas[top : top + height, left : left + width] = grey
    return canvas


def sound_array(data: bytes) -> np.ndarray:
    """A sound's first 0.8 s as a log-mel spectrogram, float32 ``[bands, frames]``."""
    samples = to_codec_rate(read_audio(data)).samples[:JUDGE_SAMPLES]
    samples = np.pad(samples, (0, JUDGE_SAMPLES - len(samples)))
    return log_mel(torch.from_numpy(samples)[None])[0].numpy()


def target_of(sample: Sample) -> Segment:
    return next(segment for segment in sample.segments if segment.role == "target")


def medium_of(sample: Sample, modality: str) -> Segment:
    return next(segment for segment in sample.segments if segment.modality == modality)


def digit_samples(corpus: Corpus, task: str) -> list[Sample]:
    """The samples of a task whose item is a digit."""
    samples = (corpus[index] for index in corpus.indices(task))
    return [sample for sample in samples if sample.metadata.get("digit") is not None or "digit" in task]


def spread(items: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` items, evenly spaced: a corpus lies sorted by label."""
    if len(items) <= limit:
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def digit_of(sample: Sample) -> int:
    return int(sample.metadata.get("digit", sample.metadata["label"]))


class SoundJudge:
    """The digit judge that ships with the audio tokenizer, trained on more voices than this corpus has."""

    def __init__(self) -> None:
        self._network = shipped_judge()

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The digit of each log-mel spectrogram ``[n, bands, frames]``, int64 ``[n]``."""
        return in_turn(self._network, torch.from_numpy(inputs).float()).argmax(1).numpy()


class Judges:
    """One for pictures, trained here on real training digits and their decoded forms, and one for sounds.

    ``picture_accuracy`` and ``sound_accuracy`` are theirs on decoded real test items, at most ``limit`` of
    each: what a perfect model could reach.
    """

    def __init__(
        self, model: LocalModel, train: Corpus, test: Corpus, *, limit: int = 400, scale: float = 1.0
    ) -> None:
        self._model = model
        self.picture = self._train(digit_samples(train, "digit_read"), max(20, round(600 * scale)))
        self.sound = SoundJudge()
        pictures = spread(digit_samples(test, "digit_read"), limit)
        sounds = spread(digit_samples(test, "speech_hear"), limit)
        self.picture_accuracy = self._accuracy(self.picture, pictures, "image", picture_array)
        self.sound_accuracy = self._accuracy(self.sound, sounds, "speech", sound_array)

    def _accuracy(
        self,
        judge: Judge | SoundJudge,
        samples: Sequence[Sample],
        modality: str,
        array: Callable[[bytes], np.ndarray],
    ) -> float:
        media = decoded_media(self._model, [medium_of(sample, modality) for sample in samples])
        said = judge.predict(np.stack([array(data) for data in media]))
        return float(np.mean(said == [digit_of(sample) for sample in samples]))

    def _train(self, samples: Sequence[Sample], steps: int) -> Judge:
        media = [medium_of(sample, "image") for sample in samples]
        labels = np.array([digit_of(sample) for sample in samples])
        originals = np.stack([picture_array(medium.payload) for medium in media])
        part = np.random.default_rng(0).permutation(len(media))[:600]
        decoded = [picture_array(data) for data in decoded_media(self._model, [media[i] for i in part])]
        # As many decoded items as originals, so that neither kind rules.
        again = np.resize(np.arange(len(part)), len(media))
        inputs = np.concatenate([originals, np.stack(decoded)[again]])
        labels = np.concatenate([labels, labels[part][again]])
        return Judge(*originals.shape[1:]).fit(inputs, labels, shift_picture, steps=steps)


def decoded_media(model: LocalModel, segments: Sequence[Segment]) -> list[bytes]:
    """What the tokenizers make of real media: encoded and decoded again."""
    return [model.decode(span).data for span in model.encode(segments, features=False)]


def examine(model: LocalModel, test: Corpus, *, limit: int = 400, judges: Judges) -> Examination:
    """Ask everything on held-out input.

    ``limit`` bounds the questions of a task.
    """
    result = Examination()
    _reading(model, test, limit, judges, result)
    _hearing(model, test, limit, judges, result)
    _naming(model, test, limit, result)
    _drawing(model, test, limit, judges, result)
    _speaking(model, limit, judges, result)
    return result


def _answers(model: LocalModel, samples: Sequence[Sample], params: Any) -> list[Answer]:
    return model.answer([question_of(sample) for sample in samples], params)


def _text_params(limit: int = 12) -> GenerationParams:
    return GenerationParams(temperature=0, max_tokens=limit, seed=0)


def _media_params(modality: str, count: int) -> list[GenerationParams]:
    return [
        GenerationParams(
            temperature=0,
            media_temperature=MEDIA_TEMPERATURE[modality],
            max_tokens=200,
            max_frames=24,
            seed=seed,
            modalities=(modality,),
        )
        for seed in range(count)
    ]


def _question(sample: Sample) -> str:
    return next(segment.text or "" for segment in sample.segments if segment.modality == "text")


def _score(result: Examination, name: str, right: Sequence[bool], **more: Any) -> None:
    result.figures[name] = float(np.mean(right)) if len(right) else 0.0
    result.figures[f"{name}_n"] = len(right)
    for key, value in more.items():
        result.figures[f"{name}_{key}"] = value


def _reading(model: LocalModel, test: Corpus, limit: int, judges: Judges, result: Examination) -> None:
    samples = spread(digit_samples(test, "digit_read"), limit)
    answers = _answers(model, samples, _text_params())
    right = [answer.text == target_of(sample).text for answer, sample in zip(answers, samples)]
    _score(
        result,
        "digit_read",
        right,
        judge=judges.picture_accuracy,
        source="MNIST digits not seen in training",
    )
    for sample, answer, good in spread(list(zip(samples, answers, right)), 20):
        picture = medium_of(sample, "image").payload
        expected = target_of(sample).text or ""
        result.examples.append(
            Example("digit_read", _question(sample), expected, answer.text, good, {"image": picture})
        )


def _hearing(model: LocalModel, test: Corpus, limit: int, judges: Judges, result: Examination) -> None:
    samples = spread(digit_samples(test, "speech_hear"), limit)
    media = [medium_of(sample, "speech") for sample in samples]
    answers = _answers(model, samples, _text_params())
    right = [
        digit_value(answer.text, str(sample.metadata["language"])) == digit_of(sample)
        for answer, sample in zip(answers, samples)
    ]
    _score(
        result,
        "digit_heard",
        right,
        judge=judges.sound_accuracy,
        source="spoken digits of held-out voices, synthetic and human",
    )
    for human in (True, False):
        chosen = [r for r, s in zip(right, samples) if bool(s.metadata.get("human")) is human]
        if chosen:
            result.figures[f"digit_heard_{'human' if human else 'synthetic'}"] = float(np.mean(chosen))
    shown: Counter[str] = Counter()
    for sample, answer, good, medium in zip(samples, answers, right, media):
        shown[str(sample.metadata["language"])] += 1
        if shown[str(sample.metadata["language"])] <= 2:
            result.examples.append(
                Example(
                    "speech_hear",
                    f"{_question(sample)} ({sample.metadata['language']}, {sample.metadata['voice']})",
                    target_of(sample).text or "",
                    answer.text,
                    good,
                    {"audio": medium.payload},
                )
            )


def _naming(model: LocalModel, test: Corpus, limit: int, result: Examination) -> None:
    for language in ("en", "zh"):
        task = f"emoji_name_{language}"
        samples = spread([test[index] for index in test.indices(task)], limit)
        answers = _answers(model, samples, _text_params(24))
        right = [answer.text == target_of(sample).text for answer, sample in zip(answers, samples)]
        _score(result, task, right, source="emoji in a drawing style not seen for them")
        for sample, answer, good in spread(list(zip(samples, answers, right)), 12):
            picture = medium_of(sample, "image").payload
            expected = target_of(sample).text or ""
            result.examples.append(
                Example(task, _question(sample), expected, answer.text, good, {"image": picture})
            )


def _first(answer: Answer, modality: str) -> TokenSpan | None:
    return next((span for span in answer.spans if span.modality == modality and len(span)), None)


def _drawing(model: LocalModel, test: Corpus, limit: int, judges: Judges, result: Examination) -> None:
    samples = spread(digit_samples(test, "digit_draw"), limit)
    answers = _answers(model, samples, _media_params("image", len(samples)))
    right = []
    for sample, answer in zip(samples, answers):
        span = _first(answer, "image")
        picture = model.decode(span).data if span is not None else b""
        good = bool(picture) and judges.picture.predict(picture_array(picture)[None])[0] == digit_of(sample)
        right.append(bool(good))
        if (len(right) - 1) % max(1, len(samples) // 20) == 0:
            result.examples.append(
                Example("digit_draw", _question(sample), "", answer.text, good, {}, {"image": picture})
            )
    _score(
        result,
        "digit_drawn",
        right,
        judge=judges.picture_accuracy,
        source="drawn from words alone; the judge learnt from real training digits",
    )


def _speaking(model: LocalModel, limit: int, judges: Judges, result: Examination) -> None:
    wanted = [
        (language, digit, words[digit])
        for _ in range(4)
        for language, words in DIGIT_WORDS.items()
        for digit in range(10)
    ][:limit]
    questions = [[Segment(modality="text", text=f"Say: {word}")] for _, _, word in wanted]
    answers = model.answer(questions, _media_params("speech", len(questions)))
    right = []
    shown: set[tuple[str, int]] = set()
    for (language, digit, word), answer in zip(wanted, answers):
        span = _first(answer, "speech")
        sound = model.decode(span).data if span is not None else b""
        good = bool(sound) and judges.sound.predict(sound_array(sound)[None])[0] == digit
        right.append(bool(good))
        if (language, digit) not in shown and (language in ("en", "zh") or digit < 2):
            shown.add((language, digit))
            result.examples.append(
                Example("speech_say", f"Say: {word}", word, "", good, {}, {"audio": sound})
            )
    _score(
        result,
        "digit_spoken",
        right,
        judge=judges.sound_accuracy,
        source="spoken from words alone in six languages; the judge is the audio tokenizer's",
    )
