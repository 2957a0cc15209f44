"""The compose file: keys that the Compose Specification has, users and files as they should be, commands that work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
import yaml

from sordino.cli import app
from sordino.engine.federation.processes import free_port
from sordino.engine.federation.reach import trouble
from sordino.study.heartbeat import LATE
from sordino.study.site_check import check_site
from sordino.study.site_file import read_site

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
SORDINO = [sys.executable, "-c", "from sordino.cli import main; main()"]
SITES = ["north", "east", "south"]

# What the Compose Specification (compose-spec, 05-services and its neighbours) knows, as far as it is used here.
TOP = {"name", "services", "networks"}
SERVICE = {"image", "build", "user", "init", "read_only", "tmpfs", "cap_drop", "security_opt", "networks", "volumes"}
SERVICE |= {"stop_grace_period", "working_dir", "command", "restart", "healthcheck"}
BUILD, HEALTH, NETWORK = (
    {"context", "dockerfile"},
    {"test", "interval", "timeout", "retries", "start_period"},
    {"internal"},
)
DURATION = re.compile(r"\d+(s|m|h)")
RESTART = re.compile(r"no|always|unless-stopped|on-failure(:\d+)?")


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folders that prepare.py makes, for a server on a free port of this machine."""
    folder, port = tmp_path_factory.mktemp("deploy") / "federation", free_port()
    script = [sys.executable, str(DEPLOY / "prepare.py"), str(folder), f"127.0.0.1:{port}"]
    subprocess.run(script, check=True, capture_output=True)
    return folder, port


def test_every_key_is_one_of_the_specification(compose: dict):
    assert {key for key in compose if not key.startswith("x-")} <= TOP
    assert list(compose["services"]) == ["server", *SITES]
    for service in compose["services"].values():
        assert set(service) <= SERVICE
        assert set(service["build"]) <= BUILD
        assert set(service["healthcheck"]) <= HEALTH
        assert RESTART.fullmatch(service["restart"])
        for key in ("interval", "timeout", "start_period"):
            assert DURATION.fullmatch(service["healthcheck"][key])
        assert DURATION.fullmatch(service["stop_grace_period"])
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert all(isinstance(word, str) for word in service["command"]), "a number would not be an argument"
        assert set(service["networks"]) <= set(compose["networks"])
    assert all(set(one) <= NETWORK for one in compose["networks"].values())


def test_nobody_is_root_and_everybody_sees_one_folder_of_its_own(compose: dict):
    seen = []
    for name, service in compose["services"].items():
        assert not service["user"].startswith(("0", "root"))
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        (volume,) = service["volumes"]
        here, there = volume.split(":")
        assert here == f"./federation/{name}"
        assert there == service["working_dir"]
        seen.append(here)
    assert len(set(seen)) == len(seen)
    assert compose["networks"]["federation"]["internal"] is True


def test_the_image_is_built_from_what_is_there(compose: dict):
    build = compose["services"]["server"]["build"]
    root = (DEPLOY / build["context"]).resolve()
    text = (root / build["dockerfile"]).read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.M):
        for name in line.split():
            assert (root / name).exists(), name
            assert f"!{name}\n" in (DEPLOY / "Dockerfile.dockerignore").read_text(), name
    installs = re.findall(r"pip install.*", text)
    assert installs[0].endswith(" torch==2.13.0"), "first and alone"
    assert "USER 1000:1000" in text
    assert "http" not in text


def test_a_folder_holds_what_belongs_to_it_and_no_more(laid: tuple[Path, int]):
    folder, _ = laid
    secrets = {str(one.relative_to(folder)) for one in folder.rglob("*.key")}
    own = {f"{name}/keys/{name}.key" for name in SITES} | {"server/keys/server.key"}
    assert {one for one in secrets if not one.startswith("authority/")} == own
    for one in own:
        assert (folder / one).stat().st_mode & 0o077 == 0
    for name in SITES:
        states = {one.check: one.state for one in check_site(folder / name / "site.toml")}
        assert [check for check, state in states.items() if state == "failed"] == ["server"], "nobody serves yet"


