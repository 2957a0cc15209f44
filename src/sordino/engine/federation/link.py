"""A SuperLink of our own on loopback, behind a front that passes the sites' calls; told whose keys to accept."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from sordino.engine.checkpoint import write_atomic
from sordino.engine.federation.certificates import Keys, certify, check_in_force
from sordino.engine.federation.front import Front
from sordino.engine.federation.keyring import Keyring
from sordino.engine.federation.processes import Child, call, command, environment, free_port, wait_until_free
from sordino.errors import BadInput, SordinoError

START = 60.0  # seconds a SuperLink has to come up
FREE = 20.0  # seconds an earlier one has to let go of the port
CONTROL = 60.0  # seconds a command to it may take
LOOPBACK = "127.0.0.1"
DAYS = 36500.0  # for which the certificate holds that this machine shows to itself

PROJECT = """\
[project]
name = "sordino-shell"
version = "1.0.0"
description = "Starts the coordinator that is installed here."
license = { text = "Apache-2.0" }
[tool.flwr.app]
publisher = "sordino"
[tool.flwr.app.components]
serverapp = "sordino_shell.server:app"
clientapp = "sordino_shell.client:app"
[tool.flwr.app.config]
run = ""
"""
CLIENT = "from flwr.clientapp import ClientApp\n\napp = ClientApp()\n"
SERVER = """\
from flwr.serverapp import ServerApp
from sordino.study.serve import coordinate

app = ServerApp()
app.main()(coordinate)
"""
SHELL = {"pyproject.toml": PROJECT, "sordino_shell/server.py": SERVER, "sordino_shell/client.py": CLIENT}
"""The app that the SuperLink runs: a shell that starts the coordinator which is installed at the server.

Flower wants an app to have a half for sites too. This one is empty, and no site fetches it (``worker``).
"""


class Link:
    """A running SuperLink with its state on disk, and the front at ``host`` and ``port``; use it as a context manager.

    ``keys`` None: without TLS and node authentication, for trials on one machine only.
    """

    def __init__(self, folder: Path, host: str, port: int, keys: Keys | None) -> None:
        self.folder = folder.resolve()
        self.host = host
        self.port = port
        self.keyring = None if keys is None else Keyring(keys)
        self.home = self.folder / "flower"
        self.home.mkdir(parents=True, exist_ok=True)
        self.env = environment(self.home)
        self.inner = 0
        self.child: Child | None = None
        self.front: Front | None = None

    def __enter__(self) -> Link:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether SuperLink and front are there."""
        return all(one is not None and one.running for one in (self.child, self.front))

    def start(self) -> None:
        """Start both, and register every site whose public key lies in the keys' folder."""
        self.stop()
        certificate = self._certificate()
        wait_until_free(self.host, self.port, FREE)
        self.inner = self._inner_port()
        arguments = [command("flower-superlink"), "--host", LOOPBACK, "--port", str(self.inner)]
        arguments += ["--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation"]
        about = f'[superlink]\ndefault = "sordino"\n\n[superlink.sordino]\naddress = "{LOOPBACK}:{self.inner}"\n'
        authority = None
        if self.keyring is None:
            arguments.append("--insecure")
            about += "insecure = true\n"
        else:  # node authentication wants TLS even here; the certificate that sites see need not name loopback
            own = certify(self.home / "loopback", [], days=DAYS)
            authority = own.authority
            arguments += ["--ssl-ca-certfile", str(authority), "--enable-supernode-auth"]
            arguments += ["--ssl-certfile", str(own.server[0]), "--ssl-keyfile", str(own.server[1])]
            about += f'root-certificates = "{authority}"\n'
        (self.home / "config.toml").write_text(about)
        self.child = Child(arguments, self.env, self.folder / "superlink.log")
        self.child.wait_for_port(self.inner, START)
        self.refresh()
        inner = f"{'http' if authority is None else 'https'}://{LOOPBACK}:{self.inner}"
        known = None if self.keyring is None else self.keyring.names
        self.front = Front(self.host, self.port, inner, authority, known, certificate)
        self.front.start()

    def _inner_port(self) -> int:
        """The SuperLink's port on loopback: the same one after a restart, where a coordinator that lives on looks."""
        file = self.home / "port"
        with contextlib.suppress(OSError, ValueError):  # the first time, or somebody else has taken it
            port = int(file.read_text())
            wait_until_free(LOOPBACK, port, FREE)
            return port
        port = free_port()
        write_atomic(file, str(port).encode())
        return port

    def _certificate(self) -> tuple[Path, Path] | None:
        """The certificate that sites see and its key, there and in force; None without keys."""
        if self.keyring is None:
            return None
        keys = self.keyring.keys
        for one in keys.server:
            if not one.exists():
                raise BadInput(f"{one} does not exist: make keys with `sordino certify {keys.folder}`")
        check_in_force(keys.server[0])
        return keys.server

    def stop(self) -> None:
        """End both, and the coordinator in the SuperLink."""
        for one in (self.front, self.child):
            if one is not None:
                one.stop()
        self.front = self.child = None

    def refresh(self) -> None:
        """Tell the SuperLink of keys that are new in the folder. What its database knows already stays as it is."""
        if self.keyring is None:
            return
        file = self.folder / "registered.json"
        known = set(json.loads(file.read_text())) if file.exists() else set()
        for member in self.keyring.members().values():
            if member.fingerprint in known:
                continue
            try:
                path = str(self.keyring.keys.public(member.name))
                self._flwr("supernode", "register", path, "sordino", "--name", member.name)
            except SordinoError as error:
                if "already in use" not in str(error):
                    raise
            known.add(member.fingerprint)
            write_atomic(file, json.dumps(sorted(known)).encode())

    def submit(self, run: Path) -> str:
        """Start the coordinator on a prepared run folder; Flower's number of that run."""
        app = self.folder / "shell"
        for name, text in SHELL.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        said = self._flwr("run", str(app), "sordino", "--run-config", f'run="{run.resolve()}"', "--format", "json")
        try:
            return str(json.loads(said)["run-id"])
        except (json.JSONDecodeError, KeyError):
            raise SordinoError(f"flwr run did not start the coordinator: {said.strip()}") from None

    def _flwr(self, *arguments: str) -> str:
        return call([command("flwr"), *arguments], self.env, CONTROL)
