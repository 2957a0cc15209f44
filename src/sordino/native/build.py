"""Compile a source of this folder with the system's compiler at its first use, keep it, load it, and check it.

Never an error for whoever asks: without a compiler, a folder to write to, torch's own OpenMP, or with a result that
fails its check, there is no library, a reason that says so, and the caller's own way.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SWITCH = "SORDINO_NATIVE"
"""The environment variable that does without compiled loops: ``off``."""

CACHE = "SORDINO_CACHE"
"""The environment variable that says where they are kept, in place of the user's cache folder."""

# Not -ffast-math: what is not finite must be seen, and small numbers must not vanish.
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-c")
WIDE = ("-mprefer-vector-width=512",)
SOURCES = Path(__file__).parent
LONGEST = 180
"""Seconds that a compiler may take."""

log = logging.getLogger("sordino.native")
_lock = threading.Lock()
_loaded: dict[str, Native] = {}
_aside = False

Check = Callable[[ctypes.CDLL], str | None]


class Native(NamedTuple):
    """A compiled source, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


class _NotBuilt(Exception):
    """Why there is no library."""


def load(name: str, check: Check, flags: tuple[str, ...] = ()) -> Native:
    """The compiled ``name.cpp`` of this folder; built by the first process that asks, checked once in every process.

    ``flags``: what the compiler is told beside what all sources have, the same in every call.
    """
    if _aside:
        return Native(None, "set aside")
    found = _loaded.get(name)
    if found is None:
        with _lock:
            found = _loaded.get(name) or _load(name, check, flags)
            _loaded[name] = found
    return found


@contextmanager
def set_aside() -> Iterator[None]:
    """Do without compiled loops inside this context, as where there is no compiler."""
    global _aside
    before, _aside = _aside, True
    try:
        yield
    finally:
        _aside = before


def _load(name: str, check: Check, flags: tuple[str, ...]) -> Native:
    if os.environ.get(SWITCH, "").lower() in {"off", "0", "no", "false"}:
        return Native(None, f"switched off by {SWITCH}")
    try:
        _share_threads()
        library = ctypes.CDLL(str(built(SOURCES / f"{name}.cpp", flags)))
    except (_NotBuilt, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.info("%s is not compiled, which is slower: %s", name, reason)
        return Native(None, f"not compiled: {reason}")
    try:
        wrong = check(library)
    except Exception as error:  # whatever a check raises
        wrong = f"it could not be checked: {str(error) or type(error).__name__}".splitlines()[0]
    if wrong is not None:
        log.warning("%s as compiled here is not used, which is slower: %s", name, wrong)
        return Native(None, f"compiled, and not used: {wrong}")
    return Native(library, "compiled")


def _share_threads() -> None:
    """Let the library use the threads that torch has: those of a second OpenMP would spin against them."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        raise _NotBuilt("threads can be shared with torch on Linux only") from None
    found = sorted({line.split(maxsplit=5)[5] for line in mapped if "libgomp" in line or "libiomp" in line})
    if len(found) > 1:  # other packages bring their own; torch's lies in its folder, or in the one beside it
        home = str(Path(getattr(sys.modules.get("torch"), "__file__", None) or "/no/torch").parent)
        found = [one for one in found if one.startswith((home + os.sep, home + ".libs" + os.sep))]
    if len(found) != 1:
        raise _NotBuilt("the OpenMP library of torch was not found, whose threads should be shared")
    ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)


def built(source: Path, flags: tuple[str, ...] = ()) -> Path:
    """The compiled source in the cache, compiled now where it is not there; ``flags`` come last and overrule."""
    compiler = _compiler()
    parts = [source, *sorted(source.parent.glob("*.h"))]
    about = "\n".join([*(part.read_text() for part in parts), *COMPILE, *WIDE, *flags, _about(compiler), _processor()])
    folder = _folder()
    kept = folder / f"{source.stem}-{hashlib.sha256(about.encode()).hexdigest()[:24]}.so"
    if not kept.exists():
        log.info("compiling %s", source.name)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as room:
            part, whole = Path(room, "part.o"), Path(room, "whole.so")
            wide = WIDE if platform.machine() in {"x86_64", "AMD64"} else ()
            _run(compiler, *COMPILE, *wide, *flags, str(source), "-o", str(part))
            # Linked without OpenMP: its symbols are torch's own, found when the library is loaded.
            _run(compiler, "-shared", str(part), "-o", str(whole))
            whole.replace(kept)  # at once: another process sees all of it or nothing
    return kept


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise _NotBuilt("no C++ compiler was found (c++, g++, clang++, or the variable CXX)")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise _NotBuilt(f"{Path(command[0]).name} failed: {said.strip()[:200]}")
    return done.stdout


def _about(compiler: str) -> str:
    return _run(compiler, "--version").splitlines()[0]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(told)}))


def _folder() -> Path:
    """Where libraries are kept; nobody else may write there, since what lies there is run."""
    given = os.environ.get(CACHE)
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sordino")
    folder = base / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _NotBuilt(f"{folder} can be written to by others; set {CACHE} to a folder of your own")
    return folder
