"""A server that is gone, or does not respond, is noticed: since when, and what to do; browsers that go are not news."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sordino.cli import app
from sordino.study import page as page_module
from sordino.study.folder import TUNED
from sordino.study.heartbeat import ALIVE, LATE, Heart, Life, moment, span
from sordino.study.page import Page, page
from sordino.study.serve import _alone
from sordino.study.status import look

STUDY = {"study": {"name": "four", "rounds": 5}, "deployment": {"sites": ["north"]}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "serve.json").write_text(json.dumps({"study": STUDY, "run": "one", "kind": "deployed run"}))
    return folder


def age(folder: Path, seconds: float) -> None:
    """Make a folder's last sign of life so old."""
    then = time.time() - seconds
    os.utime(folder / ALIVE, (then, then))


def test_a_server_that_is_there_is_no_trouble(run: Path):
    with _alone(run, "serve", 1.0), Heart(run):
        seen = look(run)
    assert (seen["state"], seen["trouble"]) == ("starting", None)


def test_a_server_that_was_killed_is_noticed(run: Path):
    script = (
        "import sys, time; from pathlib import Path; from sordino.study.serve import _alone; "
        "from sordino.study.heartbeat import Heart\n"
        "with _alone(Path(sys.argv[1]), 'serve', 1.0), Heart(Path(sys.argv[1])):\n"
        "    print('here', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"here\n"
        assert look(run)["state"] == "starting"
        server.kill()
    seen = look(run)
    assert seen["state"] == "interrupted"
    assert seen["trouble"]["what"].startswith("the server died without a word: last seen ")
    assert abs(seen["trouble"]["since"] - (run / ALIVE).stat().st_mtime) < 1
    said = CliRunner().invoke(app, ["status", str(run)]).output
    assert "the server died without a word" in said
    assert "with --resume" in said
    assert "died without a word" in page(run)


def test_a_server_that_was_ended_in_order_says_so(run: Path):
    with pytest.raises(KeyboardInterrupt), _alone(run, "serve", 1.0), Heart(run):
        raise KeyboardInterrupt
    assert look(run)["trouble"]["what"].startswith("the server was ended in order: last seen ")


def test_a_server_that_hangs_does_not_respond(run: Path):
    with _alone(run, "serve", 1.0), Heart(run) as heart:
        age(run, LATE + 60)
        seen = look(run)
        assert seen["state"] == "not responding"
        assert re.search(r"has not done anything since \S+( \S+)?, 4\.0 min ago", seen["trouble"]["what"])
        heart._last -= LATE
        heart.beat()
        assert look(run)["trouble"] is None


def test_one_that_starts_again_is_not_taken_for_one_that_hangs(run: Path):
    with Heart(run):
        pass
    age(run, 9999)
    with _alone(run, "serve", 1.0), Heart(run):
        assert look(run)["state"] == "starting"


def test_a_run_without_signs_of_life_was_last_seen_when_it_wrote(run: Path):
    os.utime(run / "serve.json", (1e9, 1e9))
    found = look(run)["trouble"]
    assert found["since"] == 1e9
    assert "no server works here: last seen 2001-09-" in found["what"]


def test_a_server_on_another_machine_is_believed_for_a_moment(run: Path):
    with Heart(run) as heart:
        heart.note(host="elsewhere")
        assert look(run)["state"] == "running"
        age(run, 60)
        assert look(run)["state"] == "interrupted"


def test_the_remedy_names_the_command_that_works_there(run: Path):
    (run / "serve.json").write_text(json.dumps({"study": STUDY, "run": "one", "kind": TUNED}))
    assert "`sordino tune … --sites` with --resume" in look(run)["trouble"]["remedy"]


def test_what_is_finished_is_no_trouble(run: Path):
    (run / "result.json").write_text("{}")
    (run / "evaluation.json").write_text('{"evaluation": []}')
    assert (look(run)["state"], look(run)["trouble"]) == ("finished", None)


def test_an_unreadable_sign_of_life_is_none(run: Path):
    (run / ALIVE).write_text("[1]")
    assert Life.read(run) is None
    assert look(run)["state"] == "interrupted"


def test_durations_in_words():
    assert [span(s) for s in (40, 119, 121, 3600 * 3.5, 86400 * 12)] == ["40 s", "119 s", "2.0 min", "3.5 h", "12 days"]
    assert moment(time.time() - 5).endswith(", 5 s ago")


def close_at_once(port: int) -> None:
    """A browser that asks, and is gone before the answer: its side resets the connection."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_browser_that_closes_its_connection_leaves_no_traceback(run: Path, capfd, monkeypatch):
    done = []

    def late(folder: Path) -> str:
        time.sleep(0.3)
        done.append(folder)
        return "x" * 5_000_000

    monkeypatch.setattr(page_module, "page", late)
    with Page(run, 0, Console(file=open(os.devnull, "w"))) as served:
        for _ in range(3):
            close_at_once(served.server.server_address[1])
        until = time.monotonic() + 20
        while len(done) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)
    assert len(done) == 3
    assert capfd.readouterr().err == ""


def test_an_error_of_the_page_itself_is_still_shown(run: Path, capfd, monkeypatch):
    monkeypatch.setattr(page_module, "page", lambda folder: 1 / 0)
    with Page(run, 0, Console(file=open(os.devnull, "w"))) as served:
        with socket.create_connection(served.server.server_address[:2]) as line:
            line.sendall(b"GET / HTTP/1.0\r\n\r\n")
            line.recv(100)
        time.sleep(0.2)
    assert "ZeroDivisionError" in capfd.readouterr().err
