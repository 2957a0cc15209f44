"""What the README and the docs say is what happens."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sordino as sd
from sordino import methods

ROOT = Path(__file__).parents[1]


def test_the_quickstart_runs_as_written(tmp_path):
    [code] = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"^accuracy (\S+)$", done.stdout, re.M).group(1)) > 0.8
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_every_method_has_a_page_and_a_line_in_the_readme():
    table = (ROOT / "README.md").read_text().split("<!-- methods -->")[1].split("<!-- end of methods -->")[0]
    for name in methods.names():
        assert (ROOT / "docs" / "methods" / f"{name}.md").exists(), name
        line = next(one for one in table.splitlines() if f"`{name}`" in one)
        assert ("NOT PRIVATE" in line) == (not methods.get(name).private)


def test_every_rule_is_defined_once_and_cited_modules_and_tests_exist():
    rules = (ROOT / "docs" / "rules.md").read_text()
    assert re.findall(r"^\*\*(R\d+)\.", rules, re.M) == [f"R{k}" for k in range(1, 13)]
    for cited in re.findall(r"`((?:\w+/)+\w+\.py)`", rules):
        assert (ROOT / cited).exists() or (ROOT / "src" / "sordino" / cited).exists(), cited


def test_every_threat_names_a_test_that_exists_or_says_that_it_is_not_there_yet():
    lines = (ROOT / "docs" / "threats.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    assert len(table) > 15
    for line in table:
        cited = re.findall(r"`(tests/[\w/]+\.py)`", line)
        assert cited or line.endswith("| none |"), line
        for one in cited:
            assert (ROOT / one).exists() or "†" in line, one


STUDIES = [one for one in sorted(ROOT.glob("examples/**/*.toml")) if one.name != "registry.toml"]  # answers, no study


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_example_study_plans(path):
    from sordino.study.file import read_study

    study = read_study(path)
    assert study.chosen_method().name in methods.names()
    if study.data.name in ("digits", "breast-cancer", "least-squares"):  # the others need `sordino data get` first
        assert sd.plan(study.federation(), method=study.chosen_method(), **study.arguments()).clients


def test_importing_sordino_loads_only_what_it_needs():
    code = (
        "import sys, sordino as sd; sd.data, sd.models, sd.methods, sd.privacy, sd.server, sd.train;"
        "sys.exit(any(name.split('.')[0] in ('plotly', 'flwr', 'sklearn', 'pandas', 'onnx') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_ledger_is_read_without_torch(tmp_path):
    code = (
        "import sys; from sordino.privacy.ledger import Ledger; from sordino.privacy.statement import statement;"
        f"Ledger({str(tmp_path / 'l.db')!r}).close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_citation_is_of_this_version():
    told = dict(re.findall(r"^([a-z-]+): ?(.*)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert told["version"] == sd.__version__
    assert told["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors", "type"} <= set(told)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive of this checkout, and the wheel that is built from the archive alone."""
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.mark.slow
def test_the_source_archive_is_the_whole_project_and_the_wheel_the_library_alone(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {one for one in tracked if not one.startswith(".")} <= names
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert {name.split("/")[0] for name in wheel.namelist()} == {"sordino", f"sordino-{sd.__version__}.dist-info"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment_and_the_demo_runs_elsewhere(built, kind, tmp_path):
    fresh = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def call(*words, cwd=tmp_path):
        words = [str(word) for word in words]
        return subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True, env=fresh)

    call(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = tmp_path / "venv" / "bin" / "pip"
    call(pip, "install", "-q", "torch==2.13.0")
    call(pip, "install", "-q", "-c", ROOT / "constraints.txt", built[kind])
    (tmp_path / "unrelated").mkdir()
    call(tmp_path / "venv" / "bin" / "sordino", "demo", cwd=tmp_path / "unrelated")
    assert (tmp_path / "unrelated" / "runs" / "demo" / "report.html").exists()
    site = call(tmp_path / "venv" / "bin" / "python", "-c", "import sordino; print(sordino.__file__)").stdout.strip()
    assert site.startswith(str(tmp_path / "venv"))
    assert (Path(site).parent / "py.typed").exists()
