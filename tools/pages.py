"""What the documentation site has beyond the files in ``docs/``: hooks of MkDocs, called by their names.

Pages are written to be read on a code host, where links lead to files. Here the README becomes the first page, the
changelog, the guide for contributors, the examples, the notebooks and the help of every command become pages too, and
links to files that have no page lose their link and keep their words.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SECTIONS = {"Methods": "methods", "Results": "results"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def on_config(config: Any) -> Any:
    """Fill the navigation: folders with all of their pages, and under "More" whatever no line names."""
    named = set(_named(config.nav))
    nav = []
    for entry in config.nav:
        [(title, below)] = entry.items()
        if title in SECTIONS:
            below = _folder(SECTIONS[title])
        elif title == "More":
            written = sorted(p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md"))
            below = [page for page in written if page not in named and page.split("/")[0] not in SECTIONS.values()]
        if below:
            nav.append({title: below})
    config.nav = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from other files."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text() for source, page in PAGES.items()}
    made["examples.md"] = examples()
    made["reference/commands.md"] = commands()
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        made[f"notebooks/{path.stem}.md"] = notebook(path)
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages."""
    uri = page.file.src_uri
    source = next((name for name, one in PAGES.items() if one == uri), f"docs/{uri}")
    fences = FENCE.findall(markdown)
    prose = FENCE.sub("\0", markdown)
    prose = LINK.sub(lambda found: relinked(found, source, uri), prose)
    return re.sub("\0", lambda _: fences.pop(0), prose)


def relinked(found: re.Match[str], source: str, uri: str) -> str:
    """A link as the site has it: between pages, or only its words where it leads to a file without a page."""
    mark, words, target = found.groups()
    path, hash_, anchor = target.partition("#")
    if not path or ":" in path:
        return found.group(0)
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if there in PAGES:
        there = PAGES[there]
    elif there == "examples" or there.startswith("examples/"):
        there, hash_, anchor = "examples.md", "", ""
    elif there.endswith(".ipynb"):
        there = there.removeprefix("docs/").removesuffix(".ipynb") + ".md"
    elif there.startswith("docs/"):
        there = there.removeprefix("docs/")
    else:
        return words
    return f"{mark}[{words}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{hash_}{anchor})"


def examples() -> str:
    """Every file of ``examples/``, as it is."""
    parts = ["# Examples", "Study files and scripts that come with the source, in `examples/`."]
    for path in sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in {".toml", ".py"}):
        kind = {".toml": "toml", ".py": "python"}[path.suffix]
        parts.append(
            f"## {path.relative_to(ROOT / 'examples').as_posix()}\n\n```{kind}\n{path.read_text().rstrip()}\n```"
        )
    return "\n\n".join(parts) + "\n"


def notebook(path: Path) -> str:
    """The cells of a notebook, one after the other. It is kept without outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    where = f"*This page is the notebook `{path.relative_to(ROOT).as_posix()}`; the tests run it as it stands.*"
    return "\n\n".join([parts[0], where, *parts[1:]]) + "\n"


def commands() -> str:
    """The help of every command, from the command line itself."""
    import typer

    from sordino.cli import app

    group: Any = typer.main.get_command(app)
    parts = ["# The command line", str(group.help)]
    for words, command in _commands(group, "sordino"):
        parts += [f"## {words}", re.sub(r"\s*\n\s*", " ", (command.help or "").strip())]
        options = [one for one in command.params if one.name != "help"]
        if options:
            rows = [f"| {_spelled(one)} | {_cell(getattr(one, 'help', None) or '')} |" for one in options]
            parts.append("\n".join(["| option | what it does |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def _spelled(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.make_metavar(None) if option.metavar is None else option.metavar}`"
    return ", ".join(f"`{word}`" for word in [*option.opts, *option.secondary_opts])


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _named(nav: Any) -> Iterator[str]:
    for entry in nav:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(below, str):
            yield below
        else:
            yield from _named(below)


def _folder(name: str) -> list[Any]:
    """All pages of a folder, its index first, each named by the beginning of its heading."""
    pages = sorted((ROOT / "docs" / name).glob("*.md"), key=lambda path: (path.name != "index.md", path.name))
    headings = [path.read_text().split("\n", 1)[0].removeprefix("# ").partition(":")[0] for path in pages]
    return [{heading: f"{name}/{path.name}"} for heading, path in zip(headings, pages)]
