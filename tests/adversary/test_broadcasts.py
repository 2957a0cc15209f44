"""What a server broadcasts steers what is computed from records: names, types and ranges are declared and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation_rig import Rig, five_clients, table

from sordino import methods
from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput
from sordino.methods.registry import names
from sordino.parts import Aggregate
from sordino.server import broadcast

LENGTHS = (640, 10)
DIMENSION = sum(LENGTHS)


POLICY = Policy(steps=20)
KNOWN = {name: check for method in names() for name, check in methods.get(method).broadcasts.items()}
"""What the parts of all built-in methods broadcast, with their checks."""


def check(public: dict[str, Any], private: bool = True, known: dict[str, broadcast.Check] = KNOWN) -> None:
    broadcast.check_broadcast(known, broadcast.Frame(LENGTHS, POLICY.clip, POLICY.steps, private, public))


def basis(scale: float = 1.0) -> torch.Tensor:
    found = torch.zeros(DIMENSION, 2)
    found[0, 0], found[1, 1], found[640, 0], found[641, 1] = scale, scale, scale, scale
    return found


def each(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


GOOD: list[dict[str, Any]] = [
    {"mean_loss": -0.5, "loss_bound": 2.5},
    {"radius": 0.5},
    {"radius": each(0.5)},
    {"steps": 20},
    {"control": torch.zeros(DIMENSION)},
    {"basis": basis(), "basis_sizes": list(LENGTHS), "private": each(1.0)},
    {"private": each(0.0)},
]

BAD: list[tuple[str, Any]] = [
    ("mean_loss", -1e38),
    ("mean_loss", float("inf")),
    ("mean_loss", torch.full((DIMENSION,), 1.0)),
    ("mean_loss", [1.0]),
    ("mean_loss", True),
    ("loss_bound", 0.0),
    ("loss_bound", 1e30),
    ("lr", 0.0),
    ("lr", -1.0),
    ("lr", float("inf")),
    ("lr", torch.full((DIMENSION,), 0.1)),
    ("clip", 0.0),
    ("clip", float("inf")),
    ("radius", 1e-9),
    ("radius", each(float("nan"))),
    ("radius", each(1e9)),
    ("steps", 21),
    ("steps", 2.5),
    ("control", torch.full((DIMENSION,), float("nan"))),
    ("control", torch.full((DIMENSION,), 1e30)),
    ("control", torch.zeros(DIMENSION, dtype=torch.float64)),
    ("control", torch.zeros(3)),
    ("control", 1.0),
    ("basis", basis(1e6)),
    ("basis", torch.full((DIMENSION, 1), 0.9)),
    ("basis", torch.full((DIMENSION, 2), float("inf"))),
    ("basis", torch.zeros(3, 1)),
    ("basis_sizes", [650]),
    ("basis_sizes", [651, -1]),
    ("basis_sizes", [640.0, 10.0]),
    ("private", each(0.5)),
    ("private", each(-1.0)),
    ("loss", 3.0),
    ("gradient", torch.zeros(DIMENSION)),
]


@pytest.mark.parametrize("told", GOOD, ids=str)
def test_what_methods_broadcast_is_allowed(told: dict[str, Any]) -> None:
    check({"lr": 0.1, "clip": 1.0} | told)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: str(x)[:20])
def test_what_no_method_broadcasts_is_refused(name: str, value: Any) -> None:
    usual = {"lr": 0.1, "clip": 1.0, "basis": basis(), "basis_sizes": list(LENGTHS)}
    with pytest.raises(BadInput, match=name):
        check(usual | {name: value})


def test_halves_and_missing_settings_are_refused_before_they_fail_later() -> None:
    for told in ({"lr": 0.1}, {"clip": 1.0}):
        with pytest.raises(BadInput, match="is missing"):
            check(told)
    for half in ({"basis": basis()}, {"basis_sizes": list(LENGTHS)}):
        with pytest.raises(BadInput, match="come together"):
            check({"lr": 0.1, "clip": 1.0} | half)


def test_without_noise_there_is_no_clip() -> None:
    check({"lr": 0.1, "clip": float("inf")}, private=False)


def test_a_method_of_your_own_declares_what_it_broadcasts() -> None:
    warm = Aggregate("warm", lambda *given: given, broadcasts={"temperature": broadcast.number(0.1, 10.0)})
    known = methods.Method("warm", aggregate=warm).broadcasts
    check({"lr": 0.1, "clip": 1.0, "temperature": 2.0}, known=known)
    with pytest.raises(BadInput, match=r"between 0\.1 and 10"):
        check({"lr": 0.1, "clip": 1.0, "temperature": 20.0}, known=known)


def test_what_another_method_broadcasts_is_unknown_here() -> None:
    for method, told in (("dp-fedavg", {"mean_loss": 1.0}), ("fedfdp", {"radius": 0.5}), ("adaptdp", {"steps": 2})):
        with pytest.raises(BadInput, match="unknown here"):
            check({"lr": 0.1, "clip": 1.0} | told, known=methods.get(method).broadcasts)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "fast"])
def test_a_part_cannot_loosen_the_checks_of_what_every_request_has(value: Any) -> None:
    loose = {name: lambda name, value, frame: None for name in ("lr", "clip")}
    for name in loose:
        with pytest.raises(BadInput, match=name):
            check({"lr": 0.1, "clip": 1.0, name: value}, known=loose)


def test_a_bad_broadcast_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    """FedFDP with ``mean_loss = -1e38`` made factors of 1e36."""
    clients = five_clients((4.0, 8.0))
    with Rig(tmp_path, clients, table("fedfdp", clients, steps=1, rate=0.2, lr=0.2)) as rig:
        client = rig.coordinator().course.plan.clients[0]
        site = rig.wires.sites[client.name]
        facts = {"brief": rig.ready.brief, "offer": offer_of(client), "round": 1, "copy": 0, "since": 0}
        facts |= {"count": client.terms.count}

        def answer(tensors: dict[str, torch.Tensor] | None = None, **told: Any) -> Packet:
            public = {"lr": 0.2, "clip": 1.0, "loss_bound": 2.5, **told}
            sent = {"weights": rig.ready.start, **(tensors or {})}
            return unpack(site.handle(pack(Packet(wire.TURN, {**facts, "public": public}, sent))))

        for reply in (
            answer(mean_loss=-1e38),
            answer({"public/mean_loss": torch.tensor([[-1e38]])}),
            answer(secret=1.0),
            answer({"state": torch.zeros(DIMENSION)}),
            answer({"public/lr": torch.tensor([[0.2]])}),
        ):
            assert reply.kind == wire.REFUSED, reply
        assert site.ledger.spent(site.account) == []
        assert answer(mean_loss=2.0).kind == wire.UPLOAD
