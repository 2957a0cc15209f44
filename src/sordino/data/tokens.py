"""Text to token ids, by a tokenizer that the schema declares. Nothing is learnt from records (rule R8).

A vocabulary that was learnt from records would be a release of them. So a word's id is a public function of the word: a
hash, its place in a declared list, or of single characters their code points. Every text becomes ``length`` ids, the
first ones of its tokens and then padding, so that shapes, time and uploads do not tell how long a text is.

Ids: 0 is padding, 1 a token that has no id of its own, 2 and up are tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.errors import BadInput

PADDING, UNKNOWN, FIRST = 0, 1, 2
"""The ids of padding and of tokens without an id of their own, and the first id of a token."""

BINS = 16
"""A number beside a text is told by which of so many equal parts of its declared range it is in."""

VOCABULARY = {"words": 4096, "pairs": 16384, "characters": 386}
LENGTH = {"words": 64, "pairs": 128, "characters": 256}
"""What is used where a column's tokenizer does not say; 386 ids are those of all code points below 384, which the
languages of Europe in Latin letters are written with, and the two others."""

MOST_IDS, MOST_LENGTH = 1_000_000, 2048
"""The most ids of a column, and of one of its records."""

_KEYS = ("tokens", "vocabulary", "words", "length")

_BETWEEN = (
    "\\x00-/:-@\\[-`{-\x7f\x80-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7"  # ASCII and Latin-1 without letters and digits
    "\u1680\u2000-\u206f\u3000-\u303f\ufe30-\ufe4f\ufeff\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
"""The characters between words, listed: what Python takes for a letter changes with the versions of Unicode."""

_WORD = re.compile(f"[^{_BETWEEN}]+")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tokenizer:
    """How the cells of one text column become ids.

    Attributes
    ----------
    kind
        ``words``: runs of letters and digits in small letters. ``pairs``: these, and after each but the first it and
        the one before, with a blank between: "no pain" is then more than "no" and "pain". ``characters``: single ones.
    vocabulary
        How many ids there are in all, padding and unknown included.
    length
        How many ids every record has.
    words
        The declared words, whose ids are their places from 2 on; empty where ids are hashes or code points.
    """

    kind: str
    vocabulary: int
    length: int
    words: tuple[str, ...] = ()

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: FIRST + k for k, word in enumerate(self.words)}

    def split(self, text: str) -> Iterator[str]:
        """The tokens of a text, in order."""
        small = text.lower()
        if self.kind == "characters":
            yield from small
            return
        before = ""
        for found in _WORD.finditer(small):
            word = found.group()
            yield word
            if self.kind == "pairs":
                if before:
                    yield f"{before} {word}"
                before = word

    def number(self, token: str) -> int:
        """The id of a token: 2 + crc32(UTF-8) mod (vocabulary − 2), but of declared words and of characters.

        CRC-32 as in zip files, the same on every machine and in every language.
        """
        if self.kind == "characters":
            code = FIRST + ord(token)
            return code if code < self.vocabulary else UNKNOWN
        if self.words:
            return self._places.get(token, UNKNOWN)
        # A Parquet file or a program may hold halves of characters, which no UTF-8 has.
        return FIRST + zlib.crc32(token.encode("utf-8", "surrogatepass")) % (self.vocabulary - FIRST)

    def encode(self, texts: Sequence[str | None]) -> Ids:
        """The ids of texts, ``[texts, length]``: of each its first tokens', then padding; None has no tokens.

        Guarantees: a row depends on its own text and on the tokenizer alone.
        """
        found = np.full((len(texts), self.length), PADDING, dtype=np.int64)
        known: dict[str, int] = {}
        for row, text in enumerate(texts):
            ids = []
            for token in islice(self.split(text or ""), self.length):
                place = known.get(token)
                if place is None:
                    place = known[token] = self.number(token)
                ids.append(place)
            found[row, : len(ids)] = ids
        return found


@dataclass(frozen=True)
class Layout:
    """Where the columns of a table with text lie in a record of ids, and which ids are whose.

    Texts come first. A number beside them is one id, of the part of its range that it is in, and a category one id, of
    its value; each column has ids of its own.
    """

    text: Mapping[str, Tokenizer]
    numeric: Sequence[str] = ()
    categorical: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """What every place of a record is."""
        places = (f"{name}[{k + 1}]" for name, how in self.text.items() for k in range(how.length))
        return (*places, *self.numeric, *self.categorical)

    @cached_property
    def starts(self) -> dict[str, int]:
        """By column what is added to its ids from 2 on (its parts or values are counted from 0 and begin there)."""
        sizes = {name: how.vocabulary - FIRST for name, how in self.text.items()}
        sizes |= dict.fromkeys(self.numeric, BINS)
        sizes |= {name: len(values) + 1 for name, values in self.categorical.items()}
        ends = np.cumsum([0, *sizes.values()]).tolist()
        return dict(zip((*sizes, ""), ends))

    @property
    def tokens(self) -> int:
        """How many ids there are in all, padding and unknown included."""
        return FIRST + self.starts[""]

    def texts(self, name: str, cells: Sequence[str | None]) -> Ids:
        """The ids of a text column; padding and unknown are the same for all columns."""
        ids = self.text[name].encode(cells)
        return np.where(ids >= FIRST, ids + self.starts[name], ids)

    def parts(self, name: str, unit: npt.NDArray[np.floating]) -> Ids:
        """The ids of a number column, scaled to [0, 1]."""
        places = np.clip((unit * BINS).astype(np.int64), 0, BINS - 1)
        return FIRST + self.starts[name] + places

    def values(self, name: str, places: Ids) -> Ids:
        """The ids of a category column, by the places of its declared values, "other" last."""
        return FIRST + self.starts[name] + places


def parse_tokenizer(value: Any, column: str) -> Tokenizer:
    """The tokenizer that a schema declares for a text column, or an error that names the key and the remedy."""
    where = f"data.schema.text.{column}"
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} is {value!r}: it is a table, such as {{tokens = 'words', length = 64}}, or {{}}")
    for key in sorted(set(value) - set(_KEYS)):
        raise BadInput(f"{where}.{key} is unknown: the keys are {', '.join(_KEYS)}")
    kind = value.get("tokens", "words")
    if kind not in VOCABULARY:
        raise BadInput(f"{where}.tokens is {kind!r}: use words, pairs or characters")
    length = _whole(value.get("length", LENGTH[kind]), f"{where}.length", 1, MOST_LENGTH)
    if "words" not in value:
        size = _whole(value.get("vocabulary", VOCABULARY[kind]), f"{where}.vocabulary", FIRST + 1, MOST_IDS)
        return Tokenizer(kind, size, length)
    if kind != "words" or "vocabulary" in value:
        other = "vocabulary" if "vocabulary" in value else f"tokens = {kind!r}"
        raise BadInput(f"{where} has words and {other}: a list of words has the ids of its words, keep one of the two")
    words = _word_list(value["words"], f"{where}.words")
    return Tokenizer(kind, FIRST + len(words), length, words)


def _whole(value: Any, where: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise BadInput(f"{where} is {value!r}: it is a whole number from {least} to {most}")
    return value


def _word_list(listed: Any, where: str) -> tuple[str, ...]:
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise BadInput(f"{where} is {listed!r:.80}: list the words, or name a file with one word a line")
    if len(listed) > MOST_IDS - FIRST:
        raise BadInput(f"{where} lists {len(listed)} words: at most {MOST_IDS - FIRST} are possible")
    words: dict[str, None] = {}
    for one in listed:
        small = str(one).strip().lower()
        if _WORD.fullmatch(small) is None:
            raise BadInput(
                f"{where} lists {str(one)!r:.80}, which is not one word of letters and digits: take it apart"
            )
        if small in words:
            raise BadInput(f"{where} lists {small!r} twice: list every word once, in small letters")
        words[small] = None
    return tuple(words)


def with_word_lists(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The table of a schema in which every file of words is replaced by what it lists: one word a line.

    So a result holds the words themselves, and needs no file. ``folder``: what the file's name is relative to.
    """
    if not isinstance(raw, Mapping) or not isinstance(raw.get("text"), Mapping):
        return raw
    read = {}
    for column, how in raw["text"].items():
        named = how.get("words") if isinstance(how, Mapping) else None
        read[column] = {**how, "words": _read_words(folder / named, column)} if isinstance(named, str) else how
    return {**raw, "text": read}


def with_words_read(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The tables of a study's or a site's file, the same done to the schema in ``[data]``."""
    own = table.get("data")
    if not isinstance(own, dict) or not isinstance(own.get("schema"), dict):
        return table
    return {**table, "data": {**own, "schema": dict(with_word_lists(own["schema"], folder))}}


def _read_words(file: Path, column: str) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"data.schema.text.{column}.words: {file} cannot be read ({error}): name a UTF-8 file with one word a "
            "line, or list the words"
        ) from None
    return [line.strip() for line in lines if line.strip()]
