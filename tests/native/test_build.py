"""Compiled loops: built once, kept, shared by processes, and done without where anything is missing."""

import ctypes
import subprocess
import sys

import pytest
import torch  # noqa: F401  (its OpenMP is the one that is shared)

from sordino.native import build

SOURCE = """
#include <omp.h>
extern "C" long threads_of(long asked) {
    long seen = 0;
    #pragma omp parallel num_threads(asked) reduction(+ : seen)
    seen += 1;
    return seen;
}
"""

needs_compiler = pytest.mark.skipif(not any(map(build.shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache of its own, sources of its own, and nothing loaded yet."""
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "team.cpp").write_text(SOURCE)
    return tmp_path / "cache" / "native"


def fine(library):
    return None


def openmps():
    """The OpenMP libraries of this process: torch's, and those of other packages that were imported before."""
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}


@needs_compiler
def test_a_source_is_compiled_once_and_brings_no_threads_of_its_own(kept):
    there = openmps()
    found = build.load("team", fine)
    assert found.reason == "compiled"
    assert found.library.threads_of(ctypes.c_long(1)) == 1
    (library,) = kept.iterdir()
    before = library.stat().st_mtime_ns
    build._loaded.clear()
    assert build.load("team", fine).library is not None
    assert library.stat().st_mtime_ns == before
    assert openmps() == there


@needs_compiler
def test_several_processes_may_build_at_once(kept):
    code = (
        "import sys, torch; from pathlib import Path; from sordino.native import build;"
        "build.SOURCES = Path(sys.argv[1]); print(build.load('team', lambda library: None).reason)"
    )
    command = [sys.executable, "-c", code, str(kept.parent.parent)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate()[0].strip() for child in children] == ["compiled"] * 3
    assert len(list(kept.iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("first", ["import sklearn.cluster, torch", "import torch, sklearn.cluster"])
def test_threads_are_torchs_where_another_package_brings_its_own(kept, first):
    code = f"""if True:
        import sys; from pathlib import Path; from sordino.native import build
        {first}
        build.SOURCES = Path(sys.argv[1])
        found = build.load("team", lambda library: None)
        torch.set_num_threads(2)
        torch.randn(512, 512) @ torch.randn(512, 512)  # torch's team is there
        before = len(list(Path("/proc/self/task").iterdir()))
        print(found.reason, found.library.threads_of(2), len(list(Path("/proc/self/task").iterdir())) - before)
    """
    done = subprocess.run([sys.executable, "-c", code, str(kept.parent.parent)], capture_output=True, text=True)
    assert done.stdout.split() == ["compiled", "2", "0"], done.stderr


@needs_compiler
def test_another_source_or_other_flags_are_another_library(kept):
    source = build.SOURCES / "team.cpp"
    first = build.built(source)
    assert build.built(source, ("-O1",)) != first
    (build.SOURCES / "part.h").write_text("// what a source may include")
    second = build.built(source)
    source.write_text(SOURCE + "// changed\n")
    assert len({first, second, build.built(source)}) == 3


@needs_compiler
def test_a_library_that_fails_its_check_is_not_used(kept, caplog):
    found = build.load("team", lambda library: "sums differ by 1")
    assert found.library is None
    assert "sums differ by 1" in found.reason
    assert "sums differ by 1" in caplog.text


@needs_compiler
def test_a_check_that_fails_itself_is_a_reason(kept, caplog):
    found = build.load("team", lambda library: library.no_such_function())
    assert found.library is None
    assert "could not be checked" in found.reason
    assert "could not be checked" in caplog.text


def test_without_a_compiler_there_is_a_reason_and_no_error(kept, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = build.load("team", fine)
    assert found.library is None
    assert "no C++ compiler" in found.reason


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason(kept):
    (build.SOURCES / "team.cpp").write_text("this is no program")
    found = build.load("team", fine)
    assert found.library is None
    assert "failed" in found.reason
    assert list(kept.iterdir()) == []


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(kept):
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    found = build.load("team", fine)
    assert found.library is None
    assert build.CACHE in found.reason


@needs_compiler
def test_what_lies_in_the_cache_and_is_no_library_is_a_reason(kept):
    build.built(build.SOURCES / "team.cpp").write_bytes(b"torn")
    found = build.load("team", fine)
    assert found.library is None
    assert "not compiled" in found.reason


@pytest.mark.parametrize("word", ["off", "0", "no"])
def test_the_switch(kept, monkeypatch, word):
    monkeypatch.setenv(build.SWITCH, word)
    found = build.load("team", fine)
    assert found.library is None
    assert build.SWITCH in found.reason
    assert not kept.exists()


def test_set_aside_is_for_a_while(kept):
    with build.set_aside():
        assert build.load("team", fine).library is None
    assert "team" not in build._loaded
