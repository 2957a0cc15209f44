"""[tune]: what a search costs everybody, against an independent accountant; nobody over budget; nothing paid twice."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from sordino.errors import BadInput, BudgetRefused, Diverged
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study import tune as tuning
from sordino.study.evaluated import estimate_of
from sordino.study.file import make_study
from sordino.study.result import read_result
from sordino.study.run import load
from sordino.study.run import train as train_study
from sordino.study.tune import candidates, search, tune

BASE = {
    "study": {"name": "small", "rounds": 4},
    "data": {"name": "digits", "records": 600, "partition": "iid", "clients": 3, "seed": 0},
    "budgets": {"epsilon": [0.5, 2.0, 8.0], "delta": 1e-4},
    "model": {"name": "logistic"},
    "method": {"name": "dp-fedavg"},
    "training": {"rate": 0.3, "lr": 0.3},
    "evaluation": {"every": 2},
}
EPSILONS, DELTA = (0.5, 2.0, 8.0), 1e-4
NAMES = ("client-00", "client-01", "client-02")


def study(keys, **changes):
    table = json.loads(json.dumps(BASE))
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return make_study({**table, "tune": keys})


def oracle(events):
    """ε of Poisson-sampled Gaussians by dp_accounting's own composition; (rate, noise, count) each."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 5e-4)
    for rate, noise, count in events:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), int(count))
    return accountant.get_epsilon(DELTA)


def gaussian_oracle(noises):
    """ε of full-batch Gaussians: one of μ² = Σ z⁻², by the exact tail (Balle and Wang 2018)."""
    mu = math.sqrt(sum(z**-2 for z in noises))

    def delta(epsilon):
        first = norm.cdf(mu / 2 - epsilon / mu)
        return first - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - DELTA

    return brentq(delta, 0.0, 100.0)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "out"
    made = study({"training.lr": [0.1, 0.5], "training.rate": [0.2, 0.4]})
    return made, out, tune(made, out)


def test_everybodys_total_is_what_an_independent_accountant_says_and_within_the_budget(tuned):
    _, out, done = tuned
    with Ledger(out / "ledger.db", readonly=True) as book:
        for one, budget in zip(done.result["privacy"], EPSILONS):
            name = one["client"]
            charged = [(e.sampling.rate, e.noise, e.count) for e in book.spent(name)]
            assert sum(count for _, _, count in charged) == 4 * 4  # four candidates of four rounds
            assert {round(rate, 3) for rate, _, _ in charged} == {0.2, 0.4}
            expected = oracle(charged)
            assert one["training_epsilon"] == pytest.approx(expected, rel=2e-3)
            assert expected <= budget * 1.002
            looks = [e.noise for e in book.spent(name + HELD) for _ in range(e.count)]
            assert len(looks) == 4 * 2
            assert one["held_epsilon"] == pytest.approx(gaussian_oracle(looks), rel=1e-4)
            assert one["held_epsilon"] == pytest.approx(0.8 * budget, rel=1e-4)
            assert one["spent_epsilon"] == max(one["training_epsilon"], one["held_epsilon"]) <= budget
            assert one["training_epsilon"] > 0.99 * budget  # nothing is given away either
            assert "declared in advance" in book.composition(name)


def test_the_noise_that_was_charged_is_the_noise_of_the_plan_and_larger_than_alone(tuned):
    made, out, done = tuned
    found = search(made, out)
    assert (found.factors > 1.3).all()
    assert found.looking == pytest.approx(np.full(3, 2.0))  # √4
    for point, ready in zip(found.points, found.ready):
        kept = read_result(out / point.name / "result.json")
        for client, one in zip(ready.plan.clients, kept["privacy"]):
            assert one["releases"][0]["noise"] == client.noise
    assert done.result["tuned"]["factors"] == pytest.approx(dict(zip(NAMES, found.factors)))


def test_equal_runs_need_the_noise_of_one_that_is_k_times_as_long(tmp_path):
    found = search(study({"training.lr": [0.1, 0.2, 0.4]}), tmp_path)
    long = make_study({**BASE, "study": {"rounds": 12}, "evaluation": {"every": 2}})
    from sordino.study.run import plan

    view = plan(long.federation(), method=long.chosen_method(), **long.arguments())
    for ready in found.ready:
        assert [c.noise for c in ready.plan.clients] == pytest.approx([c["noise"] for c in view.clients], rel=1e-3)


