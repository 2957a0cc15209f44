"""A selection rule of one's own that chooses by released answers: it decides who trains, never how often."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.errors import BadInput, SordinoError
from sordino.methods import get
from sordino.methods.selection import Candidates, Selection
from sordino.server import select
from sordino.study.many import train_together
from sordino.study.run import prepare

ROUNDS, CLIENTS = 6, 5
SETTINGS = {"rounds": ROUNDS, "rate": 0.3, "lr": 0.3, "select": 2}
CAPS = np.array([1, 2, 3, 0, 6])


@pytest.fixture(scope="module")
def clients():
    source = sd.data.load("digits").subset(400, 0).partition("iid", clients=CLIENTS, seed=0)
    return source.with_budgets([1.0, 2.0, 4.0, 8.0, 16.0], delta=1e-4)


def capped(setting) -> select.Schedule:
    """Everyone is a candidate in every round, and may train as often as ``CAPS`` says."""
    drawn = select.everyone(len(setting.population.names), setting.training.rounds)
    return replace(drawn, rule="own", select=setting.select, caps=CAPS)


def own(choose, schedule=capped) -> sd.Method:
    rule = Selection("own", schedule, choose=choose, needs=("loss",))
    return replace(get("power-of-choice"), name="own", select=rule)


def turns(run, names) -> np.ndarray:
    return np.array([sum(name in one["participants"] for one in run.metrics) for name in names])


def greedy(asked: Candidates) -> np.ndarray:
    """Everyone, always, whatever the caps say."""
    return np.arange(len(asked.clients))


def test_it_sees_the_candidates_their_answers_and_how_often_they_trained(clients):
    seen = []

    def loudest(asked: Candidates) -> np.ndarray:
        seen.append(replace(asked, taken=asked.taken.copy()))
        return np.argsort(-asked.answers["loss"])[:2]

    run = sd.train(clients, "logistic", own(loudest), **SETTINGS)
    assert [one.round for one in seen] == list(range(1, ROUNDS + 1))
    taken = np.zeros(CLIENTS, dtype=int)
    for asked, one in zip(seen, run.metrics):
        assert asked.clients.tolist() == list(range(CLIENTS))
        assert asked.answers["loss"].shape == (CLIENTS,)
        assert np.isfinite(asked.answers["loss"]).all()
        assert asked.taken.tolist() == taken.tolist()
        assert asked.schedule.caps.tolist() == CAPS.tolist()
        wanted = [i for i in np.argsort(-asked.answers["loss"])[:2] if taken[i] < CAPS[i]]
        assert one["participants"] == [clients.names[i] for i in wanted]
        taken[wanted] += 1


def test_caps_hold_even_if_it_ignores_them(clients):
    """Noise was calibrated for so many turns: a rule that wants more gets fewer rows, and nobody pays beyond."""
    run = sd.train(clients, "logistic", own(greedy), **SETTINGS)
    assert turns(run, clients.names).tolist() == CAPS.tolist()
    assert [len(one["participants"]) for one in run.metrics] == [4, 3, 2, 1, 1, 1]
    for one, cap in zip(run.privacy, CAPS):
        counts = {release["what"]: release["count"] for release in one["releases"]}
        assert counts.get("gradient", 0) == cap
        assert counts["loss"] == ROUNDS
        assert one["spent_epsilon"] <= one["epsilon"]


@pytest.mark.parametrize("shown", ["taken", "caps", "clients"])
def test_caps_hold_even_if_it_writes_over_what_it_is_shown(clients, shown):
    def forging(asked: Candidates) -> np.ndarray:
        array = asked.schedule.caps if shown == "caps" else getattr(asked, shown)
        with contextlib.suppress(ValueError):  # an array that cannot be written to is as good
            array[:] = {"taken": 0, "caps": 99, "clients": 4}[shown]
        return np.arange(len(asked.clients))

    def schedule(setting) -> select.Schedule:
        return replace(capped(setting), caps=CAPS.copy())

    with contextlib.suppress(SordinoError):  # where the ledger's own count is what stops it
        run = sd.train(clients, "logistic", own(forging, schedule), **SETTINGS)
        assert (turns(run, clients.names) <= CAPS).all()


def test_the_same_in_a_stack(clients):
    methods = [own(greedy), own(lambda asked: np.array([4, 0]))]
    ready = [prepare(clients, "logistic", method, 0, None, SETTINGS) for method in methods]
    for run, method in zip(train_together(ready, "cpu"), methods):
        alone = sd.train(clients, "logistic", method, **SETTINGS)
        assert (turns(run, clients.names) <= CAPS).all()
        assert [one["participants"] for one in run.metrics] == [one["participants"] for one in alone.metrics]
        torch.testing.assert_close(run.weights, alone.weights, atol=1e-5, rtol=0)


def test_caps_hold_across_an_interruption(clients, tmp_path):
    class Interrupted(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        sd.train(clients, "logistic", own(greedy), out=tmp_path, callbacks=[stop], **SETTINGS)
    run = sd.train(clients, "logistic", own(greedy), out=tmp_path, resume=True, **SETTINGS)
    assert turns(run, clients.names).tolist() == CAPS.tolist()


def test_nobody_has_to_train(clients):
    run = sd.train(clients, "logistic", own(lambda asked: np.array([], dtype=int)), **SETTINGS)
    assert [one["participants"] for one in run.metrics] == [[]] * ROUNDS


BAD = {
    "beyond the candidates": np.array([0, CLIENTS]),
    "counted from the end": np.array([-1]),
    "twice the same": np.array([1, 1]),
    "a mask, which is no list of places": np.array([True, False]),
    "a mask of everyone": np.array([True, False, True, False, True]),
    "between two places": np.array([0.5]),
    "not a number": np.array([np.nan]),
    "nothing at all": None,
    "a table": np.array([[0, 1]]),
    "names": np.array(["client-00"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_places_that_make_no_sense_are_refused(clients, bad):
    with pytest.raises(BadInput, match="own"):
        sd.train(clients, "logistic", own(lambda asked: BAD[bad]), **SETTINGS)


def test_a_rule_that_chooses_needs_candidates_that_are_asked_first(clients):
    rule = Selection("own", capped, choose=greedy, needs=("loss",))
    with pytest.raises(BadInput, match="not asked first"):
        replace(get("dp-fedavg"), select=rule)


def test_a_client_that_is_asked_twice_never_trains_with_one_batch_and_noise_twice(clients):
    """Copies of one candidate are told apart, or refused: the same draw must not be released under two charges."""

    def doubled(setting) -> select.Schedule:
        drawn = capped(setting)
        return replace(drawn, asked=np.tile([1, 1, 2, 2], (ROUNDS, 1)), weights=np.ones((ROUNDS, 4)))

    try:
        run = sd.train(clients, "logistic", own(greedy, doubled), **SETTINGS)
    except BadInput:
        return
    for one, cap in zip(run.privacy, CAPS):
        counts = {release["what"]: release["count"] for release in one["releases"]}
        assert counts.get("gradient", 0) <= cap
