"""Packets over Flower's public Message API: one message a packet, replies as they come, every wait bounded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from sordino.engine.federation import wire
from sordino.engine.federation.door import from_records, to_records
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput

log = logging.getLogger("sordino.coordinator")

POLL = 0.2
"""Seconds between two looks for replies."""

LOOK = 2.0
"""Seconds between two looks at who is there."""

TRIES = 3
"""How often a packet is sent to a site that keeps going away: a turn that fails every time is charged every time."""

WHO = 5.0
"""Seconds a node without a registered name has to say who it is; it is asked again after ``AGAIN``."""

AGAIN = 30.0


class GridTransport:
    """Sites behind a SuperLink.

    With node authentication a site's name is what its key was registered under, so nobody can speak for another.
    Without it (``trusting``) a node is believed when it says who it is.
    """

    def __init__(self, grid: Any, trusting: bool = False) -> None:
        self.grid = grid
        self.trusting = trusting
        self._said: dict[int, str] = {}
        self._asked: dict[int, float] = {}

    def names(self) -> set[str]:
        """The sites that are there now."""
        return set(self._addresses())

    def _addresses(self) -> dict[str, tuple[int, str]]:
        """By site: its node, and since when that node has been there."""
        nodes = list(self.grid.get_nodes())
        if self.trusting:
            now = time.monotonic()
            silent = {one for one, asked in self._asked.items() if now - asked < AGAIN}
            self._ask_names([n.node_id for n in nodes if n.node_id not in self._said and n.node_id not in silent])
            return {self._said[n.node_id]: (n.node_id, n.last_activated_at) for n in nodes if n.node_id in self._said}
        return {one.name: (one.node_id, one.last_activated_at) for one in nodes if one.name}

    def _ask_names(self, nodes: list[int]) -> None:
        if not nodes:
            return
        self._asked |= dict.fromkeys(nodes, time.monotonic())
        data = pack(Packet(wire.WHO))

        def arrived(place: int, reply: bytes) -> None:
            self._said[nodes[place]] = str(unpack(reply).facts.get("name", ""))

        where = {str(node): (node, "") for node in nodes}
        self._exchange([(str(node), data) for node in nodes], WHO, arrived, lambda: where)

    def exchange(
        self, requests: Sequence[tuple[str, bytes]], seconds: float, arrived: Callable[[int, bytes], None]
    ) -> None:
        """Send packets and collect replies for at most ``seconds``.

        A site that comes back within that time gets its packet again, up to ``TRIES`` times: it is the same request, so
        a release that the site has stored is sent again and costs it nothing.
        """
        self._exchange(requests, seconds, arrived, self._addresses)

    def _exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        seconds: float,
        arrived: Callable[[int, bytes], None],
        addresses: Callable[[], dict[str, tuple[int, str]]],
    ) -> None:
        until, looked = time.monotonic() + seconds, -LOOK
        waiting = set(range(len(requests)))
        tries = [0] * len(requests)
        sent: dict[str, tuple[int, str]] = {}  # by message: which request it carries, and when its node had come
        while waiting and time.monotonic() < until:
            if time.monotonic() - looked >= LOOK:
                where, looked = addresses(), time.monotonic()
                under_way = {i for i, since in sent.values() if where.get(requests[i][0], (0, since))[1] == since}
                due = [i for i in sorted(waiting - under_way) if requests[i][0] in where and tries[i] < TRIES]
                for i, message in zip(due, self._push(requests, due, where, until - time.monotonic())):
                    if message:
                        sent[message] = (i, where[requests[i][0]][1])
                        tries[i] += 1
            for message, reply in self._pull([one for one, (i, _) in sent.items() if i in waiting]):
                i, _ = sent.pop(message)
                if reply is not None and i in waiting:
                    waiting.discard(i)
                    arrived(i, reply)
            waiting -= {i for i in waiting if tries[i] >= TRIES and all(i != one for one, _ in sent.values())}
            if waiting:
                time.sleep(POLL)

    def _push(
        self,
        requests: Sequence[tuple[str, bytes]],
        due: list[int],
        where: dict[str, tuple[int, str]],
        seconds: float,
    ) -> list[str | None]:
        from flwr.app import Message

        ids: list[str | None] = []
        for i in due:  # one by one: a round's weights for many sites at once may be more than one request takes
            name, data = requests[i]
            message = Message(to_records(data), where[name][0], "train", ttl=max(1.0, seconds))
            ids += list(self.grid.push_messages([message])) or [None]
        return ids

    def _pull(self, messages: list[str]) -> list[tuple[str, bytes | None]]:
        """Replies by the message they answer; None where Flower could not deliver one."""
        if not messages:
            return []
        found: list[tuple[str, bytes | None]] = []
        for reply in self.grid.pull_messages(messages):
            asked = reply.metadata.reply_to_message_id
            try:
                found.append((asked, _failed(reply.error) if reply.has_error() else from_records(reply.content)))
            except (KeyError, TypeError, ValueError, BadInput):
                found.append((asked, wire.refusal("the reply was no packet of sordino")))
        return found


def _failed(error: Any) -> bytes | None:
    """An error of Flower's: a refusal where the site's guard spoke, else nothing, for the site's process was away."""
    reason = str(error.reason or "")
    log.warning("Flower reports an error (code %s): %s", error.code, reason)
    return wire.refusal(reason) if "refused:" in reason else None
