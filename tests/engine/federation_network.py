"""A real federation on loopback: one SuperLink, three SuperNodes, TLS, node authentication, all in processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sordino as sd
from sordino.data import Federation
from sordino.engine.federation.certificates import Keys, certify
from sordino.engine.federation.link import Link
from sordino.engine.federation.processes import Child, free_port
from sordino.study.conduct import set_up
from sordino.study.file import make_study
from sordino.study.serve import run_on

NAMES = ["anna", "bert", "cleo"]
EPSILONS = [4.0, 8.0, 16.0]

SITE = """\
[site]
name = "{name}"
server = "127.0.0.1:{port}"
folder = "{name}"
[data]
path = "{name}.npz"
{held}
[data.schema]
classes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
[budget]
epsilon = {total}
delta = 1e-5
ledger = "{name}.db"
[limits]
run_epsilon = {epsilon}
colluders = 0
[trust]
peers = "keys/sites"
[keys]
authority = "keys/ca.crt"
private = "keys/sites/{name}.key"
"""


def clients_of(names: list[str], records: int = 600) -> Federation:
    """Some digits, dealt to clients whose names are the sites'."""
    made = sd.data.load("digits").subset(records, seed=0).partition("iid", clients=len(names), seed=0, test=0.0)
    object.__setattr__(made, "names", list(names))
    return made.with_budgets([EPSILONS[k % 3] for k in range(len(names))], 1e-5)


@dataclass
class Network:
    """Where everything lies, and what runs."""

    folder: Path
    clients: Federation
    keys: Keys
    link: Link
    sites: dict[str, Child]

    @classmethod
    def lay(cls, folder: Path, totals: dict[str, float], records: int = 600, held: float | None = None) -> Network:
        """Write the sites' files and keys; nothing runs yet.

        ``totals``: each site's whole budget; ``records`` are dealt to them, and each holds out the share ``held``.
        """
        names, port = list(totals), free_port()
        clients, keys = clients_of(names, records), certify(folder / "keys", names)
        for place, name in enumerate(names):
            mine = clients.train[place]
            np.savez(folder / f"{name}.npz", x=clients.x[mine], y=clients.y[mine])
            about = {"name": name, "port": port, "total": totals[name], "epsilon": clients.budgets[place].epsilon}
            about["held"] = "" if held is None else f"held_out = {held}"
            (folder / f"{name}.toml").write_text(SITE.format(**about))
            (folder / f"{name}.wire").mkdir()
        (folder / "key").write_text("")
        return cls(folder, clients, keys, Link(folder / "link", "127.0.0.1", port, keys), {})

    def __enter__(self) -> Network:
        self.link.start()
        for name in self.clients.names:
            self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.sites.values():
            one.stop()
        self.link.stop()

    def start(self, name: str) -> None:
        """Start a site, for the first time or again."""
        script = Path(__file__).with_name("federation_site_process.py")
        arguments = [sys.executable, str(script), str(self.folder / f"{name}.toml")]
        arguments += [str(self.folder / "key"), str(self.folder / f"{name}.wire")]
        self.sites[name] = Child(arguments, dict(os.environ), self.folder / f"{name}.log")

    def foresee(self, key: str) -> None:
        """From now on sites draw what a simulation with this key draws; with no key, what nobody can foresee."""
        (self.folder / "key").write_text(key)

    def run(self, study: dict[str, Any], judged: sd.Run | None = None) -> tuple[dict[str, Any], Path]:
        """Have the running federation train a study, or judge a finished run as it says."""
        folder = self.folder / f"run-{len(list(self.folder.glob('run-*')))}"
        set_up(folder, make_study(study), resume=False, keys=self.keys.folder, judged=judged)
        return run_on(self.link, folder), folder

    def sent(self, name: str) -> list[bytes]:
        """Everything a site has sent so far."""
        return [one.read_bytes() for one in sorted((self.folder / f"{name}.wire").glob("*.out"))]
