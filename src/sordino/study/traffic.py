"""What a deployed run sends, and how long it takes: bytes from the packets themselves, hours as an estimate.

Bytes are counted as ``engine.federation.wire`` packs them: in every exchange the whole model goes to a site, 4 bytes a
parameter, with whatever vectors the method broadcasts; an update of the same size comes back, 8 bytes a parameter where
it is masked. Headers (the study, the charter of shared noise) are packed to be measured. TLS and Flower's calls come on
top.

Hours are exchanges × ``PACE`` + computing + bytes/bandwidth, round by round for the slowest site.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sordino import models
from sordino.client import gradients
from sordino.client.gradients.losses import loss_by_name
from sordino.engine import rounds
from sordino.engine.federation import wire
from sordino.engine.federation.coordinator import check_deployable
from sordino.engine.federation.descriptor import charter_of
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.wire import Packet, pack
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.methods.plan import ClientPlan
from sordino.privacy.generators import Secret, Turn
from sordino.server.broadcast import Check, Frame
from sordino.server.facts import ServerState
from sordino.study.deploy import Served, prepare
from sordino.study.file import Study
from sordino.study.traffic_told import PACE

BANDWIDTH = 10.0
"""Megabits a second between a site and the server, each way, where nobody says."""

REPLY = 1024
"""Bytes of a reply without tensors, its signature included, at most."""

GRADED, DRAWN = 64, 20_000
"""Records whose gradients are computed, and numbers of noise that are drawn, to see how long that takes here."""

NAMED = "0" * 32  # as long as the name of a run
SIGNED = {"public": "0" * 64, "signature": "0" * 208}  # as long as a site's signed key of a run


def describe_traffic(study: Study, plan: Plan, bandwidth: float = BANDWIDTH) -> dict[str, Any] | None:
    """Bytes and hours of the study's deployed run, for the clients of its plan; None where it has no ``[deployment]``.

    ``refused`` says why a study that names sites cannot be deployed. ``up`` is from a site to the server.
    """
    if not study.deployment.sites:
        return None
    if not bandwidth > 0:
        raise BadInput(f"--bandwidth {bandwidth:g}: megabits a second, a positive number")
    try:
        check_deployable(plan.method)
        ready = prepare(study, NAMED)
    except BadInput as error:
        return {"refused": str(error)}
    sizes = _Sizes(ready, plan)
    each = [sizes.of(place, client) for place, client in enumerate(plan.clients)]
    per_round = [max(one[way] for one in each) / max(1, plan.schedule.rounds) for way in ("down", "up")]
    graded, drawn = _paces(ready, plan.sharing is not None)
    noisy = sizes.dimension * drawn if plan.method.private else 0.0
    slowest = max((c.terms.count * (c.terms.divisor * graded + noisy) for c in plan.clients), default=0.0)
    asked = len(rounds.own_questions(plan))
    judged = 0 if plan.judging is None else plan.judging.times
    exchanges = plan.schedule.rounds * (1 + asked) + judged + 3  # hello, offer, goodbye
    parts = {
        "polling": PACE * exchanges,
        "computing": slowest * plan.schedule.rounds,
        "sending": sum(per_round) * plan.schedule.rounds * 8e-6 / bandwidth,
    }
    return {
        "sites": each,
        "down": sum(row["down"] for row in each),
        "up": sum(row["up"] for row in each),
        "exchanges": exchanges,
        "bandwidth": bandwidth,
        "gradient_seconds": graded,
        "noise_seconds": drawn,
        "seconds": parts,
        "hours": sum(parts.values()) / 3600.0,
    }


class _Sizes:
    """How large the packets of a run are."""

    def __init__(self, ready: Served, plan: Plan) -> None:
        self.plan, self.dimension = plan, len(ready.start)
        self.brief = {**ready.brief, "rounds": plan.schedule.rounds}
        self.shown = len(ready.shown)
        self.more: dict[str, Any] = {}
        if plan.sharing is not None:
            charter = charter_of(plan, self.brief, {c.name: SIGNED for c in plan.clients})
            self.more = {"charter": charter.plain(), "participants": [c.name for c in plan.clients]}
        told = rounds.broadcast(plan, ServerState()).public
        self.public = {name: value for name, value in told.items() if not isinstance(value, Tensor)}
        self.broadcast = sum(
            _width(plan, name, check, self.dimension) for name, check in plan.method.broadcasts.items()
        )
        sends = plan.method.local.sends(told, (self.dimension,))
        beside = sum(one.batch == "step" for one in plan.method.ask)
        self.upload = (sum(sends.values()) + beside) * (4 if plan.sharing is None else 8)

    def of(self, place: int, client: ClientPlan) -> dict[str, Any]:
        """The bytes of one site in the whole run, each way, and of one of its turns."""
        asked, offer = sum(client.queries), offer_of(client)
        about = {"brief": self.brief, "offer": offer, "round": 9999, "copy": 0, "public": self.public, **self.more}
        turn = _head(wire.TURN, {**about, "count": 1, "since": 0}) + 4 * (self.dimension + self.broadcast)
        down = client.turns * turn + asked * (_head(wire.ASK, about) + 4 * (self.dimension + self.broadcast))
        down += _head(wire.HELLO, {"brief": self.brief}) + _head(
            wire.OFFER, {"brief": self.brief, "offer": offer, **self.more}
        )
        down += _head(wire.BYE, {"run": NAMED})
        up = client.turns * (self.upload + REPLY) + (asked + 3) * REPLY
        judging = self.plan.judging
        if judging is not None and judging.held[place]:
            down += judging.times * (_head(wire.SCORES, {"brief": self.brief}) + 4 * self.shown)
            up += judging.times * (8 * judging.cells.count + REPLY)
        return {
            "client": client.name,
            "turns": client.turns,
            "down": down,
            "up": up,
            "turn_down": turn,
            "turn_up": self.upload + REPLY,
        }


def _head(kind: str, facts: Mapping[str, Any]) -> int:
    """The bytes of a packet beside its tensors."""
    return len(pack(Packet(kind, facts, {"weights": torch.zeros(0)})))


def _width(plan: Plan, name: str, check: Check, dimension: int) -> int:
    """How many numbers a broadcast of this name has, by what its check lets through; single ones count as none."""
    options = {} if plan.method.aggregate.made is None else dict(plan.method.aggregate.made.options)
    along = options.get("directions")
    wide = along if isinstance(along, int) else 1
    frame = Frame((dimension,), (0.0, math.inf), 1, False, dict.fromkeys(plan.method.broadcasts))
    for shape in ((dimension,), (dimension, wide)):
        try:
            check(name, torch.zeros(shape), frame)
            return math.prod(shape)
        except BadInput:  # not of this shape: the check says so by refusing it
            continue
    return 0


def _paces(ready: Served, shared: bool) -> tuple[float, float]:
    """Seconds that one record's gradient takes on this machine, and one number of a site's exact noise; measured."""
    fixed, trained = models.split_fixed(ready.template)
    x = torch.zeros((GRADED, *ready.brief["shape"]), dtype=models.dtype_of(ready.brief.get("tokens")))
    x = x if fixed is None else fixed(x).detach()  # a site applies these once, not at every step
    y = torch.zeros(GRADED, dtype=torch.float32 if ready.brief["classes"] is None else torch.int64)
    engine, source = gradients.Alone(trained, loss_by_name(ready.loss)), Secret()
    grade, draw = engine.under(engine.flatten(trained)), source.discrete if shared else source.rounded
    return _timed(lambda: grade(x, y)) / GRADED, _timed(lambda: draw(Turn("", 0), "gradient", 0, DRAWN, 1e4)) / DRAWN


def _timed(work: Callable[[], object]) -> float:
    """Seconds that something takes: the fastest of a few times, for the first one also sets things up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
