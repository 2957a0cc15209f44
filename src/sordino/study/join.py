"""``sordino join``: a site takes part. Records, ledger and secret randomness stay in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sordino.engine.federation.door import open_door
from sordino.engine.federation.node import Node, meet
from sordino.errors import SordinoError
from sordino.privacy.generators import Source
from sordino.study.site_file import read_site

log = logging.getLogger("sordino.site")

FIRST = 3600.0
"""Seconds a site waits for its server to appear."""

AGAIN = 5.0
"""Seconds before a SuperNode that ended is started again."""


def join(
    path: Path,
    *,
    insecure: bool = False,
    wait: float = FIRST,
    source: Source | None = None,
    done: Callable[[], bool] = lambda: False,
) -> None:
    """Take part until ``done`` says so, or for ever.

    Parameters
    ----------
    path: the site's SITE.toml.
    insecure: no TLS, no authentication: for trials on one machine.
    wait: seconds to wait for the server's first answer.
    source: a deterministic generator, for tests only; it marks the site's ledger NOT PRIVATE (R9).
    """
    file = read_site(path)
    address = file.address(insecure)
    with file.open(source) as site, open_door() as door:
        log.info("%s: %d records, budget %s", site.name, site.declared.records, site.budget)
        meet(address, wait)
        node, started = Node(site.folder, address, door.path), time.monotonic()
        try:
            while not done():
                door.serve_one(site.handle, 0.2)
                if not node.running:
                    _explain_end(node)
                    if time.monotonic() - started > AGAIN:
                        log.warning("the SuperNode ended; starting it again")
                        meet(address, wait)
                        node, started = Node(site.folder, address, door.path), time.monotonic()
        finally:
            node.stop()


def _explain_end(node: Node) -> None:
    """Raise where starting again would not help."""
    said = node.said()
    if "not registered" in said.lower() or "unauthenticated" in said.lower() or "401" in said:
        raise SordinoError(
            "the server does not know this site's key: give it the public key that belongs to keys.private, "
            "and ask its operator to start the server with it"
        )
