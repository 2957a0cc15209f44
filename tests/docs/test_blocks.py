"""Every block of Python and TOML in the docs runs; the README's one in ``test_readme.py``.

Python blocks of a page run in order and share their names, in an empty folder. A page whose Python begins with
``# NAME.py`` is that module, which its study files may name. A block of TOML is a study, or part of one, which is
planned; a SITE.toml, or part of one, which is checked; a survey, which is planned.

Two comments may stand before a block: ``<!-- before: … -->`` with Python that makes what the block takes as given, and
``<!-- not run: why -->``. The latter are counted here.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sordino.study.site_file import read_site

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
COMMENT = r"(?:^<!-- (?P<kind>before|not run):\s(?P<comment>(?:(?!-->).)*)-->\n+)?"
BLOCK = re.compile(COMMENT + r"^```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S)
LANGUAGES = {"python", "toml"}

NOT_RUN = {"docs/reproduce.md": 2, "docs/studies.md": 1}
"""Pages with blocks that say why they are not run, and how many. Whoever adds one counts it here."""

STUDY = """\
[study]
name = "small"
rounds = 4
[data]
name = "digits"
partition = "dirichlet"
clients = 6
beta = 0.5
minimum = 40
[budgets]
epsilon = 4.0
[model]
name = "logistic"
[method]
name = "dp-fedavg"
[training]
rate = 0.2
"""
"""What a part of a study is put into: sections that a block has take the place of these."""

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "north.csv"
[budget]
epsilon = 1.0
delta = 1e-5
"""
"""The same for a part of a SITE.toml."""

OF_SITES = {"site", "limits", "budget", "keys"}


@dataclass(frozen=True)
class Block:
    """One block: its language and code, what is made before it, why it is not run."""

    page: str
    line: int
    language: str
    code: str
    before: str
    not_run: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        comment = {found["kind"]: (found["comment"] or "").strip()}
        line, name = text[: found.start("code")].count("\n") + 1, page.relative_to(ROOT).as_posix()
        yield Block(name, line, found["language"], found["code"], comment.get("before", ""), comment.get("not run", ""))


RUNNING = {page: [one for one in blocks(page) if one.language in LANGUAGES and not one.not_run] for page in PAGES}


def test_blocks_that_are_not_run_say_why_and_are_counted():
    skipped = [one for page in PAGES for one in blocks(page) if one.not_run]
    assert {one.page: len([other for other in skipped if other.page == one.page]) for one in skipped} == NOT_RUN
    assert sum(map(len, RUNNING.values())) >= 30
    for page in PAGES:  # a comment that belongs to no block would be a block that runs unmarked
        assert len(re.findall(r"^<!-- (?:before|not run):", page.read_text(), re.M)) == len(
            [one for one in blocks(page) if one.before or one.not_run]
        )


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules beside the page's study files can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("page", [p for p in PAGES if RUNNING[p]], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_the_page_runs(page, tmp_path, in_folder):
    names: dict[str, object] = {"__name__": "__main__"}
    module, lines = "", []
    for block in RUNNING[page]:
        where = f"{block.page}, line {block.line}"
        if block.before:
            exec(compile(block.before, f"{where} (before)", "exec"), names)
        if block.language == "toml":
            planned(block, tmp_path, in_folder)
            continue
        own = re.match(r"# (\w+\.py)\n", block.code)
        module = own.group(1) if own else module
        if module:
            lines.append(block.code)
            (tmp_path / module).write_text("\n\n".join(lines))
        exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), names)


def planned(block: Block, folder: Path, command) -> None:
    """Plan the study, or check the SITE.toml, that the block is or is a part of."""
    sections = set(tomllib.loads(block.code))
    path = folder / "block.toml"
    if sections & OF_SITES:
        path.write_text(filled(block.code, SITE))
        read_site(path)
        return
    if "survey" in sections:
        path.write_text(block.code)
        code, _, said = command("survey", str(path), "--plan", "--serve", "--held", "600")
    else:
        path.write_text(filled(block.code, STUDY))
        code, _, said = command("plan", str(path))
    assert code == 0, f"{block.page}, line {block.line}: {said}"


def filled(code: str, whole: str) -> str:
    """The block, and every section of ``whole`` that it does not have."""
    sections = re.split(r"^(?=\[)", whole, flags=re.M)[1:]
    has = set(tomllib.loads(code))
    return code + "\n" + "".join(one for one in sections if re.match(r"\[(\w+)", one).group(1) not in has)
