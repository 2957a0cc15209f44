"""Declared tokenizers against plain loops; what becomes of texts that are missing, empty, odd or endless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import sordino as sd
from sordino.data import draft_schema
from sordino.data.schema import parse_schema
from sordino.data.tokens import BINS, MOST_IDS, Tokenizer
from sordino.data.unlabelled import read_unlabelled
from sordino.errors import BadInput
from sordino.study.deploy import schema_hash

SCHEMA: dict[str, Any] = {"target": "to", "classes": ["a", "b"], "text": {"note": {"vocabulary": 64, "length": 6}}}
ODD = [
    "Chest pain, since 3 days!",
    "Gefäß verödet – »Übelkeit« naïve",
    "x_y-z'q  a.b\tc\u00a0d\u2003e",
    "боль в груди",
    "胸の痛み、昨日から",
    "caf\ufffd \x00 nul",
    "…!?",
    "İstanbul STRASSE ẞ",
    "\ud800 half",
    "a " * 5000,
    "w" * 100_000,
]


def crc32(data: bytes) -> int:
    """CRC-32 (IEEE 802.3), bit by bit."""
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = (found >> 1) ^ (0xEDB88320 if found & 1 else 0)
    return found ^ 0xFFFFFFFF


def is_between(letter: str) -> bool:
    """Whether a character stands between words: the listed ranges, one by one."""
    code = ord(letter)
    if code < 0x80:
        return not ("0" <= letter <= "9" or "a" <= letter <= "z" or "A" <= letter <= "Z")
    if code <= 0xBF:
        return letter not in "ªµº"
    ranges = [(0x2000, 0x206F), (0x3000, 0x303F), (0xFE30, 0xFE4F), (0xFF01, 0xFF0F), (0xFF1A, 0xFF20)]
    ranges += [(0xFF3B, 0xFF40), (0xFF5B, 0xFF65)]
    return letter in "×÷\u1680\ufeff" or any(low <= code <= high for low, high in ranges)


def plain_words(text: str) -> list[str]:
    """The words of a text, letter by letter."""
    words, word = [], ""
    for letter in text.lower() + " ":
        if not is_between(letter):
            word += letter
        elif word:
            words.append(word)
            word = ""
    return words


def padded(ids: list[int], length: int) -> list[int]:
    return [*ids[:length], *[0] * (length - len(ids))]


def test_words_are_hashed_as_a_plain_loop_does():
    how = Tokenizer("words", 4096, 8)
    for text in ODD:
        words = plain_words(text)[:8]
        wanted = [2 + crc32(word.encode("utf-8", "surrogatepass")[:200]) % 4094 for word in words]
        if max(map(len, words), default=0) < 200:
            assert how.encode([text])[0].tolist() == padded(wanted, 8), text
        assert list(how.split(text))[:8] == words


def test_the_words_between_are_the_same_for_every_character():
    how = Tokenizer("words", 4096, 8)
    for code in range(0x11000):
        letter = chr(code)
        assert list(how.split(letter)) == plain_words(letter), hex(code)


def test_pairs_are_words_and_what_neighbours_say_together():
    how = Tokenizer("pairs", 16384, 8)
    wanted = ["no", "chest", "no chest", "pain", "chest pain"]
    assert list(how.split("No chest-pain!")) == wanted
    assert how.encode(["No chest-pain!"])[0].tolist() == padded([2 + crc32(w.encode()) % 16382 for w in wanted], 8)
    assert list(how.split("pain")) == ["pain"]
    assert list(how.split("")) == []


def test_declared_words_and_characters_have_their_places():
    listed = Tokenizer("words", 5, 4, ("pain", "chest", "übel"))
    assert listed.encode(["Chest PAIN of the chest", "übel", ""]).tolist() == [[3, 2, 1, 1], [4, 0, 0, 0], [0] * 4]
    letters = Tokenizer("characters", 386, 6)
    for text in ("Ab é", "ſŁ胸", "…"):
        wanted = [2 + ord(one) if ord(one) < 384 else 1 for one in text.lower()]
        assert letters.encode([text])[0].tolist() == padded(wanted, 6)


def test_ids_are_the_same_in_every_process():
    code = (
        "from sordino.data.tokens import Tokenizer; import json;"
        "print(json.dumps(Tokenizer('words', 4096, 6).encode(['Chest pain since 3 days', 'Übelkeit']).tolist()))"
    )
    said = (("chest", "pain", "since", "3", "days"), ("übelkeit",))
    wanted = [padded([2 + crc32(word.encode()) % 4094 for word in words], 6) for words in said]
    assert wanted[0][0] == 61, "golden: a model that was trained once must read the same tomorrow"
    for seed in ("0", "1"):
        found = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert json.loads(found.stdout) == wanted


def test_a_record_has_one_shape_however_long_its_text():
    how = Tokenizer("words", 64, 5)
    alone = [how.encode([one])[0].tolist() for one in ODD]
    together = how.encode(ODD)
    assert together.shape == (len(ODD), 5)
    assert together.dtype == np.int64
    assert together.tolist() == alone, "a row depends on its own text alone"
    assert how.encode(["a b c d e f g"]).tolist() == how.encode(["a b c d e"]).tolist(), "cut, not moved"
    assert how.encode([None, "", "."]).tolist() == [[0] * 5] * 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ({"note": "words"}, r"text.note is 'words': it is a table"),
        ({"note": {"token": "words"}}, r"text.note.token is unknown: the keys are tokens, vocabulary, words, length"),
        ({"note": {"tokens": "bpe"}}, r"text.note.tokens is 'bpe': use words, pairs or characters"),
        ({"note": {"length": 0}}, r"text.note.length is 0: it is a whole number from 1 to 2048"),
        ({"note": {"vocabulary": 4096.0}}, r"text.note.vocabulary is 4096.0: it is a whole number"),
        ({"note": {"vocabulary": MOST_IDS + 1}}, r"from 3 to 1000000"),
        ({"note": {"words": []}}, r"text.note.words is \[\]: list the words, or name a file"),
        ({"note": {"words": ["a", "A"]}}, r"lists 'a' twice"),
        ({"note": {"words": ["two words"]}}, r"not one word of letters and digits"),
        ({"note": {"words": ["a"], "vocabulary": 9}}, r"has words and vocabulary: .*keep one"),
        ({"note": {"words": ["a"], "tokens": "characters"}}, r"has words and tokens = 'characters'"),
        ({"to": {}}, r"gives column 'to' two roles: use one of numeric, categorical, text, target"),
        ("note", r"data.schema.text is 'note': it is a table of columns"),
    ],
)
def test_a_wrong_tokenizer_is_refused_with_key_and_remedy(text, told):
    with pytest.raises(BadInput, match=told):
        parse_schema({**SCHEMA, "text": text})


def test_a_fill_of_a_text_is_a_text():
    with pytest.raises(BadInput, match=r"fill.note is 0: a text column needs a text, such as ''"):
        parse_schema({**SCHEMA, "fill": {"note": 0}})
    with pytest.raises(BadInput, match=r"tokens \(NPZ files of token ids\) and text: keep one"):
        parse_schema({**SCHEMA, "tokens": 9})


def folder(tmp_path: Path, lines: list[str]) -> Path:
    path = tmp_path / "one.csv"
    path.write_bytes("\n".join(["note,to", *lines]).encode("utf-8", "surrogateescape") + b"\n")
    return path


def test_missing_texts_are_null_rows_unless_a_fill_stands_in(tmp_path):
    path = folder(tmp_path, ["chest pain,a", ",b", "NA,a", '"...",b', "caf\udce9,a", '"un"closed,b', "x y,c"])
    with pytest.raises(BadInput, match=r"row 5: it is not UTF-8 text"):
        sd.data.from_folder(path, SCHEMA, test=0.0)
    clients = sd.data.from_folder(path, SCHEMA, test=0.0, invalid="null")
    assert clients.valid.tolist() == [True, False, False, True, False, False, False]
    assert clients.x.dtype == np.int64
    assert clients.x.shape == (7, 6)
    assert clients.tokens == 64
    assert not clients.x[1:].any(), "null rows are zeros, and dots are no words"
    filled = sd.data.from_folder(path, {**SCHEMA, "fill": {"note": ""}}, test=0.0, invalid="null")
    assert filled.valid.tolist() == [True, True, True, True, False, False, False]
    other = sd.data.from_folder(path, {**SCHEMA, "fill": {"note": "no note"}}, test=0.0, invalid="null")
    assert other.x[1].tolist() == Tokenizer("words", 64, 6).encode(["no note"])[0].tolist()
    path = folder(tmp_path, ["chest pain,a", ",b"])
    with pytest.raises(BadInput, match=r"row 2, column 'note': is missing and the schema has no fill for it"):
        sd.data.from_folder(path, SCHEMA, test=0.0)


def test_parquet_and_excel_hold_line_breaks_and_other_types(tmp_path):
    notes = ["chest\npain", None, "b" * 40_000, "7.5"]
    how = Tokenizer("words", 64, 6)
    pa.parquet.write_table(pa.table({"note": notes, "to": ["a", "b", "a", "b"]}), tmp_path / "one.parquet")
    found = sd.data.from_folder(tmp_path / "one.parquet", SCHEMA, test=0.0, invalid="null")
    assert found.x.tolist() == how.encode(["chest pain", "", "b" * 40_000, "7 5"]).tolist()
    assert found.valid.tolist() == [True, False, True, True]
    table = pa.table({"note": pa.array([b"caf\xe9 x", b"ok"]), "to": ["a", "b"]})
    pa.parquet.write_table(table, tmp_path / "two.parquet")
    found = sd.data.from_folder(tmp_path / "two.parquet", SCHEMA, test=0.0)
    assert found.x.tolist() == how.encode(["caf\ufffd x", "ok"]).tolist()
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (("note", "to"), ("chest\npain", "a"), (None, "b")):
        book.active.append(row)
    book.save(tmp_path / "three.xlsx")
    found = sd.data.from_folder(tmp_path / "three.xlsx", SCHEMA, test=0.0, invalid="null")
    assert found.x[0].tolist() == how.encode(["chest pain"])[0].tolist()
    assert found.valid.tolist() == [True, False]


def test_numbers_and_categories_beside_texts_have_ids_of_their_own(tmp_path):
    schema = {
        "target": "to",
        "classes": ["a", "b"],
        "text": {"note": {"vocabulary": 64, "length": 3}, "plan": {"words": ["rest", "home"], "length": 2}},
        "numeric": {"age": [0, 80], "dose": [1, 1000, "log"]},
        "categorical": {"sex": ["f", "m"]},
        "fill": {"age": 40},
    }
    path = tmp_path / "one.csv"
    path.write_text("note,plan,age,dose,sex,to\npain,go home,80,1,m,a\nold pain,rest,,1e9,d,b\n,x,-3,31,f,a\n")
    found = sd.data.from_folder(path, schema, test=0.0, invalid="null")
    pain, old = (2 + crc32(word) % 62 for word in (b"pain", b"old"))
    after = 64  # 62 hashed words from 2 on, then two listed ones, two times 16 parts, three values
    ages, doses, sexes = after + 2, after + 2 + BINS, after + 2 + 2 * BINS
    wanted = [
        [pain, 0, 0, 1, after + 1, ages + 15, doses, sexes + 1],
        [old, pain, 0, after, 0, ages + 8, doses + 15, sexes + 2],
        [0] * 8,
    ]
    assert found.x.tolist() == wanted
    assert found.valid.tolist() == [True, True, False]
    known = parse_schema(schema)
    assert known.tokens == found.tokens == sexes + 3
    assert known.features == (
        "note[1]", "note[2]", "note[3]", "plan[1]", "plan[2]", "age", "dose", "sex",
    )  # fmt: skip
    assert known.ranged is None
    assert found.ranged is None


def test_a_file_of_words_is_read_once_and_travels_with_the_schema(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("Pain\n\nchest\n", encoding="utf-8")
    (tmp_path / "schema.toml").write_text(
        'target = "to"\nclasses = ["a", "b"]\n[text]\nnote = {words = "words.txt", length = 3}\n'
    )
    path = folder(tmp_path, ["chest pain,a", "other,b"])
    beside = sd.data.from_folder(path, test=0.0)
    assert beside.x.tolist() == [[3, 2, 0], [1, 0, 0]]
    assert beside.tokens == 4
    assert beside.schema["text"]["note"]["words"] == ["Pain", "chest"], "the words, not the file"
    monkeypatch.chdir(tmp_path)
    schema = {**SCHEMA, "text": {"note": {"words": "words.txt", "length": 3}}}
    assert sd.data.from_folder(path, schema, test=0.0).x.tolist() == beside.x.tolist()
    inline = {**SCHEMA, "text": {"note": {"words": ["pain", "chest"], "length": 3}}}
    assert schema_hash(parse_schema(inline)) == schema_hash(parse_schema(beside.schema))
    other = {**SCHEMA, "text": {"note": {"words": ["chest", "pain"], "length": 3}}}
    assert schema_hash(parse_schema(inline)) != schema_hash(parse_schema(other)), "another order, other ids"
    gone = {**SCHEMA, "text": {"note": {"words": "gone.txt"}}}
    with pytest.raises(BadInput, match=r"text.note.words: gone.txt cannot be read .*one word a line"):
        sd.data.from_folder(path, gone)


def test_unlabelled_texts_from_files_frames_and_lists(tmp_path):
    schema, how = parse_schema(SCHEMA), Tokenizer("words", 64, 6)
    texts = ["chest pain", None, "...", "x " * 900]
    for frame in ({"note": texts}, pa.table({"note": texts}), np.array(texts, dtype=object)):
        found = read_unlabelled(frame, schema, (6,))
        assert found.x.dtype == np.int64
        assert found.x.tolist() == how.encode(texts).tolist()
        assert [one is None for one in found.reasons] == [True, False, True, True]
    assert "is missing" in str(found.reasons[1])
    path = tmp_path / "new.csv"
    path.write_text("id,note\n1,chest pain\n2,\n")
    found = read_unlabelled(path, schema, (6,), "id")
    assert found.ids == ("1", "2")
    assert found.reasons[0] is None
    assert "is missing" in str(found.reasons[1])
    with pytest.raises(BadInput, match="has no column 'note', which the model was trained with"):
        read_unlabelled({"text": texts}, schema, (6,))


def test_ids_of_a_tokenizer_of_ones_own(tmp_path):
    x, y = np.array([[5, 2, 0], [9, 1, 1], [-1, 0, 0]]), np.array([0, 1, 0])
    clients = sd.data.from_arrays([(x, y)], classes=2, tokens=9, test=0.0, invalid="null")
    assert clients.x.dtype == np.int64
    assert clients.valid.tolist() == [True, False, False]
    assert clients.tokens == 9
    assert clients.schema == {"task": "classification", "classes": ["0", "1"], "tokens": 9}
    with pytest.raises(BadInput, match=r"row 2, array x: has a token id outside 0 … 8"):
        sd.data.from_arrays([(x, y)], classes=2, tokens=9)
    with pytest.raises(BadInput, match="token ids are whole numbers"):
        sd.data.from_arrays([(x / 2, y)], classes=2, tokens=9)
    np.savez(tmp_path / "one.npz", x=x[:1], y=y[:1])
    found = sd.data.from_folder(tmp_path / "one.npz", {"classes": 2, "tokens": 9}, test=0.0)
    assert found.x.tolist() == [[5, 2, 0]]
    assert found.tokens == 9


def test_a_draft_takes_prose_for_text(tmp_path):
    random = np.random.default_rng(0)
    words = [f"word{k}" for k in range(200)]
    lines = [" ".join(random.choice(words, random.integers(4, 20))) for _ in range(80)]
    rows = [f"{'' if k == 3 else one},Anna B{k},{20 + 7 * k % 60},{'ab'[k % 2]}" for k, one in enumerate(lines)]
    path = tmp_path / "one.csv"
    path.write_text("note,nurse,age,to\n" + "\n".join(rows) + "\n")
    text = draft_schema(path)
    schema = tomllib.loads(text)["data"]["schema"]
    assert schema["text"] == {"note": {"tokens": "words", "vocabulary": 4096, "length": 32}}
    assert schema["fill"] == {"note": ""}
    assert schema["numeric"] == {"age": [20, 79]}
    assert schema["target"] == "to"
    assert '# "nurse" is left out' in text
    assert "a guess: free text?" in text
    assert not any(word in text for word in words), "no word of a text is in the draft"
    clients = sd.data.from_folder(path, schema, test=0.0)
    assert clients.valid.all()
    assert clients.shape == (33,)
