"""Packets over Flower's public Message API: one message a packet, replies as they come, every wait bounded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sordino.engine.federation import wire
from sordino.engine.federation.declaration import readable
from sordino.engine.federation.keyring import Keyring
from sordino.engine.federation.signing import NotSigned, unseal
from sordino.engine.federation.wire import Packet, from_records, pack, to_records, unpack
from sordino.errors import BadInput

log = logging.getLogger("sordino.coordinator")

POLL = 0.2  # seconds between two looks for replies
LOOK = 2.0  # seconds between two looks at who is there

TRIES = 3
"""How often a packet is sent to a site that keeps going away: a turn that fails every time is charged every time."""

WHO = 5.0  # seconds a node without a registered name has to say who it is
AGAIN = 30.0  # seconds after which it is asked again

Place = tuple[int, str]
"""A site's node, and since when that node has been there."""


class GridTransport:
    """The transport over Flower, to sites behind a SuperLink.

    With a ``keyring`` a site is the node that has its key, whatever name Flower knows that node by, and a reply counts
    when that key signed it for the request. Without one (trials, ``--insecure``) a node is believed when it says who it
    is, and nothing is signed.
    """

    def __init__(self, grid: Any, keyring: Keyring | None) -> None:
        self.grid = grid
        self.keyring = keyring
        self._said: dict[int, str] = {}
        self._asked: dict[int, float] = {}

    def names(self) -> set[str]:
        """The sites that are there now."""
        return set(self._places())

    def _places(self) -> dict[str, Place]:
        nodes = sorted(self.grid.get_nodes(), key=lambda one: str(one.last_activated_at))
        if self.keyring is None:
            self._ask_names([one.node_id for one in nodes])
            named = [(self._said.get(one.node_id), one) for one in nodes]
        else:
            names = self.keyring.names()
            named = [(names.get(one.public_key), one) for one in nodes]
        return {name: (one.node_id, one.last_activated_at) for name, one in named if name is not None}

    def _ask_names(self, nodes: list[int]) -> None:
        """Ask the nodes that have not said who they are, and were not asked a moment ago."""
        now = time.monotonic()
        new = [one for one in nodes if one not in self._said and now - self._asked.get(one, -AGAIN) >= AGAIN]
        self._asked |= dict.fromkeys(new, now)

        def arrived(place: int, reply: bytes) -> None:
            with contextlib.suppress(BadInput):
                self._said[new[place]] = str(unpack(reply).facts.get("name", ""))

        places = {str(node): (node, "") for node in new}
        self._exchange([(name, pack(Packet(wire.WHO))) for name in places], WHO, arrived, lambda: places)

    def exchange(
        self, requests: Sequence[tuple[str, bytes]], seconds: float, arrived: Callable[[int, bytes], None]
    ) -> None:
        """Send packets and collect replies for at most ``seconds``.

        A site that comes back within that time gets its packet again, up to ``TRIES`` times: it is the same request, so
        a release that the site has stored is sent again and costs it nothing.
        """
        self._exchange(requests, seconds, arrived, self._places)

    def _exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        seconds: float,
        arrived: Callable[[int, bytes], None],
        places: Callable[[], dict[str, Place]],
    ) -> None:
        until, looked = time.monotonic() + seconds, -LOOK
        waiting = set(range(len(requests)))
        tries = [0] * len(requests)
        sent: dict[str, tuple[int, str]] = {}  # by message: which request it carries, and when its node had come
        wrong: dict[int, bytes] = {}  # by request: what to say of a reply that its site did not sign
        while waiting and time.monotonic() < until:
            if time.monotonic() - looked >= LOOK:
                where, looked = places(), time.monotonic()
                under_way = {i for i, since in sent.values() if where.get(requests[i][0], (0, since))[1] == since}
                due = [i for i in sorted(waiting - under_way) if requests[i][0] in where and tries[i] < TRIES]
                for i in due:  # one by one: a round's weights for many sites at once may be more than one request takes
                    node, since = where[requests[i][0]]
                    for message in self._push(node, requests[i][1], until - time.monotonic()):
                        sent[message] = (i, since)
                        tries[i] += 1
            for message, reply in self._pull([one for one, (i, _) in sent.items() if i in waiting]):
                i, _ = sent.pop(message)
                if reply is None or i not in waiting:
                    continue
                try:
                    opened = self._opened(*requests[i], reply)
                except NotSigned as error:  # whoever wrote it, the site itself is asked again
                    log.warning("%s: %s", requests[i][0], error)
                    wrong[i] = wire.refusal(str(error))
                    continue
                waiting.discard(i)
                wrong.pop(i, None)
                arrived(i, opened)
            waiting -= {i for i in waiting if tries[i] >= TRIES and all(i != one for one, _ in sent.values())}
            if waiting:
                time.sleep(POLL)
        for i, refusal in wrong.items():
            arrived(i, refusal)

    def _opened(self, name: str, request: bytes, reply: bytes) -> bytes:
        """The reply itself, once its signature was checked; the name belongs to that key from then on."""
        if self.keyring is None:
            return reply
        member = self.keyring.members().get(name)
        if member is None:
            raise NotSigned("its key was taken away")
        opened = unseal(member.public, name, request, reply)
        self.keyring.pin(name)
        return opened

    def _push(self, node: int, packet: bytes, seconds: float) -> list[str]:
        """Send a packet to a node; Flower's name of the message, where Flower took it."""
        from flwr.app import Message

        message = Message(to_records(packet), node, "train", ttl=max(1.0, seconds))
        return [one for one in self.grid.push_messages([message]) if one]

    def _pull(self, messages: list[str]) -> Iterator[tuple[str, bytes | None]]:
        """Replies by the message they answer; None where Flower could not deliver one."""
        for reply in self.grid.pull_messages(messages) if messages else ():
            found: bytes | None = b"no packet"
            if reply.has_error():  # unsigned, whoever made it: it says no more than that no answer came
                log.warning("Flower reports an error (code %s): %s", reply.error.code, readable(reply.error.reason))
                found = None
            else:
                with contextlib.suppress(BadInput):
                    found = from_records(reply.content)
            yield reply.metadata.reply_to_message_id, found
