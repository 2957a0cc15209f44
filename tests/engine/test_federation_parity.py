"""A deployed study ends with the weights that its simulation ends with: the same function, one row instead of many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from federation_rig import Rig, five_clients, simulated, table
from federation_spy import check_wire

from sordino.methods import get, names

DEPLOYABLE = [name for name in names() if name != "optimum"]


@pytest.mark.parametrize("method", DEPLOYABLE)
def test_every_method_trains_to_the_simulations_weights(method: str, tmp_path: Path) -> None:
    clients = five_clients()
    training = {"steps": 3, "rate": 0.1, "lr": 0.2}
    if get(method).select.name != "everyone":
        training["select"] = 3
    study = table(method, clients, rounds=3, **training)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        for name in clients.names:  # and what was sent on the way had been charged, or declared
            replies = [reply for who, _, reply in rig.wires.heard if who == name]
            check_wire(replies, tmp_path / f"{name}.db", get(method).private)
    assert len(state.history) == 3
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
