"""The corpus that ships: its size, its splits, its licences, and that its media are what they say."""

import io
import json
from collections import Counter
from functools import cache

import numpy as np
import pytest
import soundfile
from PIL import Image

from ernie5.corpora.builders import is_complete
from ernie5.corpora.corpus import SHIPPED, open_corpus
from ernie5.corpora.digits import DIGIT_WORDS, digit_value
from ernie5.corpora.splits import HELD_OUT_VOICES

FOLDER = SHIPPED / "mini"


@pytest.fixture(scope="module")
def train():
    return open_corpus("mini")


@pytest.fixture(scope="module")
def test():
    return open_corpus("mini", "test")


@pytest.fixture(scope="module")
def manifest():
    return json.loads((FOLDER / "manifest.json").read_text())


@cache
def samples(corpus, task):
    return [corpus[index] for index in corpus.indices(task)]


def medium(sample):
    return next(segment for segment in sample.segments if segment.data is not None)


def test_it_is_small_and_whole():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 15e6
    assert is_complete(FOLDER)


def test_counts(train, test):
    assert train.tasks["digit_read"] == train.tasks["digit_draw"] == 2500
    assert test.tasks["digit_read"] == 500
    assert train.tasks["emoji_name_en"] == train.tasks["emoji_name_zh"] == 500
    assert test.tasks["emoji_draw"] == 100
    assert train.tasks["speech_hear"] == train.tasks["speech_say"] > 2000
    assert train.tasks["text"] > 500
    assert sum(train.tasks.values()) == len(train)


def test_digits_are_balanced(train, test):
    for corpus, each in ((train, 250), (test, 50)):
        counts = Counter(sample.segments[-1].text for sample in samples(corpus, "digit_read"))
        assert counts == {str(digit): each for digit in range(10)}


def test_no_medium_is_in_both_splits(train, test):
    for task in ("digit_read", "emoji_name_en", "speech_hear"):
        hashes = [{medium(sample).media_hash for sample in samples(corpus, task)} for corpus in (train, test)]
        assert not hashes[0] & hashes[1], task
        assert len(hashes[1]) == test.tasks[task]
    texts = [{sample.segments[0].text for sample in samples(corpus, "text")} for corpus in (train, test)]
    assert not texts[0] & texts[1]


def test_no_picture_looks_the_same_in_both_splits(train, test):
    def pixels(corpus, task):
        pictures = (Image.open(io.BytesIO(medium(sample).data)) for sample in samples(corpus, task))
        return {picture.convert("RGB").tobytes() for picture in pictures}

    for task in ("digit_read", "emoji_name_en"):
        assert not pixels(train, task) & pixels(test, task)


def test_voices_of_the_test_split_are_never_trained_on(train, test, manifest):
    heard = {sample.metadata["voice"] for sample in samples(train, "speech_hear")}
    held_out = {sample.metadata["voice"] for sample in samples(test, "speech_hear")}
    assert held_out == set(manifest["held_out"]["voices"])
    assert held_out <= HELD_OUT_VOICES
    assert not heard & HELD_OUT_VOICES
    assert len(heard) > 50


def test_spoken_digits_cover_languages_digits_and_people(train, test):
    for corpus, least in ((train, 30), (test, 4)):
        spoken = [sample for sample in samples(corpus, "speech_hear") if "digit" in sample.metadata]
        counts = Counter((sample.metadata["language"], sample.metadata["digit"]) for sample in spoken)
        assert set(counts) == {(language, digit) for language in DIGIT_WORDS for digit in range(10)}
        assert min(counts.values()) >= least
        assert {sample.metadata["human"] for sample in spoken} == {True, False}
        for sample in spoken:
            assert (
                digit_value(sample.segments[-1].text, sample.metadata["language"]) == sample.metadata["digit"]
            )
        if corpus is test:
            assert len(spoken) >= 240


def test_concepts_tested_in_one_style_are_trained_in_another(train, test, manifest):
    tested = {sample.metadata["label"]: sample.metadata["style"] for sample in samples(test, "emoji_draw")}
    trained = Counter((s.metadata["label"], s.metadata["style"]) for s in samples(train, "emoji_draw"))
    assert set(tested) == set(manifest["held_out"]["emoji"]["concepts"])
    assert set(tested.values()) == {"twemoji"}
    assert all((label, "noto") in trained and (label, "twemoji") not in trained for label in tested)
    assert sum(style == "twemoji" for _, style in trained) == 200
    assert max(trained.values()) == 1


def test_names_are_unambiguous(train):
    for task in ("emoji_name_en", "emoji_name_zh"):
        by_item = {
            sample.metadata["item"].rpartition("-")[2]: sample.segments[-1].text
            for sample in samples(train, task)
        }
        assert len(by_item) == len(set(by_item.values())) == 300


def test_clips_decode_to_words(train, test):
    # All of the test split, every eighth of the other.
    for sample in samples(test, "speech_hear") + samples(train, "speech_hear")[::8]:
        clip, rate = soundfile.read(io.BytesIO(medium(sample).data))
        assert rate == 16000
        assert clip.ndim == 1
        assert 0.12 <= len(clip) / rate <= 1.3, sample.metadata
        assert 0.5 < np.abs(clip).max() <= 1.0, sample.metadata
        assert np.sqrt(np.mean(clip**2)) > 0.02, sample.metadata


def test_pictures_decode_at_their_size(train, test):
    for task, size, mode in (("digit_read", (28, 28), "L"), ("emoji_draw", (64, 64), "RGB")):
        for sample in samples(test, task) + samples(train, task)[::5]:
            picture = Image.open(io.BytesIO(medium(sample).data))
            picture.load()
            assert (picture.size, picture.mode) == (size, mode)
            assert np.asarray(picture).std() > 5


def test_every_source_has_its_licence(train, test, manifest):
    named = {entry["source"]: entry for entry in manifest["licences"]}
    used = {
        sample.metadata["source"]
        for corpus in (train, test)
        for task in ("digit_read", "emoji_draw", "speech_hear", "text")
        for sample in samples(corpus, task)
    }
    assert used | {"names"} == set(named)
    for entry in named.values():
        assert entry["licence"] and entry["attribution"] and entry["package"]
        assert not entry["licence"].startswith("GPL"), (
            "only sources that may be passed on under free terms ship"
        )
    page = (FOLDER / "LICENCES.md").read_text()
    assert all(f"## `{source}`" in page and entry["attribution"] in page for source, entry in named.items())


def test_repeats_and_tasks_shape_an_epoch(test):
    chosen = open_corpus("mini", "test", tasks={"digit_read", "emoji_draw"}, repeats={"emoji_draw": 3})
    assert chosen.tasks == {"digit_read": 500, "emoji_draw": 300}
    assert len(chosen) == 800
    assert chosen.fingerprint != test.fingerprint
    with pytest.raises(ValueError, match="repeats"):
        open_corpus("mini", repeats={"digit_read": -1})


def test_a_corpus_is_a_sequence(test):
    assert test[-1] == test[len(test) - 1]
    assert [sample.sample_id for sample in test[3:9:2]] == [test[index].sample_id for index in (3, 5, 7)]
    assert test.task(5) == test[5].metadata["task"]
    with pytest.raises(IndexError):
        test[len(test)]


def test_opening_twice_gives_the_same_samples(train):
    again = open_corpus("mini")
    assert again.fingerprint == train.fingerprint
    assert all(again[index].sample_id == train[index].sample_id for index in range(0, len(train), 997))
