"""docs/your-own-method.md, run as it stands: five parts of one's own in simulation, stacked, resumed and deployed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

PAGE = (Path(__file__).parents[1] / "docs" / "your-own-method.md").read_text()
OWN = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
STUDY = re.search(r"```toml\n(# study\.toml.*?)```", PAGE, re.S).group(1)
PARTS = {
    "clip": '{name = "own:soft", sharpness = 2.0}',
    "local": '"own:momentum"',
    "aggregate": '"own:median"',
    "ask": '"own:hard_share"',
    "select": '"own:hardest_half"',
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with own.py and study.toml as the page has them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "study.toml").write_text(STUDY)
    return folder


def sordino(desk, *words, check=True):
    done = subprocess.run([sys.executable, "-m", "sordino", *words], cwd=desk, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


def weights(folder):
    return load_file(folder / "model.safetensors")["weights"]


@pytest.fixture(scope="module")
def trained(desk):
    sordino(desk, "-q", "run", "study.toml")
    return desk / "runs" / "own"


def test_the_page_runs(desk, trained):
    result = json.loads((trained / "result.json").read_text())
    assert result["method"] == "own"
    assert result["private"]
    assert [one["diagnostics"]["rounds_seen"] for one in result["rounds"]] == [1, 2, 3, 4]
    assert {len(one["participants"]) for one in result["rounds"]} == {3}
    for one in result["privacy"]:
        assert {release["what"] for release in one["releases"]} <= {"gradient", "loss", "hard-share"}
        assert one["spent_epsilon"] <= one["epsilon"]
    assert "soft" in sordino(desk, "plan", "study.toml").stdout


@pytest.mark.parametrize("part", PARTS)
def test_every_part_goes_into_a_built_in_method_by_name(desk, part):
    words = ["--set", "method.name=dp-fedavg", "--set", f"method.{part}={PARTS[part]}", "--set", "study.rounds=2"]
    if part == "select":
        words += ["--set", 'method.ask={name = "loss", of = "candidates"}']
    sordino(desk, "-q", "run", "study.toml", *words, "--out", f"runs/{part}")
    described = json.loads((desk / "runs" / part / "result.json").read_text())["study"]["method"]
    assert described["name"] == "dp-fedavg"
    told = {"clip": "soft", "local": "momentum", "aggregate": "median", "ask": "hard-share", "select": "hardest-half"}
    assert told[part] in described[part]


def test_beside_other_methods_in_one_command_stacked_or_not(desk, trained):
    methods = 'compare.methods=["own:method", "dp-fedavg"]'
    for flag, out in (("--no-stack", "apart"), ("--stack", "stacked")):
        sordino(desk, "-q", "compare", "study.toml", "--set", methods, flag, "--out", out)
    own = [next(iter((desk / out).glob("own*"))) / "seed-0" for out in ("apart", "stacked")]
    np.testing.assert_array_equal(weights(own[0]), weights(trained))
    np.testing.assert_allclose(weights(own[1]), weights(trained), atol=1e-5)


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(desk, trained):
    out = desk / "killed"
    child = subprocess.Popen([sys.executable, "-m", "sordino", "-q", "run", "study.toml", "--out", str(out)], cwd=desk)
    until = time.monotonic() + 60
    while not (out / "checkpoint.safetensors").exists() and child.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    sordino(desk, "-q", "run", "study.toml", "--out", str(out), "--resume")
    np.testing.assert_array_equal(weights(out), weights(trained))


def test_another_rule_of_the_same_name_does_not_resume_it(desk, trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace("1.0 / (1.0 +", "2.0 / (1.0 +"))
    (tmp_path / "study.toml").write_text(STUDY)
    done = sordino(tmp_path, "-q", "run", "study.toml", "--out", str(trained), "--resume", check=False)
    assert done.returncode == 2
    assert "another clip" in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def network(desk, tmp_path_factory):
    pytest.importorskip("flwr")
    sys.path.insert(0, str(Path(__file__).parent / "engine"))
    from federation_network import NAMES, Network

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(desk), before]))
    laid = Network.lay(tmp_path_factory.mktemp("own-federation"), dict.fromkeys(NAMES, 500.0))
    for name in NAMES:
        file = laid.folder / f"{name}.toml"
        file.write_text(file.read_text().replace("[limits]\n", '[limits]\nmodules = ["own"]\n'))
    try:
        with laid:
            yield laid
    finally:
        sys.path.remove(str(Path(__file__).parent / "engine"))
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def test_deployed_on_three_real_sites_whose_officers_allow_the_module(desk, network):
    from federation_rig import table

    sys.path.insert(0, str(desk))
    try:
        result, _ = network.run(table("own:method", network.clients, rounds=2, steps=2, rate=0.2))
    finally:
        sys.path.remove(str(desk))
    assert result["refused"] == {}
    assert len(result["privacy"]) == 3
    assert [one["diagnostics"]["rounds_seen"] for one in result["rounds"]] == [1, 2]
    for one in result["privacy"]:
        assert one["told_by"] == "site"
        assert 0 < one["spent_epsilon"] <= one["epsilon"]