def test_the_winner_has_the_best_paid_estimate_and_its_model_is_handed_out(tuned):
    _, out, done = tuned
    values = [estimate_of(run.result)["value"] for run in done.runs]
    assert done.winner == int(np.argmax(values))
    best = load(out / done.runs[done.winner].point.name)
    assert load(out).result["checksum"] == best.result["checksum"]
    tried = done.result["tuned"]["tried"]
    assert [one["estimate"]["value"] for one in tried] == values
    # The folder's result tells of all runs, the candidate's own only of what was spent until then.
    assert read_result(out / "result.json")["privacy"] == done.result["privacy"]


def test_intervals_hold_for_all_candidates_at_once(tuned):
    made, out, _ = tuned
    (ready, *_) = search(made, out).ready
    assert ready.plan.judging.level == pytest.approx(1 - 0.05 / 4)


def test_given_again_it_charges_nothing_and_says_the_same(tuned):
    made, out, done = tuned
    with Ledger(out / "ledger.db", readonly=True) as book:
        before = book.head
    again = tune(made, out)
    with Ledger(out / "ledger.db", readonly=True) as book:
        assert book.head == before
    assert again.result == done.result


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_a_search_that_is_interrupted_goes_on_without_paying_twice(tuned, tmp_path, at):
    made, whole, done = tuned
    rounds = []

    def watch(label, seed, total):
        def tell(record):
            rounds.append(label)
            if len(rounds) == at:
                raise KeyboardInterrupt

        return tell

    with pytest.raises(KeyboardInterrupt):
        tune(made, tmp_path / "out", watch=watch)
    again = tune(made, tmp_path / "out")
    told = [one | {"round": 0} for one in again.result["privacy"]]
    assert told == [one | {"round": 0} for one in done.result["privacy"]]
    assert again.result["checksum"] == done.result["checksum"]
    with Ledger(tmp_path / "out/ledger.db") as book, Ledger(whole / "ledger.db") as other:
        for name in (NAMES[0], NAMES[2] + HELD):
            assert sorted(map(str, book.spent(name))) == sorted(map(str, other.spent(name)))


def test_a_ledger_that_is_cumulative_is_not_overdrawn(tmp_path):
    small = {"budgets": {"epsilon": [4.0, 4.0, 4.0]}, "evaluation": {"every": 4, "spend": 0.3}}
    made = study({"training.lr": [0.1, 0.5]}, **small)
    book = tmp_path / "all.db"
    done = tune(made, tmp_path / "first", ledger=book)
    assert max(one["spent_epsilon"] for one in done.result["privacy"]) <= 4.0
    assert not (tmp_path / "first/ledger.db").exists()
    assert tune(made, tmp_path / "first").result == done.result  # it remembers which ledger it pays from
    # What is spent is spent: a second search finds nothing left, says so before it charges, and leaves nothing behind.
    with Ledger(book, readonly=True) as opened:
        before = opened.epsilon()
    with pytest.raises(BudgetRefused):
        tune(made, tmp_path / "second", ledger=book)
    with Ledger(book, readonly=True) as opened:
        assert opened.epsilon() == before
    assert not (tmp_path / "second/tune.json").exists()
    # A little more pays for some candidates only, which is refused as well; enough more pays for all.
    for extra in (1.0, 20.0):
        with Ledger(book) as opened:
            for name in (*NAMES, *(one + HELD for one in NAMES)):
                opened.top_up(name, extra, "a second search", "the officer")
        if extra == 1.0:
            with pytest.raises(BudgetRefused, match="not all candidates"):
                tune(made, tmp_path / "second", ledger=book)
    again = tune(made, tmp_path / "second", ledger=book)
    for one, first in zip(again.result["privacy"], done.result["privacy"]):
        assert first["spent_epsilon"] < one["spent_epsilon"] <= 25.0
        assert one["run_epsilon"] == pytest.approx(first["run_epsilon"])  # the second search alone


def test_a_search_beside_an_earlier_run_is_refused_before_it_charges_where_it_would_be_lopsided(tmp_path):
    one = make_study({**BASE, "budgets": {"epsilon": 4.0, "delta": 1e-4}, "study": {"rounds": 2}})
    book = tmp_path / "all.db"
    keys = {**one.arguments(), "rounds": 2}
    run = train_study(one.federation(), method=one.chosen_method(), ledger=book, **keys)
    spent = [entry["spent_epsilon"] for entry in run.privacy]
    made = study({"training.lr": [0.1, 0.5]}, budgets={"epsilon": 4.0})
    with pytest.raises(BudgetRefused):
        tune(made, tmp_path / "out", ledger=book)
    assert not (tmp_path / "out/tune.json").exists()
    with Ledger(book, readonly=True) as opened:
        assert [max(opened.epsilon([name, name + HELD]).values()) for name in NAMES] == spent


