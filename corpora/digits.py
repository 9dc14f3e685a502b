"""Words for the digits in the corpus's languages, and the digit a word means."""

from __future__ import annotations

import unicodedata

DIGIT_WORDS: dict[str, tuple[str, ...]] = {
    "en": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "zh": ("零", "一", "二", "三", "四", "五", "六", "七", "八", "九"),
    "es": ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"),
    "fr": ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
    "it": ("zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove"),
    "ru": ("ноль", "один", "два", "три", "четыре", "пять", "шесть", "семь", "восемь", "девять"),
}
"""Language to its ten digit words, from zero up."""

_VARIANTS: dict[str, dict[str, int]] = {
    "en": {"oh": 0, "nought": 0},
    "zh": {"〇": 0, "两": 2, "兩": 2, "幺": 1},
    "es": {"un": 1, "una": 1},
    "fr": {"une": 1},
    "it": {"un": 1, "una": 1},
    "ru": {"нуль": 0, "одна": 1, "одно": 1, "две": 2},
}


def _plain(word: str) -> str:
    """Lower case, without accents, spaces or closing punctuation: how an answer is compared."""
    letters = unicodedata.normalize("NFD", word.strip().strip(".。!！?？,，").strip().casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_VALUES: dict[str, dict[str, int]] = {
    language: {
        **{_plain(word): value for word, value in _VARIANTS[language].items()},
        **{_plain(word): value for value, word in enumerate(words)},
    }
    for language, words in DIGIT_WORDS.items()
}


def digit_value(word: str, language: str | None = None) -> int | None:
    """The digit that ``word`` means in ``language``, or in any of them where it is ``None``.

    Figures count too (``"7"``). ``None`` when the word is no digit; languages that share a word agree
    about it (``six``, ``zero``, ``uno``), except for none.

    Raises:
        KeyError: no words are known for ``language``.
    """
    plain = _plain(word)
    if len(plain) == 1 and plain.isascii() and plain.isdigit():
        return int(plain)
    tables = _VALUES.values() if language is None else (_VALUES[language],)
    return next((table[plain] for table in tables if plain in table), None)
