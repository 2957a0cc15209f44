"""Values as TOML writes them: what drafts of schemas and studies are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_value(value: Any) -> str:
    """A text, a truth value, a number (whole ones without a point), a list or a table in one line, as TOML writes it.

    Text is written as JSON does, but for DEL.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def toml_key(name: str) -> str:
    """A key: bare where TOML allows that, else quoted."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
