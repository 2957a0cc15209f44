"""Plain values as YAML, as far as one file needs it: tables, lists, texts, numbers. No library for so little."""

from __future__ import annotations

import json
from typing import Any


def yaml_text(value: dict[str, Any]) -> str:
    """A table as YAML. Texts of several lines are blocks that keep their lines; others are in double quotes."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(table: dict[str, Any], indent: str) -> list[str]:
    found = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list):
            found += [f"{indent}{key}:", *(line for one in value for line in _item(one, indent + "  "))]
        else:
            found.append(f"{indent}{key}: {_scalar(value, indent + '  ')}")
    return found


def _item(one: Any, indent: str) -> list[str]:
    if not isinstance(one, dict):
        return [f"{indent}- {_scalar(one, indent + '  ')}"]
    first, *rest = _lines(one, indent + "  ")
    return [f"{indent}- {first.lstrip()}", *rest]


def _scalar(value: Any, indent: str) -> str:
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):  # YAML 1.1 takes a number for one only with a point in it
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    text = str(value).strip()
    lines = [line.rstrip() for line in text.split("\n")]
    if len(lines) == 1 or lines[0].startswith(" "):
        return json.dumps(text, ensure_ascii=False)
    return "\n".join(["|-", *(f"{indent}{line}" if line else "" for line in lines)])
