"""A SuperLink of our own: started, told whose keys to accept, given the shell to run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from sordino.engine.checkpoint import write_atomic
from sordino.engine.federation.certificates import Keys, check_in_force
from sordino.engine.federation.processes import Child, call, command, environment, wait_for_port, wait_until_free
from sordino.engine.federation.shell import write_shell
from sordino.errors import BadInput, SordinoError

log = logging.getLogger("sordino.serve")

START = 60.0
"""Seconds a SuperLink has to come up."""

FREE = 20.0
"""Seconds an earlier one has to let go of the port."""

CONTROL = 60.0
"""Seconds a command to it may take."""


class Link:
    """A running SuperLink with its state on disk; use it as a context manager.

    ``keys`` None: without TLS and node authentication, for trials on one machine only.
    """

    def __init__(self, folder: Path, host: str, port: int, keys: Keys | None) -> None:
        self.folder = folder.resolve()
        self.host = host
        self.port = port
        self.keys = keys
        self.home = self.folder / "flower"
        self.home.mkdir(parents=True, exist_ok=True)
        self.env = environment(self.home, poll=1.0)
        self.child: Child | None = None

    def __enter__(self) -> Link:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the SuperLink is there."""
        return self.child is not None and self.child.running

    def start(self) -> None:
        """Start it, and register every site whose public key lies in the keys' folder."""
        arguments = [command("flower-superlink"), "--host", self.host, "--port", str(self.port)]
        arguments += ["--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation"]
        local = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        about = f'[superlink]\ndefault = "sordino"\n\n[superlink.sordino]\naddress = "{local}:{self.port}"\n'
        if self.keys is None:
            arguments.append("--insecure")
            about += "insecure = true\n"
        else:
            certificate, private = self.keys.server
            for one in (self.keys.authority, certificate, private):
                if not one.exists():
                    raise BadInput(f"{one} does not exist: make keys with `sordino certify {self.keys.folder}`")
            check_in_force(certificate)
            arguments += ["--ssl-ca-certfile", str(self.keys.authority.resolve())]
            arguments += ["--ssl-certfile", str(certificate.resolve()), "--ssl-keyfile", str(private.resolve())]
            arguments.append("--enable-supernode-auth")
            about += f'root-certificates = "{self.keys.authority.resolve()}"\n'
        (self.home / "config.toml").write_text(about)
        wait_until_free(self.host, self.port, FREE)
        self.child = Child(arguments, self.env, self.folder / "superlink.log")
        wait_for_port(self.child, local, self.port, START)
        if self.keys is not None:
            self.register(self.keys.sites())

    def stop(self) -> None:
        """End it and the coordinator in it."""
        if self.child is not None:
            self.child.stop()

    def register(self, sites: list[str]) -> None:
        """Accept these sites' keys, each under its name. What the SuperLink's database knows already stays as it is."""
        if self.keys is None:
            return
        file = self.folder / "registered.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        for site in sites:
            key = self.keys.public(site).read_text()
            if known.get(site) == key:
                continue
            try:
                self._flwr("supernode", "register", str(self.keys.public(site)), "sordino", "--name", site)
            except SordinoError as error:
                if "already in use" not in str(error):
                    raise
            known[site] = key
            write_atomic(file, json.dumps(known).encode())

    def submit(self, run: Path) -> str:
        """Start the coordinator on a prepared run folder; Flower's number of that run."""
        app = write_shell(self.folder / "shell")
        said = self._flwr("run", str(app), "sordino", "--run-config", f'run="{run.resolve()}"', "--format", "json")
        try:
            return str(json.loads(said)["run-id"])
        except (json.JSONDecodeError, KeyError):
            raise SordinoError(f"flwr run did not start the coordinator: {said.strip()}") from None

    def _flwr(self, *arguments: str) -> str:
        return call([command("flwr"), *arguments], self.env, CONTROL)
