"""A site in a process of its own, for tests: ``join`` with a generator that a test can foresee, and a tap on the wire.

Usage: SITE.toml KEYFILE FOLDER. While KEYFILE is empty the generator is as secret as any site's; otherwise it draws
what a simulation with that key draws. Every packet in and out is written to FOLDER.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from sordino.engine.federation.site import Site
from sordino.privacy.generators import Keyed, Secret
from sordino.study.join import join


class Fixture:
    """The streams of the simulation whose key lies in a file; secret ones while it is empty."""

    simulated = False

    def __init__(self, file: Path) -> None:
        self.file = file
        self.secret = Secret()

    def _source(self):
        key = self.file.read_text()
        return Keyed(key) if key else self.secret

    def batches(self, *args):
        return self._source().batches(*args)

    def rounded(self, *args):
        return self._source().rounded(*args)

    def discrete(self, *args):
        return self._source().discrete(*args)


def tap(folder: Path) -> None:
    """Write down everything that goes through a site's door."""
    handle = Site.handle

    def heard(self: Site, data: bytes) -> bytes:
        reply = handle(self, data)
        count = len(list(folder.glob("*.in")))
        (folder / f"{count:04d}.in").write_bytes(data)
        (folder / f"{count:04d}.out").write_bytes(reply)
        return reply

    Site.handle = heard


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    site, key, folder = map(Path, sys.argv[1:])
    tap(folder)
    join(site, wait=60.0, source=Fixture(key))
