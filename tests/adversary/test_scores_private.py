"""What `scores` lets out: replay on neighbours, an audit against its claim, hostile weights and records."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replay import neighbours, replay_simulation, replay_sites
from torch import Tensor, nn

import sordino as sd
from sordino.client.rows import Records
from sordino.client.score import placed
from sordino.engine.federation.judged import Task, outputs_alone, verdict
from sordino.methods.evaluation import Evaluation, judge
from sordino.privacy.auditing import audit
from sordino.privacy.cells import Cells
from sordino.privacy.gate import Gate, Permit
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.types import Budget

EVALUATION = {"every": 1, "share": 0.3}
DELTA = 1e-5


def three(adjacency: str) -> Any:
    digits = sd.data.load("digits", records=120).partition("iid", clients=3, seed=0)
    return digits.with_budgets([2.0, 4.0, 9.0], 1e-3, adjacency=adjacency)


@pytest.mark.parametrize(
    ("where", "adjacency", "kind"),
    [
        ("held", "zero-out", "huge"),
        ("held", "replace-one", "label"),
        ("training", "zero-out", "plain"),
        pytest.param("held", "zero-out", "nan", marks=pytest.mark.slow),
        pytest.param("held", "zero-out", "plain", marks=pytest.mark.slow),
        pytest.param("training", "replace-one", "label", marks=pytest.mark.slow),
    ],
)
def test_replay_on_neighbours_at_sites(tmp_path: Path, adjacency: str, kind: str, where: str):
    clients = three(adjacency)
    train, held = clients.held_out(0.3, 1)
    first, second, tape = neighbours(clients, kind, adjacency, held=held if where == "held" else train.train)
    study = {
        "study": {"rounds": 1, "seed": 1},
        "model": {"name": "logistic"},
        "method": {"name": "dp-fedavg"},
        "budgets": {"adjacency": adjacency},
        "training": {"steps": 2, "lr": 0.2, "rate": 0.9},
        "deployment": {"sites": list(clients.names), "shape": list(clients.shape), "classes": clients.classes},
        "evaluation": EVALUATION,
    }
    findings = replay_sites(tmp_path, first, second, tape, study)
    assert not findings, "\n".join(map(str, findings[:5]))
    scored = [turn for turn, what, _ in tape.made if what == "scores+correct"]
    assert len(scored) == 6, "three sites, two parts"
    if kind != "nan":
        assert tape.moved > 0


def test_replay_on_neighbours_in_a_simulation():
    clients = three("zero-out")
    first, second, tape = neighbours(clients, "plain", "zero-out", held=clients.held_out(0.3, 1)[1])
    settings = {"model": "logistic", "method": "dp-fedavg", "rounds": 2, "steps": 2, "seed": 1, "rate": 0.9}
    findings = replay_simulation(first, second, tape, evaluation=EVALUATION, **settings)
    assert not findings, "\n".join(map(str, findings[:5]))
    assert tape.moved == pytest.approx(1.0, abs=1e-5), "the record was counted, by one"


class Louder(Gate):
    """A gate with a bug: noise of one part is made smaller than what was charged."""

    private = True
    part, share = "correct", 0.0

    def count(self, permit: Permit, step: int, tables: Any, whose: Tensor | None = None) -> Any:
        true = {part: torch.bincount(cells[cells >= 0].reshape(-1), minlength=w) for part, (cells, w) in tables.items()}
        found = super().count(permit, step, tables, whose)
        one = found[self.part]
        one.value = true[self.part] + self.share * (one.value - true[self.part])
        return found


class Sound(Gate):
    """A gate that adds its noise; what pays for it is not asked."""

    private = True
    part, share = "", 1.0


CANARIES = 1500


def attack(gate: Any, claimed: float = 6.0) -> Any:
    """An audit of one evaluation of one held-out record, judged thousands of times afresh by a site's own code.

    The attacker knows the record and the model, hence the cell, and the noise; it weighs both parts by their precision,
    as a likelihood ratio does.
    """
    judging = judge(Evaluation(every=1, spend=1.0, bins=2), 1, 2, [1], [Budget(claimed, DELTA)], True)
    terms = judging.terms[0]
    task = Task("run", terms, judging.settings, 1, judging.cells)
    spread = {part: z * (gate.share if part == gate.part else 1.0) for part, z in terms.parts}
    model = nn.Linear(1, 2)
    understood = SimpleNamespace(judged=model)
    weights, record = torch.tensor([0.0, 3.0, 0.0, 0.0]), Records(torch.ones(1, 1), torch.ones(1, dtype=torch.int64))

    def run(included: Any) -> Any:
        found = np.zeros(len(included))
        for k, here in enumerate(included.tolist()):
            turn, maker = Turn("site", k + 1), gate(None, Keyed("audit"), "run")
            records = record if here else Records(record.x, record.y, torch.zeros(1, dtype=torch.bool))
            parts = verdict(understood, weights, records, task, Permit([turn], [terms]), maker)
            found[k] = sum(float(parts[part].value[-1]) / far**2 for part, far in spread.items())
        return found

    return audit(run, claimed, DELTA, canaries=CANARIES)


def test_an_audit_stays_below_the_claim_and_comes_near_it():
    found = attack(Sound)
    assert found.passed
    assert found.gaussian > 0.7 * found.claimed, "both parts together are what was charged"


@pytest.mark.parametrize(("part", "share"), [("scores", 0.05), ("correct", 0.5)])
def test_an_audit_catches_noise_that_is_missing(monkeypatch: Any, part: str, share: float):
    monkeypatch.setattr(Louder, "part", part)
    monkeypatch.setattr(Louder, "share", share)
    assert not attack(Louder).passed


WEIGHTS = ["random", "huge", "tiny", "nan", "infinite", "mixed"]


def hostile(kind: str, count: int) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(5))
    scales = {"random": 1.0, "huge": 1e38, "tiny": 1e-42, "nan": math.nan, "infinite": math.inf}
    if kind == "mixed":
        return drawn * torch.logspace(-40, 38, count)
    return drawn * scales[kind]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("cells", [Cells("classes", 10), Cells("binary", 20), Cells("regression", 20)], ids=str)
def test_a_record_moves_table_and_count_by_at_most_one_and_nobody_elses_cell(weights: str, cells: Cells):
    """Odd records among others, at every place and in samples of other sizes: cells of the others stay, bit for bit."""
    outputs = cells.classes or 1
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))
    count = sum(one.numel() for one in model.parameters())
    flat, chance = hostile(weights, count), torch.Generator().manual_seed(1)
    x = torch.randn(9, 6, generator=chance)
    y = torch.randint(0, max(2, outputs), (9,), generator=chance) if cells.classes else torch.randn(9, generator=chance)

    def tables(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out, fine = outputs_alone(model, flat, x)
        return {part: one[:, 0] for part, (one, _) in placed(out, y, fine, cells).items()}

    calm = tables(x, y)
    odd = [torch.full((6,), v) for v in (math.nan, math.inf, -1e38, 1e38, 0.0, 1e-45)]
    labels = [0, 9, 1000, -5] if cells.classes else [0.0, 1e30, math.nan, -math.inf]
    for record in odd:
        for label in labels:
            for place in (0, 4, 9):
                more_x = torch.cat([x[:place], record[None], x[place:]])
                more_y = torch.cat([y[:place], torch.tensor([label], dtype=y.dtype), y[place:]])
                found = tables(more_x, more_y)
                for part, cell in found.items():
                    others = torch.cat([cell[:place], cell[place + 1 :]])
                    assert torch.equal(others, calm[part])
                    width = cells.count if part == "scores" else 1
                    assert -1 <= int(cell[place]) < width  # one cell, or none
    for size in (1, 2, 5):
        assert torch.equal(tables(x[:size], y[:size])["scores"], calm["scores"][:size])


class Raises(nn.Module):
    """A model that some records make raise an error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise RuntimeError("no")
        return self.layer(x)


def test_a_record_on_which_the_model_raises_adds_nothing():
    x, y = torch.tensor([[1.0, 2.0], [-1.0, 0.0], [3.0, 1.0]]), torch.tensor([0, 1, 2])
    out, fine = outputs_alone(Raises(), torch.ones(9), x)
    assert fine.tolist() == [True, False, True]
    table = placed(out, y, fine, Cells("classes", 3))
    assert table["scores"][0][:, 0].tolist() == [0, -1, 6]
    assert table["correct"][0][:, 0].tolist() == [0, -1, -1]
