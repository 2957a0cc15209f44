"""What a part of a method is, beyond its name: the factory and options that made it, or the code of one's own.

Two parts may share a name and do different things. The identity of a part that a factory of sordino made is that
factory and its options. For any other it is a hash of its functions (byte code, constants, defaults, closures, the
globals they use) and of its other fields; equal identities do the same. Byte code belongs to a version of Python, so
identities are compared within one only.
"""

from __future__ import annotations

import dis
import hashlib
import sys
import sysconfig
import types
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from sordino.made import Made
from sordino.methods.method import KINDS, Method

_STANDARD = sysconfig.get_path("stdlib")
_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
_PLAIN = (bool, int, float, complex, str, bytes, Enum)


def identities(method: Method) -> dict[str, str]:
    """The identity of every part of a method, the same in every process."""
    return {part: identity(getattr(method, part)) for part in KINDS}


def identity(value: Any, here: bool = False) -> str:
    """A hash of what a rule, or any value, is and does.

    ``here``: for comparisons inside this process, where an object that cannot be looked into is equal to itself only.
    """
    return hashlib.sha256(_Teller(here).told(value, ()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Teller:
    """Puts values into words that are the same for the same value.

    ``above``: the containers that a value is found inside. ``known``: functions and objects that were told before, by
    number: once is enough.
    """

    here: bool
    known: dict[int, int] = field(default_factory=dict)

    def told(self, value: Any, above: tuple[int, ...]) -> str:
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in above:
            return "itself"
        inside = (*above, id(value))
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.told(one, inside) for one in value)}]"
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(self.told(one, inside) for one in value))}}}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.told(k, inside)}: {self.told(v, inside)}' for k, v in value.items())}}}"
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            return _array(value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value))
        if isinstance(value, partial):
            return f"partial({self.told([value.func, value.args, value.keywords], inside)})"
        if isinstance(value, types.MethodType):
            return f"method({self.told([value.__func__, value.__self__], inside)})"
        if id(value) in self.known:
            return f"#{self.known[id(value)]}"
        if isinstance(value, types.FunctionType):
            self.known[id(value)] = len(self.known)
            return self._function(value, inside)
        if isinstance(value, types.CodeType):
            constants = self.told(value.co_consts, inside)
            return f"{value.co_code.hex()} {constants} {value.co_names} {value.co_varnames}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, (type, types.BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        self.known[id(value)] = len(self.known)
        return self._instance(value, inside)

    def _function(self, value: types.FunctionType, inside: tuple[int, ...]) -> str:
        closed = [_contents(cell) for cell in value.__closure__ or ()]
        told: list[Any] = [value.__defaults__, value.__kwdefaults__, closed]
        if not _is_installed(value.__module__):  # an installed function's code belongs to its package's version
            names = sorted(_names(value.__code__))
            told += [value.__code__, {one: value.__globals__[one] for one in names if one in value.__globals__}]
        return f"{value.__module__}.{value.__qualname__}({self.told(told, inside)})"

    def _instance(self, value: Any, inside: tuple[int, ...]) -> str:
        """An object: its fields, and what its class does where that is somebody's own."""
        kind = type(value)
        name, held = f"{kind.__module__}.{kind.__qualname__}", dict(getattr(value, "__dict__", {}))
        made = getattr(value, "made", None)
        if isinstance(made, Made) and made.factory.startswith("sordino.") and made.still(value):
            return f"{made.factory}({self.told(dict(made.options), inside)})"
        if is_dataclass(value):
            return f"{name}({self.told({one.name: getattr(value, one.name) for one in fields(value)}, inside)})"
        if not _is_installed(kind.__module__):
            does = [one for above in kind.__mro__ if not _is_installed(above.__module__) for one in _functions(above)]
            return f"{name}({self.told([held, does], inside)})"
        if self.here:
            return f"{name} at {id(value)}"
        plain = {} if _is_installed(kind.__module__, _STANDARD) else held
        return f"{name}({ {one: plain[one] for one in plain if isinstance(plain[one], _PLAIN)} })"


def _array(value: np.ndarray) -> str:
    return f"array({value.dtype}, {value.shape}, {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()})"


def _functions(kind: type) -> list[types.FunctionType]:
    return [one for one in vars(kind).values() if isinstance(one, types.FunctionType)]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function and the functions in it look up; attributes of the same name do not count."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(*inner)


def _is_installed(module: str | None, where: str | tuple[str, ...] = _LIBRARIES) -> bool:
    """Whether a module is of this package, of Python or of an installed library, and so has a version."""
    if module is None or module == "__main__":
        return False
    if module.partition(".")[0] == "sordino":
        return where is _LIBRARIES
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    return found is not None and (file is None or file.startswith(where))