def test_a_candidate_that_diverges_is_charged_and_loses(tmp_path, monkeypatch):
    real = tuning.train_alone

    def fails(ready, keeper, *more):
        if ready.plan.training.lr == 0.5:
            real(ready, keeper, *more)  # it has trained, and so paid, before it is lost
            raise Diverged("lost")
        return real(ready, keeper, *more)

    monkeypatch.setattr(tuning, "train_alone", fails)
    made = study({"training.lr": [0.1, 0.5]}, evaluation={"every": 4})
    done = tune(made, tmp_path / "out")
    assert done.winner == 0
    assert done.runs[1].failed
    assert done.result["tuned"]["tried"][1]["estimate"] is None
    with Ledger(tmp_path / "out/ledger.db", readonly=True) as book:
        assert len({s.plan.run for s in book.standings(NAMES[0])}) == 2
        assert all(not s.open for s in book.standings(NAMES[0]))


def test_auto_is_settled_for_the_noise_that_is_really_added(tmp_path):
    keys = {"method": {"name": "auto"}, "training": {"lr": "auto"}, "evaluation": {"every": None}}
    made = study({"training.clip": [0.5, 1.0]}, **keys)
    found = search(made, tmp_path)
    alone = tuning.Studies(tmp_path).prepared(found.points[0])
    assert found.ready[0].plan.training.lr < alone.plan.training.lr
    # Nobody said how often to look: once each, at the end.
    assert [one.plan.judging.times for one in found.ready] == [1, 1]


@pytest.mark.parametrize(
    ("keys", "changes", "words"),
    [
        ({"study.seed": [0, 1]}, {}, "cannot be tried"),
        ({"evaluation.share": [0.1, 0.2]}, {}, "cannot be tried"),
        ({"budgets.epsilon": [1.0, 2.0]}, {}, "cannot be tried"),
        ({"training.lr": [0.1]}, {}, "one candidate"),
        ({"training.lr": 0.1}, {}, "give a list"),
        ({"training.lr": [0.1, 0.2], "stack": True}, {}, "stack is unknown"),
        ({"method.name": ["dp-fedavg", "fedavg"]}, {}, "not private"),
        ({"training.lr": [0.1, 0.2]}, {"trust": {"noise": "shared", "colluders": 1}}, "shared"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_a_reason(tmp_path, keys, changes, words):
    with pytest.raises(BadInput, match=words):
        tune(study(keys, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_paid_estimates_there_is_nothing_to_choose_by(tmp_path):
    table = {key: value for key, value in BASE.items() if key != "evaluation"}
    with pytest.raises(BadInput, match="no \\[evaluation\\]"):
        candidates(make_study({**table, "tune": {"training.lr": [0.1, 0.2]}}))


def test_a_folder_with_another_search_is_refused(tuned):
    _, out, _ = tuned
    with pytest.raises(BadInput, match="another study"):
        tune(study({"training.lr": [0.1, 0.9]}), out)


def test_the_command_prints_candidates_totals_and_what_the_search_cost(tmp_path, in_folder):
    table = study({"training.lr": [0.1, 0.5]}).model_dump(exclude_unset=True, by_alias=True)
    lines = []
    for section, values in table.items():
        lines.append(f"[{section}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    code, out, _ = in_folder("plan", "study.toml", "--json")
    planned = json.loads(out)["tuning"]
    assert code == 0
    assert len(planned["candidates"]) == 2
    code, out, _ = in_folder("tune", "study.toml", "--out", "search", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["factor"] == pytest.approx(planned["factor"])
    assert [one["estimate"]["low"] <= one["estimate"]["value"] for one in told["tried"]] == [True, True]
    assert all(one["spent_epsilon"] <= one["epsilon"] for one in told["privacy"])
    code, out, _ = in_folder("tune", "study.toml", "--out", "search")  # again: nothing is trained, the table is printed
    assert code == 0
    assert "best by paid" in out
    assert "2 settings cost you a factor of" in out
    assert (tmp_path / "search/report.html").exists()
    for other in ("run", "serve"):
        code, _, err = in_folder(other, "study.toml")
        assert code == 2
        assert "[tune]" in err
