"""A rule of one's own never sees an upload that was not screened, whichever way it enters a method or a run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_rules import facts_of, round_of

import sordino as sd
from sordino.client.local import Local, sgd
from sordino.server import defend, fair
from sordino.server.facts import Outcome
from sordino.server.rule import Aggregate

ROWS, WIDTH = 8, 600
BAD = {"nan": math.nan, "infinite": math.inf, "huge": 1e30, "huge and negative": -1e30}


def own(seen):
    """A combination that insists on what it was promised, and notes what it saw."""

    def combine(updates, facts, memory):
        assert len(updates) == len(facts.clients) == len(facts.norms)
        longest = defend.limits_of(np.asarray(facts.norms), facts, updates.shape[1])
        for rows in (updates, *facts.uploads.values()):
            assert len(rows) == len(facts.clients)
            assert torch.isfinite(rows).all()
            if rows.shape == updates.shape:
                assert (rows.norm(dim=1).double().numpy() <= longest * (1 + 1e-5)).all()
        assert updates.norm(dim=1).double().numpy() == pytest.approx(facts.norms, rel=1e-5)
        seen.append(facts)
        return Outcome(updates.mean(0), np.full(len(updates), 1 / len(updates)), {"rounds": len(seen)})

    return combine


WAYS = {
    "a value": lambda combine: Aggregate("own", combine),
    "that also refuses small ones": lambda combine: Aggregate("own", combine, refuse_small=True),
    "a function": lambda combine: sd.Method("own", aggregate=combine).aggregate,
    "inside scaffold": lambda combine: fair.scaffold(combine=Aggregate("own", combine)),
    "inside feddyn": lambda combine: fair.feddyn(combine=Aggregate("own", combine)),
    "changed by replace": lambda combine: replace(fair.q_ffl(), combine=combine),
}


@pytest.fixture
def honest():
    facts = facts_of(range(ROWS), records=3000)
    return round_of(facts, dimension=WIDTH), facts


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", WAYS)
def test_updates(way, bad, honest):
    updates, facts = honest
    updates[2], updates[5, 7] = BAD[bad], BAD[bad]
    seen = []
    outcome = WAYS[way](own(seen))(updates, facts, {})
    finite = math.isfinite(BAD[bad])
    assert seen[0].clients.tolist() == (list(range(ROWS)) if finite else [0, 1, 3, 4, 6, 7])
    assert torch.isfinite(outcome.delta).all()
    assert float(outcome.delta.norm()) < 100
    assert sum(("bounded" if finite else "refused") in line for line in outcome.diagnostics["log"]) == 2
    assert (outcome.weights[[2, 5]] == 0).all() == (not finite)
    assert len(outcome.weights) == ROWS


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", ["a value", "a function"])
def test_other_uploads(way, bad, honest):
    """What is as wide as an update is bounded like one; what is not has to be finite. Good updates go with bad ones."""
    updates, facts = honest
    iterate, short = updates / 2, torch.ones(ROWS, 3)
    iterate[1] = BAD[bad]
    if not math.isfinite(BAD[bad]):
        short[6, 2] = BAD[bad]
    seen = []
    outcome = WAYS[way](own(seen))(updates, replace(facts, uploads={"iterate": iterate, "short": short}), {})
    refused = [] if math.isfinite(BAD[bad]) else [1, 6]
    assert seen[0].clients.tolist() == [i for i in range(ROWS) if i not in refused]
    assert set(seen[0].uploads) == {"iterate", "short"}
    assert np.flatnonzero(outcome.weights == 0).tolist() == refused
    assert [line.split()[3] for line in outcome.diagnostics["log"]] == [str(i) for i in refused or [1]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_nothing_is_left_the_rule_is_not_asked(bad, honest):
    updates, facts = honest
    seen = []
    outcome = Aggregate("own", own(seen))(torch.full_like(updates, bad), facts, {"kept": 1})
    assert seen == []
    assert not outcome.delta.any()
    assert outcome.memory == {"kept": 1}


def test_without_noise_what_is_huge_is_still_bounded(honest):
    """Nothing was clipped, so that only what is typical bounds a row: LOOSE times it."""
    updates, facts = honest
    updates[3] = 1e20
    silent = replace(facts, noises=np.zeros(ROWS), variances=np.zeros(ROWS))
    lengths = []
    rule = Aggregate("own", lambda rows, facts, memory: lengths.append(rows.norm(dim=1)) or Outcome(rows[0], None))
    rule(updates, silent, {})
    assert torch.isfinite(lengths[0]).all()
    assert lengths[0][3] < 10 * defend.LOOSE * lengths[0].median()


# In a run


def poisoned(bad) -> Local:
    """Descent where every third turn uploads something bad, and half of it under another name."""
    plain, turns = sgd(), []

    def finish(params, start, state, public):
        upload, state = plain.finish(params, start, state, public)
        for row in upload["update"]:
            turns.append(1)
            if len(turns) % 3 == 0:
                row[:3] = bad
        beside = upload["update"].clone() / 2
        return {**upload, "beside": beside}, state

    def sends(public, lengths):
        return dict.fromkeys(("update", "beside"), sum(lengths))

    return Local("poisoned", plain.update, finish, sends=sends)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("value", [True, False], ids=["a value", "a function"])
def test_in_a_run(digits, value, bad):
    seen = []
    rule = Aggregate("own", own(seen)) if value else own(seen)
    method = sd.Method("own", local=poisoned(BAD[bad]), aggregate=rule)
    done = sd.train(digits, "logistic", method, rounds=2, rate=0.2, lr=0.3)
    assert len(seen) == 2
    assert all(set(facts.uploads) == {"beside"} for facts in seen)
    assert torch.isfinite(done.weights).all()
    logged = [line for one in done.metrics for line in one["diagnostics"]["log"]]
    assert len(logged) >= 4
