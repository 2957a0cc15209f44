"""A SuperNode of our own: it carries messages between the server and this site's worker, and starts nothing."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sordino.engine.federation.certificates import write_secret
from sordino.engine.federation.processes import Child, command, environment, free_port
from sordino.engine.federation.worker import Worker
from sordino.errors import BadInput, SordinoError


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


def meet(address: Address, seconds: float) -> None:
    """Wait until the server answers, and check its certificate before anything else is said.

    Raises an error that says what is wrong with the certificate, or that nobody answered in time.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address.host, address.port), timeout=5.0) as line:
                if address.authority is not None:
                    _check_certificate(address, line)
                return
        except ssl.SSLCertVerificationError as error:
            raise SordinoError(
                f"the server at {address} is not trusted: {error.verify_message}; "
                f"{address.authority} must be the authority that signed its certificate, for this address, and in force"
            ) from None
        except ssl.SSLError as error:
            raise SordinoError(f"the server at {address} does not speak TLS properly: {error.reason}") from None
        except OSError as error:
            if time.monotonic() >= until:
                raise SordinoError(f"nobody answers at {address} after {seconds:g} s: {error}") from None
            time.sleep(0.5)


def _check_certificate(address: Address, line: socket.socket) -> None:
    try:
        context = ssl.create_default_context(cafile=str(address.authority))
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"keys.authority: {address.authority} is no certificate ({error})") from None
    context.wrap_socket(line, server_hostname=address.host).close()


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
        log = folder / "supernode.log"
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
