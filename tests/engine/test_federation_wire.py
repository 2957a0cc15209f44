"""What a captured run shows: releases that were charged, facts that were declared, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federation_rig import Rig, five_clients, records_of, table
from federation_spy import check_wire

from sordino import models
from sordino.client import gradients
from sordino.engine.federation import wire
from sordino.engine.federation.wire import unpack
from sordino.methods import get

KINDS = ["dp-fedavg", "power-of-choice", "pfa-plus", "adaptdp", "quantile-clipping", "fedfdp", "dp-scaffold"]
"""Methods that send different kinds of things; that every method sends charged releases only is tested with parity."""


@pytest.mark.parametrize("method", KINDS)
def test_a_captured_run_holds_charged_releases_and_declared_facts_only(method: str, tmp_path: Path):
    clients = five_clients((4.0, 8.0, 16.0))
    training = {"steps": 2, "rate": 0.2, "lr": 0.2}
    if get(method).select.name != "everyone":
        training["select"] = 2
    with Rig(tmp_path, clients, table(method, clients, **training)) as rig:
        rig.train()
        heard = rig.wires.heard
        for place, name in enumerate(clients.names):
            replies = [reply for who, _, reply in heard if who == name]
            asked = [unpack(request) for who, request, _ in heard if who == name]
            asked = [one for one in asked if one.kind in (wire.ASK, wire.TURN)]
            assert check_wire(replies, tmp_path / f"{name}.db") == len(asked)
            for secret in _secrets(rig, place, [one.tensors["weights"] for one in asked]):
                assert not any(secret in reply for reply in replies)


def _secrets(rig: Rig, place: int, weights: list[torch.Tensor]) -> list[bytes]:
    """Bytes that no reply may hold: label counts, exact losses and exact gradients at all weights that were sent."""
    records = records_of(rig.clients, place)
    counts = np.bincount(records.y.numpy(), minlength=10)
    found = [counts.astype(kind).tobytes() for kind in (np.int32, np.int64, np.float32, np.float64)]
    engine = gradients.build(models.build("logistic", rig.clients.shape, 10, 3), "cross-entropy")
    for one in weights:
        graded = engine(one[None], records.x[None], records.y[None], None)
        total = graded.pull(torch.ones_like(graded.losses))[0]
        for exact in (total, total / len(records.y)):
            found.append(exact[100:104].numpy().tobytes())
        found.append(np.float64(graded.losses.double().mean()).tobytes())
        found.append(str(float(graded.losses.mean())).encode())
    return found


def test_the_spy_sees_what_was_not_charged(tmp_path: Path):
    """A reply with a tensor that no ledger entry covers, or with a fact nobody declared, is caught."""
    clients = five_clients((4.0, 8.0, 16.0))
    with Rig(tmp_path, clients, table("dp-fedavg", clients, steps=1, rate=0.2)) as rig:
        rig.train()
    book = tmp_path / "client-00.db"
    raw = wire.pack(wire.Packet(wire.UPLOAD, {"round": 1, "copy": 0}, {"update": torch.zeros(1, 650)}))
    with pytest.raises(KeyError):
        check_wire([raw], book)
    with pytest.raises(AssertionError):
        check_wire([wire.pack(wire.Packet(wire.ACCEPTED, {"payable": 2, "accuracy": 0.97}))], book)
