"""A SuperNode of our own: it carries messages between the server and this site's worker, and starts nothing."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from sordino.engine.federation.certificates import write_secret
from sordino.engine.federation.processes import Child, command, environment, free_port
from sordino.engine.federation.worker import Worker
from sordino.errors import BadInput

LOG = "supernode.log"
"""What a SuperNode says, in the folder of its site."""


@dataclass(frozen=True)
class Address:
    """Where the server is, and what proves that it is the server: host, port, the authority's certificate."""

    host: str
    port: int
    authority: Path | None
    private: Path | None
    """The site's private key, by which the server knows the site."""

    @classmethod
    def parse(cls, text: str, authority: Path | None, private: Path | None) -> Address:
        """The address written as ``host:port``."""
        match = re.fullmatch(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})", text)
        if match is None:
            raise BadInput(f"site.server = {text!r}: write host:port, such as 127.0.0.1:9092")
        return cls(match["host"].strip("[]"), int(match["port"]), authority, private)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Node:
    """A SuperNode process for one site, and the worker that takes its tasks."""

    def __init__(self, folder: Path, address: Address) -> None:
        home = folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        command("flower-supernode")  # a readable error where Flower is missing
        port, secret = free_port(), secrets.token_bytes(32)
        shared = home / "worker.secret"  # by which the SuperNode knows the worker: others on this machine get no task
        write_secret(shared, secret)
        arguments = [sys.executable, "-m", "sordino.engine.federation.worker", "--superlink", str(address)]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(shared)]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        if address.authority is None:
            arguments.append("--insecure")
        else:
            arguments += ["--root-certificates", str(address.authority)]
            arguments += ["--auth-supernode-private-key", str(address.private)]
        log = folder / LOG
        self._read = log.stat().st_size if log.exists() else 0
        self.worker = Worker(port, secret)
        self.child = Child(arguments, environment(home), log)

    @property
    def running(self) -> bool:
        """Whether the SuperNode's process is there."""
        return self.child.running

    def stop(self) -> None:
        """End the SuperNode's process."""
        self.worker.close()
        with contextlib.suppress(OSError):
            self.child.stop()

    def said(self) -> str:
        """What this process has written so far."""
        with contextlib.suppress(OSError), open(self.child.log, "rb") as file:
            file.seek(self._read)
            return file.read().decode(errors="replace")
        return ""
