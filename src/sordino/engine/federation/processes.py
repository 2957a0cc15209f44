"""Flower's commands as child processes: started with the right environment, ended with everything they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sordino.errors import BadInput, SordinoError

PATIENCE = 10.0  # seconds a process has to end in order before it is killed


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: a home of its own, no calls home, no other ports, a task a second.

    Loopback is never reached by way of a proxy.
    """
    direct = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy", ""), "127.0.0.1", "localhost"]
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1",
        "NO_PROXY": ",".join(one for one in direct if one),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def command(name: str) -> str:
    """The full path of one of Flower's commands, from the environment sordino runs in."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise BadInput(f"{name} is not installed: deployment needs the flower extra, pip install 'sordino[flower]'")
    return str(found)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_free(host: str, port: int, seconds: float) -> None:
    """Wait until nobody listens there any more: a server that was killed takes a moment to let go."""
    until, family = time.monotonic() + seconds, socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            socket.create_server((host, port), family=family).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                why = f"{host}:{port} cannot be listened on: {error.strerror}"
                raise BadInput(f"{why}; choose another --port") from None
            time.sleep(0.5)


class Child:
    """A process and everything it starts; it ends when this process does, even by SIGKILL (Linux)."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        self.name = Path(arguments[0]).name
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                list(arguments),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def running(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and its children, in order if it can, by force if not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)

    def wait_for_port(self, port: int, seconds: float) -> None:
        """Wait until it listens at a port of 127.0.0.1; an error shows its log if it ends or the time is up."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.running:
                raise SordinoError(f"{self.name} stopped at once:\n{self._tail()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            time.sleep(0.1)
        raise SordinoError(f"nobody listens at 127.0.0.1:{port} after {seconds:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])


def call(arguments: Sequence[str], env: dict[str, str], seconds: float) -> str:
    """Run one of Flower's commands to its end; its output, or an error that shows it."""
    name = Path(arguments[0]).name
    try:
        done = subprocess.run(list(arguments), env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise SordinoError(f"{name} did not answer within {seconds:g} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise SordinoError(f"{name} {arguments[1]} failed: " + " ".join(said[-3:]))
    return done.stdout


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
