"""``sordino join``: a site takes part. Records, ledger and secret randomness stay in this process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sordino.engine.federation.front import UNKNOWN
from sordino.engine.federation.node import LOG, Node
from sordino.engine.federation.reach import Line, meet
from sordino.engine.federation.signing import load_private, seal
from sordino.engine.federation.site import Site
from sordino.engine.federation.worker import Lost
from sordino.errors import SordinoError
from sordino.privacy.generators import Source
from sordino.study.heartbeat import Heart
from sordino.study.site_file import read_site

log = logging.getLogger("sordino.site")

FIRST = 3600.0  # seconds a site waits for its server to appear
LOOK = 1.0  # seconds between two looks at what the SuperNode says of its server
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
        line = Line(site.folder / LOG, address)
        with _watched(line, site.folder):
            _take_part(site, line, answer, wait, stranger)


@contextlib.contextmanager
def _watched(line: Line, folder: Path) -> Iterator[None]:
    """Signs of life in the site's folder, and words when the server is lost or back, also during a long turn."""
    over = threading.Event()

    def watch() -> None:
        noted: float | None = None
        while not over.wait(LOOK):
            line.look()
            heart.beat()
            if line.lost != noted:
                noted = line.lost
                with contextlib.suppress(SordinoError):  # a full disk ends no turn
                    heart.note(lost=noted)

    with Heart(folder) as heart:
        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _take_part(site: Site, line: Line, answer: Callable[[bytes], bytes], wait: float, stranger: float) -> None:
    """Carry messages between the server and ``answer``, for ever; a SuperNode that ends is started again."""
    address = line.address
    meet(line, wait)
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
                line.down(
                    "it does not let this site's key in" if turned_away else f"the SuperNode ended: {node.child.log}"
                )
                node.stop()
                meet(line, wait)
                node, started = Node(site.folder, address), time.monotonic()
    finally:
        node.stop()