def test_commands_are_commands_with_these_options(compose: dict, laid: tuple[Path, int], monkeypatch):
    folder, _ = laid
    known = typer.main.get_command(app)
    for name, service in compose["services"].items():
        monkeypatch.chdir(folder / name)
        words = service["command"]
        command = known.get_command(None, words[0])
        context = command.make_context(words[0], list(words[1:]))
        file = context.params.get("study") or context.params.get("site")
        assert (folder / name / file).exists()


def test_health_is_the_age_of_a_file_that_is_touched(compose: dict, tmp_path: Path):
    for service in compose["services"].values():
        test = service["healthcheck"]["test"][1]
        where = tmp_path / re.match(r"find (\S+) -mmin -3", test).group(1)
        where.parent.mkdir(exist_ok=True)
        where.unlink(missing_ok=True)
        assert subprocess.run(test, shell=True, cwd=tmp_path, capture_output=True).returncode != 0
        where.write_text("{}")
        assert subprocess.run(test, shell=True, cwd=tmp_path, capture_output=True).returncode == 0
        then = time.time() - LATE - 90
        os.utime(where, (then, then))
        assert subprocess.run(test, shell=True, cwd=tmp_path, capture_output=True).returncode != 0


def start(command: list[str], cwd: Path) -> subprocess.Popen:
    log = open(cwd / "said.log", "ab")  # noqa: SIM115
    return subprocess.Popen(
        [*SORDINO, *command],
        cwd=cwd,
        stdout=log,
        stderr=log,
        env={**os.environ, "COLUMNS": "200"},
    )


def wait(until, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "too late"
        time.sleep(0.5)


def state(run: Path) -> dict:
    said = subprocess.run([*SORDINO, "status", str(run), "--json"], capture_output=True, text=True)
    return json.loads(said.stdout)


@pytest.mark.slow
def test_the_services_train_a_study_over_tls_and_survive_a_killed_server(compose: dict, laid: tuple[Path, int]):
    """The very commands of the services, as processes on loopback; only the port is another one."""
    folder, port = laid
    services = {name: list(one["command"]) for name, one in compose["services"].items()}
    services["server"][services["server"].index("9092")] = str(port)
    run, log = folder / "server" / "run", folder / "server" / "run" / "log.jsonl"
    running = {"server": start(services["server"], folder / "server")}
    try:
        wait(lambda: trouble(read_site(folder / "north" / "site.toml").address(False)) is None, 120)
        for name in SITES:
            checks = {one.check: one for one in check_site(folder / name / "site.toml")}
            assert {check for check, one in checks.items() if one.state != "ok"} == {"peers"}, checks
            running[name] = start(services[name], folder / name)
        wait(log.exists, 300)
        running["server"].kill()
        running["server"].wait()
        wait(lambda: all("no connection to" in (folder / n / "said.log").read_text() for n in SITES), 120)
        wait(lambda: state(run)["state"] == "interrupted", 180)  # its child has to notice first
        assert "died without a word" in state(run)["trouble"]["what"]
        checks = {one.check: one for one in check_site(folder / "south" / "site.toml")}
        assert {check for check, one in checks.items() if one.state == "failed"} == {"server"}, checks
        assert "works there now" in checks["folder"].found
        assert "1 declared run(s)" in checks["ledger"].found
        running["server"] = start(services["server"], folder / "server")
        wait(lambda: (run / "result.json").exists(), 300)
        assert running["server"].wait(60) == 0
        assert start(services["server"], folder / "server").wait(60) == 0, "a finished run is served at once"
    finally:
        for one in running.values():
            one.terminate()
        for one in running.values():
            one.wait(60)
    result = json.loads((run / "result.json").read_text())
    assert [len(record["participants"]) for record in result["rounds"]] == [3] * 5
    for row in result["privacy"]:
        assert row["told_by"] == "site"
        assert row["spent_epsilon"] <= row["epsilon"] * (1 + 1e-9)
    for name in SITES:
        said = (folder / name / "said.log").read_text()
        assert "connection refused; trying again" in said
        assert 1 <= said.count("connected to") <= said.count("no connection to") <= 4, "one line each, not a flood"
        assert "Traceback" not in said
        assert json.loads((folder / name / "alive.json").read_text())["ended"]
