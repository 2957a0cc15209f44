"""Three real SuperNodes over TLS try two settings: one SuperLink, one block in every ledger, the sum within budget."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from federation_network import EPSILONS, NAMES, Network
from federation_rig import table
from federation_spy import check_wire

import sordino as sd
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study.conduct import set_up
from sordino.study.file import make_study
from sordino.study.folder import TUNED
from sordino.study.serve import run_on


@pytest.mark.slow
def test_three_sites_try_two_settings_under_one_budget(tmp_path: Path):
    laid, shown = Network.lay(tmp_path, dict(zip(NAMES, EPSILONS)), 900, 0.4), []
    study = table("dp-fedavg", laid.clients, rounds=3, rate=0.3) | {"evaluation": {}}
    study |= {"tune": {"training.lr": [0.01, 1.0]}}
    with laid as network:
        folder = tmp_path / "search"
        set_up(folder, make_study(study), resume=False, keys=network.keys.folder, kind=TUNED)
        result = run_on(network.link, folder, shown.append)
    assert [one["round"] for one in shown] == [1, 2, 3, 1, 2, 3]
    tried = result["tuned"]["tried"]
    values = [one["estimate"]["value"] for one in tried]
    assert result["tuned"]["winner"] == values.index(max(values))
    assert sd.load(folder).result["checksum"] == result["checksum"]
    for one, budget in zip(result["privacy"], EPSILONS):
        name = one["client"]
        assert check_wire(network.sent(name), tmp_path / f"{name}.db") == 2 * 3 + 2
        with Ledger(tmp_path / f"{name}.db", readonly=True) as book:
            spent = book.epsilon([name, name + HELD])
            assert "declared in advance" in book.composition(name)
        assert one["told_by"] == "site"
        assert (one["training_epsilon"], one["held_epsilon"]) == pytest.approx((spent[name], spent[name + HELD]))
        assert 0.99 * budget < one["spent_epsilon"] <= budget
