"""An audit of shared noise by a server with colluders, who take away all that they know of the sum.

The target's canaries are coordinates: record j has a gradient along coordinate j alone, longer than the clip. The real
plan, ledger, gate and sum release them. The adversary knows everybody's gradients but the target's, and the messages of
its colluders; what is left of the sum is its score. Whole batches are taken, so that the bound is sharp.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino.methods import Population, Training, get, make_plan
from sordino.privacy.auditing import audit
from sordino.privacy.gate import Gate, Piece, Terms
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.ledger import Ledger
from sordino.privacy.trust import Trust
from sordino.privacy.types import Budget
from sordino.server.summed import Summed
from sordino.study.session import open_accounts

DELTA, CANARIES, CLIP, LENGTH = 1e-5, 60_000, 0.7, 3.0

CASES = {
    "equal": ([3.0] * 4, [100] * 4, 1, 0),
    "nobody colludes": ([2.0] * 5, [100] * 5, 0, 0),
    "unequal": ([1.5, 6.0, 8.0, 2.0, 3.0], [40, 400, 120, 60, 300], 2, 0),
    "with room for a lost site": ([1.5, 6.0, 8.0, 2.0, 3.0], [40, 400, 120, 60, 300], 1, 1),
    "all others": ([1.5, 6.0, 4.0], [40, 400, 120], 2, 0),
    "two": ([2.0, 5.0], [90, 50], 0, 0),
}


class Federation:
    """A plan of ``rounds`` rounds over whole batches, its ledger, and what its sites send when they are asked."""

    def __init__(self, folder, epsilons, sizes, colluders, dropouts, rounds=2):
        budgets = tuple(Budget(e, DELTA) for e in epsilons)
        names = tuple(f"site-{i}" for i in range(len(sizes)))
        training = Training(rounds=rounds, clip=CLIP, sampling="full", lr=0.1)
        people = Population(names, np.array(sizes), budgets)
        trust = Trust("shared", colluders, dropouts)
        self.plan = make_plan(get("dp-fedavg"), training, people, CANARIES, 0, trust=trust)
        self.weights = np.array(self.plan.sharing.releases[0].weights)
        self.colluders, self.dropouts, self.rounds = colluders, dropouts, rounds
        self.folder = folder

    def messages(self, target, included, key):
        """Every round's payloads before masking: what the gate lets out of each site, with the real ledger."""
        coin = torch.from_numpy(included)
        sites = range(len(self.weights))

        def pull(factors):
            rows = torch.zeros(len(sites), CANARIES)
            rows[target] = factors * LENGTH
            return rows

        piece = Piece(torch.full((CANARIES,), LENGTH), coin.float(), pull, lambda bound: bound[target].expand(CANARIES))
        with Ledger(self.folder / f"{key}.db") as book:
            open_accounts(book, self.plan, "run")
            gate = Gate(book, Keyed(key), "run")
            terms = [c.terms for c in self.plan.clients]
            bounds = {"gradient": torch.full((len(sites),), CLIP)}
            sent = []
            for number in range(1, self.rounds + 1):
                permit = gate.grant([Turn(c.name, number) for c in self.plan.clients], terms, "ab" * 32)
                sent.append(gate.release(permit, 0, [{"gradient": piece}], bounds, CANARIES)["gradient"].value.double())
            name = self.plan.clients[target].name
            self.spent, self.own = book.epsilon()[name], book.own_epsilon()[name]
        return sent

    def seen(self, target, included, key="audit", colluders=None, lost=0, louder=1.0, alone=False):
        """Scores: the sum of those who are there less what colluders sent; or the target's message by itself."""
        counted = self.weights
        others = [i for i in range(len(self.weights)) if i != target]
        known = others[: self.colluders if colluders is None else colluders]
        there = sorted([target, *others[: len(others) - lost]])
        score = np.zeros(CANARIES)
        for sent in self.messages(target, included, key):
            clean = CLIP * included / self.plan.clients[target].terms.divisor
            score += (louder - 1) * counted[target] * clean  # a weight that the noise does not know of
            if alone:
                score += counted[target] * sent[target].numpy()
                continue
            total = Summed(SimpleNamespace(clients=there), counted[there], CANARIES)
            total.add(np.arange(len(there)), sent[there])
            score += total.combined(counted[there]).numpy() - sum(counted[k] * sent[k].numpy() for k in known)
        return score


