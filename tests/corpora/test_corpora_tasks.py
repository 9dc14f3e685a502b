"""Tasks: which segments an item becomes, and digits as words in six languages."""

import pytest

from ernie5.corpora.digits import DIGIT_WORDS, digit_value
from ernie5.corpora.items import Item, Medium
from ernie5.corpora.splits import concept_key, draw, is_held_out
from ernie5.corpora.tasks import METADATA_KEYS, TASKS, build_sample, tasks_of

PICTURE = Medium("image", data=b"png", content_type="image/png")
SPEECH = Medium("speech", data=b"ogg", content_type="audio/ogg")
DIGIT = Item("d", "digit_image", {"image": PICTURE}, {"label": "7", "digit": 7, "source": "mnist"})
WORD = Item(
    "w",
    "spoken_word",
    {"speech": SPEECH},
    {"label": "siete", "digit": 7, "language": "es", "voice": "espeak-m1"},
)
EMOJI = Item(
    "e",
    "named_picture",
    {"image": PICTURE},
    {"label": "cat face", "names": {"en": "cat face", "zh": "猫脸"}, "style": "noto"},
)

EXPECTED = [
    ("digit_read", DIGIT, ["image context", "text context Which digit is this?", "text target 7"]),
    ("digit_draw", DIGIT, ["text context Draw the digit 7.", "image target"]),
    ("speech_hear", WORD, ["speech context", "text context Transcribe.", "text target siete"]),
    ("speech_say", WORD, ["text context Say: siete", "speech target"]),
    ("emoji_name_en", EMOJI, ["image context", "text context What is this?", "text target cat face"]),
    ("emoji_name_zh", EMOJI, ["image context", "text context 这是什么？", "text target 猫脸"]),
    ("emoji_draw", EMOJI, ["text context Draw: cat face", "image target"]),
]


@pytest.mark.parametrize(("task", "item", "expected"), EXPECTED, ids=[task for task, _, _ in EXPECTED])
def test_a_task_shows_and_asks(task, item, expected):
    sample = build_sample(task, item, "train")
    said = [f"{s.modality} {s.role}" + (f" {s.text}" if s.text else "") for s in sample.segments]
    assert said == expected
    assert sample.metadata == {
        "task": task,
        "item": item.item_id,
        "split": "train",
        **{key: item.metadata[key] for key in METADATA_KEYS if key in item.metadata},
    }


def test_every_kind_has_its_tasks():
    assert tasks_of("digit_image") == ("digit_read", "digit_draw")
    assert tasks_of("spoken_word") == ("speech_hear", "speech_say")
    assert tasks_of("named_picture") == ("emoji_name_en", "emoji_name_zh", "emoji_draw")
    assert tasks_of("hologram") == ()


def test_a_picture_without_a_chinese_name_has_no_chinese_task():
    assert not TASKS["emoji_name_zh"].fits_metadata({"names": {"en": "cat"}})
    assert TASKS["emoji_name_en"].fits_metadata({"names": {"en": "cat"}})


@pytest.mark.parametrize("language", DIGIT_WORDS)
def test_digit_words_mean_their_digits(language):
    assert len(set(DIGIT_WORDS[language])) == 10
    for value, word in enumerate(DIGIT_WORDS[language]):
        assert digit_value(word, language) == digit_value(word.upper() + ".", language) == value
        assert digit_value(word) == value  # languages that share a word agree about it


@pytest.mark.parametrize(
    ("word", "language", "value"),
    [
        ("7", "en", 7),
        (" 7. ", "ru", 7),
        ("zero", "fr", 0),
        ("Une", "fr", 1),
        ("两", "zh", 2),
        ("две", "ru", 2),
    ],
)
def test_variants_of_digit_words_count(word, language, value):
    assert digit_value(word, language) == value


@pytest.mark.parametrize("word", ["", "cat", "seventy", "77", "٧", "siete"])
def test_other_words_are_no_digits(word):
    assert digit_value(word, "en") is None


def test_who_does_it_does_not_change_the_split():
    assert concept_key("woman running") == concept_key("man running") == "running"
    assert is_held_out("woman running") == is_held_out("person running")
    shares = sum(is_held_out(f"concept {number}") for number in range(2000)) / 2000
    assert 0.07 < shares < 0.13


def test_draws_are_even_and_fixed():
    counts = [0] * 5
    for number in range(5000):
        counts[draw(f"key {number}", 5)] += 1
    assert min(counts) > 850
    assert draw("key", 1000) == 77
