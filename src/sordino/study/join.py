"""``sordino join``: a site takes part. Records, ledger and secret randomness stay in this process."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sordino.engine.federation.front import UNKNOWN
from sordino.engine.federation.node import Node, meet
from sordino.engine.federation.signing import load_private, seal
from sordino.engine.federation.worker import Lost
from sordino.errors import SordinoError
from sordino.privacy.generators import Source
from sordino.study.site_file import read_site

log = logging.getLogger("sordino.site")

FIRST = 3600.0  # seconds a site waits for its server to appear
AGAIN = 3.0  # seconds before a SuperNode that ended is started again
STRANGER = 60.0  # seconds after which a site that is turned away stops asking; a server may be slow to register keys


def join(
    path: Path,
    *,
    insecure: bool = False,
    wait: float = FIRST,
    stranger: float = STRANGER,
    source: Source | None = None,
) -> None:
    """Take part until somebody ends this process.

    Parameters
    ----------
    path: the site's SITE.toml.
    insecure: no TLS, no authentication: for trials on one machine.
    wait: seconds to wait for the server's first answer.
    stranger: seconds to go on asking a server that does not know this site's key.
    source: a deterministic generator, for tests only; it marks the site's ledger NOT PRIVATE (R9).
    """
    file = read_site(path)
    address = file.address(insecure)
    with file.open(source) as site:
        key = None if address.private is None else load_private(address.private)

        def answer(request: bytes) -> bytes:
            """The reply, signed. One that is sent again, as it was stored, gets a new signature."""
            reply = site.handle(request)
            return reply if key is None else seal(key, site.name, request, reply)

        log.info("%s: %d records, budget %s", site.name, site.declared.records, site.budget)
        meet(address, wait)
        node, started, refused = Node(site.folder, address), time.monotonic(), None
        try:
            while True:
                try:
                    node.worker.serve_one(answer, 0.2)
                except Lost as error:
                    log.warning("%s", error)
                    node.stop()
                if node.running:
                    continue
                said = node.said()  # the server turns away a key that it does not know
                turned_away = UNKNOWN in said or "Failed to activate SuperNode" in said
                refused = (refused or started) if turned_away else None
                if refused is not None and time.monotonic() - refused > stranger:
                    raise SordinoError(
                        f"the server at {address} does not know this site's key: give its operator the public key "
                        "that belongs to keys.private, under this site's name"
                    )
                if time.monotonic() - started > AGAIN:
                    log.warning("the SuperNode ended; starting it again")
                    node.stop()
                    meet(address, wait)
                    node, started = Node(site.folder, address), time.monotonic()
        finally:
            node.stop()
