"""What lies beside the library in a checkout and is in no wheel: ``papers`` (reproductions) and ``bench``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from sordino.errors import BadInput

CHECKOUT = Path(__file__).resolve().parents[2]


def beside(name: str) -> ModuleType:
    """The package ``papers`` or ``bench`` of the checkout that this library is run from."""
    if not (CHECKOUT / name / "__init__.py").exists():
        raise BadInput(
            f"{name}/ is not part of the installed library: clone sordino's repository and install it from there "
            "(pip install -e .), then give the command again"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return importlib.import_module(name)