def verdict(federation, target, claim="spent", **attack):
    """The audit of one target against what its ledger says it spent, or would have spent by its own share alone."""
    coins = np.zeros(CANARIES, bool)
    federation.seen(target, coins, "claims")  # a first run tells what the ledger claims
    claimed = federation.spent if claim == "spent" else federation.own
    return audit(lambda included: federation.seen(target, included, **attack), claimed, DELTA, canaries=CANARIES)


@pytest.mark.parametrize("case", CASES)
def test_what_colluders_can_subtract_stays_below_the_claim_and_comes_near_it(tmp_path, case):
    federation = Federation(tmp_path, *CASES[case])
    for target in {0, len(federation.weights) - 1}:
        found = verdict(federation, target, lost=federation.dropouts)
        assert found.passed
        assert found.claimed <= CASES[case][0][target]
        assert found.gaussian > 0.8 * found.claimed


def test_fewer_colluders_learn_less(tmp_path):
    federation = Federation(tmp_path, [1.0] * 5, [100] * 5, 3, 0)
    found = [verdict(federation, 0, colluders=c).gaussian for c in (0, 1, 2, 3)]
    assert found == sorted(found)
    assert found[0] < 0.75 * found[3]


def test_one_colluder_more_than_declared_is_caught(tmp_path):
    federation = Federation(tmp_path, [1.5, 6.0, 4.0, 2.0], [40, 400, 120, 60], 2, 0)
    assert verdict(federation, 0, colluders=2).passed
    assert not verdict(federation, 0, colluders=3).passed


def test_one_lost_site_more_than_declared_is_caught(tmp_path):
    federation = Federation(tmp_path, [1.0] * 4, [100] * 4, 1, 1)
    assert verdict(federation, 0, lost=1).passed
    assert not verdict(federation, 0, lost=2).passed


def test_own_noise_scaled_for_no_colluders_is_caught(tmp_path, monkeypatch):
    honest = Terms.own_noise
    federation = Federation(tmp_path, [1.0] * 5, [100] * 5, 2, 0)
    assert verdict(federation, 0).passed
    for_nobody = np.sqrt((5 - 2) / 5)
    monkeypatch.setattr(Terms, "own_noise", lambda self, part: honest(self, part) * for_nobody)
    assert not verdict(federation, 0).passed
    assert verdict(federation, 0, colluders=0).passed


def test_noise_forgotten_at_one_site_is_caught(tmp_path, monkeypatch):
    kept = Keyed.normal

    def forgetful(self, turns, name, step, total, spread=None):
        before = total[2].clone()
        kept(self, turns, name, step, total, spread)
        total[2] = before
        return total

    federation = Federation(tmp_path, [1.0] * 3, [100] * 3, 1, 0)
    assert verdict(federation, 0).passed
    monkeypatch.setattr(Keyed, "normal", forgetful)
    assert not verdict(federation, 0).passed


def test_weights_twice_as_large_as_planned_are_caught(tmp_path):
    """A site that multiplies what it has, and not the noise that it adds, by twice the weight of its plan."""
    federation = Federation(tmp_path, [1.5, 6.0, 4.0, 2.0], [40, 400, 120, 60], 1, 0)
    assert verdict(federation, 0).passed
    assert not verdict(federation, 0, louder=2.0).passed


@pytest.mark.parametrize("case", ["equal", "unequal"])
def test_a_message_without_its_masks_is_worth_the_own_share_alone(tmp_path, case):
    federation = Federation(tmp_path, *CASES[case])
    assert not verdict(federation, 0, alone=True).passed
    own = verdict(federation, 0, claim="own", alone=True)
    assert own.passed
    assert own.gaussian > 0.8 * own.claimed


def test_the_same_noise_masked_twice_is_caught(tmp_path):
    """Two sums of one payload, with and without the last site, differ by that site's own message."""
    federation = Federation(tmp_path, [1.0] * 6, [100] * 6, 1, 0)
    target = 5

    def twice(included):
        weights, score = federation.weights, np.zeros(CANARIES)
        for sent in federation.messages(target, included, "twice"):
            score += (weights[:, None] * sent.numpy()).sum(0) - (weights[:5, None] * sent[:5].numpy()).sum(0)
        return score

    federation.seen(target, np.zeros(CANARIES, bool), "claims")
    assert not audit(twice, federation.spent, DELTA, canaries=CANARIES).passed
    assert audit(twice, federation.own, DELTA, canaries=CANARIES).passed
