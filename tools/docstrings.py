"""Reads the house's docstrings for the API reference: ``name: what it is`` under Parameters and Attributes."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADED = re.compile(r"^(Parameters|Attributes)\n-+\n((?:.+\n?|\n(?=\S+: ))*)", re.M)
TOLD = re.compile(r"^Returns\n-+\n((?:\S.*\n?)+)", re.M)
NAMED = re.compile(r"^(\*{0,2}[a-z_]\w*(?:, [a-z_]\w*)*) ?: (.*)$")


class Docstrings(griffe.Extension):
    """Every docstring in numpy's form: a name on a line of its own, what it is below it, indented."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = TOLD.sub(_returns, HEADED.sub(_numpy, obj.docstring.value))
            obj.docstring.value = text.replace("``", "`")


def _numpy(found: re.Match[str]) -> str:
    lines = [f"{found.group(1)}", "-" * len(found.group(1))]
    for line in found.group(2).rstrip().splitlines():
        named = NAMED.match(line)
        lines += [named.group(1), f"    {named.group(2)}"] if named else [line]
    return "\n".join(lines) + "\n\n"


def _returns(found: re.Match[str]) -> str:
    lines = [f"    {line}" for line in found.group(1).rstrip().splitlines()]
    return "\n".join(["Returns", "-------", ":", *lines]) + "\n\n"
