"""Several runs in one stack end as each would have ended alone."""

import numpy as np
import pytest

import sordino as sd
from sordino import methods
from sordino.errors import BadInput, CannotStack, Diverged, SordinoError
from sordino.privacy.ledger import Ledger
from sordino.study import folder, session
from sordino.study.folder import Copies
from sordino.study.run import prepare
from sordino.study.session import train_prepared, train_together


def together_and_alone(cases, model="logistic"):
    """Train (clients, method, seed, settings) in one stack and one by one; the pairs of runs."""
    ready = [prepare(clients, model, method, seed, None, keys) for clients, method, seed, keys in cases]
    together = train_together(ready, device="cpu")
    return [
        (one, sd.train(clients, model, method, seed=seed, **keys))
        for one, (clients, method, seed, keys) in zip(together, cases)
    ]


def assert_same(one, alone):
    for found, known in ((one.weights, alone.weights), (one.personal, alone.personal)):
        assert (found is None) == (known is None)
        assert known is None or np.linalg.norm(found - known) / np.linalg.norm(known) < 1e-5
    assert one.privacy == alone.privacy
    assert len(one.metrics) == len(alone.metrics)
    assert one.result["final"]["loss"] == pytest.approx(alone.result["final"]["loss"], rel=1e-3)


def test_stacked_runs_equal_runs_alone(digits):
    """Different methods, seeds, learning rates and numbers of steps by client."""
    common = {"rounds": 3, "batch": [8, 8, 16, 16, 8, 8], "epochs": 0.5, "clip": 0.7}
    cases = [
        (digits, "dp-fedavg", 0, {**common, "lr": 0.3}),
        (digits, "weiavg", 1, {**common, "lr": 0.1}),
        (digits, "minimum-epsilon", 0, {**common, "lr": 0.3}),
        (digits, "declared-variance", 2, {**common, "lr": 0.2}),
    ]
    for one, alone in together_and_alone(cases, "cnn-small"):
        assert_same(one, alone)


WIDE = {"clip": {"name": "fair", "weight": 0.5}}
STACKABLE = {
    "dp-fedavg": ("dp-fedavg", {}),
    "fedfdp": ("fedfdp", WIDE),
    "fedfdp, same batch": ("fedfdp", {**WIDE, "ask": {"name": "loss", "batch": "step"}}),
    "dp-q-ffl": ("dp-q-ffl", {}),
    "dp-scaffold": ("dp-scaffold", {}),
    "dp-fedprox": ("dp-fedprox", {}),
    "dp-feddyn": ("dp-feddyn", {}),
    "ali-dpfl": ("ali-dpfl", {}),
    "adaptdp": ("adaptdp", {}),
    "adaptdp, averaged iterate": ("adaptdp", {"local": "averaged", "aggregate": "averaged"}),
    "adaptdp, a radius each": ("adaptdp", {"ask": {"name": "squared-norm", "per_client": True}}),
    "quantile-clipping": ("quantile-clipping", {}),
    "auto-clipping": ("auto-clipping", {}),
    "pfa-plus": ("pfa-plus", {}),
    "privacy-aware": ("privacy-aware", {}),
    "power-of-choice": ("power-of-choice", {}),
    "fedfair": ("fedfair", {}),
    "fedavg": ("fedavg", {}),
    "scaffold": ("scaffold", {}),
    "feddyn": ("feddyn", {}),
    "mr-mtl": ("mr-mtl", {}),
    "fine-tuned": ("fine-tuned", {"aggregate": {"name": "fine-tuned", "alone": 0.5}}),
}


@pytest.fixture(scope="module")
def all_methods(digits):
    """Every kind of method twice, with another seed and learning rate, all in one stack."""
    cases = [
        (digits, methods.get(name, parts), seed, {"rounds": 3, "rate": 0.2, "steps": 2, "lr": lr, "clip": 4.0})
        for name, parts in STACKABLE.values()
        for seed, lr in ((0, 0.2), (1, 0.1))
    ]
    return together_and_alone(cases)


@pytest.mark.parametrize(("place", "case"), enumerate(STACKABLE))
def test_every_method_in_a_stack_of_all_ends_as_it_would_alone(all_methods, place, case):
    """State of clients, questions, broadcasts, pace and radius stay each run's own."""
    for one, alone in all_methods[2 * place : 2 * place + 2]:
        assert one.result["method"] == STACKABLE[case][0]
        assert_same(one, alone)


def test_clients_keep_their_state_apart_when_two_copies_take_a_turn(digits):
    """Two turns of a client start from one state, alone or stacked, and it keeps what the last one left."""
    drawn = methods.get("dp-scaffold", {"select": "uniform"})
    cases = [(digits, drawn, seed, {"rounds": 4, "rate": 0.2, "steps": 2, "select": 8}) for seed in (0, 1)]
    for one, alone in together_and_alone(cases):
        assert any(len(set(r["participants"])) < len(r["participants"]) for r in alone.metrics)
        assert_same(one, alone)


def test_budgets_batches_and_rounds_may_differ(digits):
    """A run that ends earlier drops out; what the others do does not change."""
    strict = digits.with_budgets(0.3, delta=1e-5)
    cases = [
        (digits, "dp-fedavg", 0, {"rounds": 2, "rate": 0.1, "steps": 1}),
        (strict, "dp-scaffold", 0, {"rounds": 5, "rate": 0.3, "steps": 2}),
        (strict, "dp-fedavg", 1, {"rounds": 3, "batch": 16, "epochs": 0.5}),
    ]
    pairs = together_and_alone(cases)
    for one, alone in pairs:
        assert_same(one, alone)
    assert [len(one.metrics) for one, _ in pairs] == [2, 5, 3]


def test_data_sets_of_one_shape_share_a_stack(digits):
    """The same records dealt out otherwise, and other records."""
    source = sd.data.load("digits")
    elsewhere = source.subset(400, seed=3).partition("iid", clients=4, seed=1).with_budgets(2.0)
    dealt = sd.data.load("digits").partition("shards", clients=5, seed=2).with_budgets(1.0)
    keys = {"rounds": 2, "rate": 0.2, "steps": 2}
    cases = [(digits, "dp-fedavg", 0, keys), (elsewhere, "dp-scaffold", 0, keys), (dealt, "dp-fedavg", 0, keys)]
    for one, alone in together_and_alone(cases):
        assert_same(one, alone)


def test_runs_of_least_squares_share_a_stack_with_each_other_only(digits):
    keys = {"rounds": 1, "sampling": "full"}
    for one, alone in together_and_alone([(digits, "least-squares", seed, keys) for seed in (0, 1)]):
        assert_same(one, alone)
    runs = [prepare(digits, "logistic", method, 0, None, keys) for method in ("least-squares", "dp-fedavg")]
    with pytest.raises(CannotStack, match="one model"):
        train_together(runs, device="cpu")


def test_runs_without_a_common_model_are_refused(digits):
    runs = [prepare(digits, model, "dp-fedavg", 0, None, {"rounds": 1}) for model in ("logistic", "mlp")]
    with pytest.raises(CannotStack, match="one model"):
        train_together(runs, device="cpu")


def test_a_run_that_diverges_drops_out_and_the_others_go_on(digits):
    keys = [{"rounds": 3, "rate": 0.2}, {"rounds": 3, "rate": 0.2, "server_lr": 1e60}]
    ready = [prepare(digits, "logistic", "dp-fedavg", 0, None, one) for one in keys]
    good, lost = train_together(ready, device="cpu")
    assert_same(good, train_prepared(ready[0]))
    assert isinstance(lost, Diverged)
    assert "training.lr" in str(lost)
    (only,) = train_together(ready[1:], device="cpu")
    assert isinstance(only, Diverged), "a stack may be lost altogether"


def stoppable(digits):
    """State at clients and at the server, questions, an average of models, and a run that is not private."""
    common = {"rounds": 4, "batch": 8, "steps": 2, "clip": 0.7, "lr": 0.2, "pull": 0.1, "cooldown": 0.5}
    averaged = methods.get("weiavg", {"server": "ema"})
    chosen = ["dp-feddyn", averaged, "adaptdp", "dp-scaffold", "fedavg"]
    return [prepare(digits, "logistic", method, 0, None, dict(common)) for method in chosen]


def kept(runs, where, stop=None):
    """Train a stack that keeps its state in a folder."""
    return train_together(runs, "cpu", [stop] if stop else (), Copies(where, [one.kept_as for one in runs]))


class Stopped(BaseException):
    """As Ctrl-C would be."""


def test_a_stack_that_was_stopped_goes_on_where_it_was(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)
    whole = train_together(stoppable(digits), "cpu")

    def stop(record):
        if record["round"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        kept(stoppable(digits), tmp_path / "stacks", stop)
    trained = []
    real = session.simulate_together

    def counted(setups, states, lost):
        for number in real(setups, states, lost):
            trained.append(number)
            yield number

    monkeypatch.setattr(session, "simulate_together", counted)
    other = kept(stoppable(digits)[:2], tmp_path / "stacks")
    assert trained == [1, 2, 3, 4], "another stack does not take what is kept of this one"
    trained.clear()
    seen = []
    again = kept(stoppable(digits), tmp_path / "stacks", lambda record: seen.append(record["round"]))
    assert trained == [4], "the state after round 3 was the last to be kept"
    assert seen == [1, 2, 3, 4]
    for one, two in [*zip(whole, again), *zip(whole, other)]:
        assert np.allclose(one.weights, two.weights, rtol=1e-6, atol=1e-7)
        assert len(two.metrics) == len(one.metrics)
    for one, two in zip(whole, again):
        assert two.privacy == one.privacy, "every round was charged once"
    assert not (tmp_path / "stacks").exists(), "what has ended is forgotten"


def test_a_stack_that_lost_a_run_goes_on_without_it(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)
    keys = [{"rounds": 4, "rate": 0.2}, {"rounds": 4, "rate": 0.2, "server_lr": 1e60}]

    def ready():
        return [prepare(digits, "logistic", "dp-fedavg", 0, None, one) for one in keys]

    def stop(record):
        if record["round"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        kept(ready(), tmp_path, stop)
    good, lost = kept(ready(), tmp_path)
    assert_same(good, train_prepared(ready()[0]))
    assert isinstance(lost, Diverged)
    assert "after round 1" in str(lost)


def test_a_crash_while_a_stack_is_kept_leaves_what_was_kept_before(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)
    real, calls = Ledger.copy, []

    def failing(self, path):
        calls.append(path)
        if len(calls) == 8:  # in the middle of the second save
            raise Stopped
        real(self, path)

    monkeypatch.setattr(Ledger, "copy", failing)
    with pytest.raises(Stopped):
        kept(stoppable(digits), tmp_path)
    monkeypatch.setattr(Ledger, "copy", real)
    whole, again = train_together(stoppable(digits), "cpu"), kept(stoppable(digits), tmp_path)
    for one, two in zip(whole, again):
        assert np.allclose(one.weights, two.weights, rtol=1e-6, atol=1e-7)
        assert two.privacy == one.privacy


def test_a_run_alone_that_was_stopped_goes_on_where_it_was(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)

    def stop(record):
        if record["round"] == 3:
            raise Stopped

    for one in stoppable(digits):
        whole = train_prepared(one)
        with pytest.raises(Stopped):
            train_prepared(one, callbacks=[stop], keep=tmp_path / "runs")
        seen, trained = [], []
        with monkeypatch.context() as patch:
            patch.setattr(session, "simulate", counting(trained))
            again = train_prepared(one, callbacks=[lambda record, to=seen: to.append(record)], keep=tmp_path / "runs")
        assert trained == [4], "three rounds were kept"
        assert [record["round"] for record in seen] == [1, 2, 3, 4]
        assert np.array_equal(again.weights, whole.weights)
        assert again.privacy == whole.privacy, "every round was charged once"
        assert not (tmp_path / "runs").exists(), "what has ended is forgotten"


def counting(trained, real=session.simulate):
    def simulate(setup, state):
        for now in real(setup, state):
            trained.append(now.round)
            yield now

    return simulate


def test_a_full_disk_does_not_cost_what_was_kept_before(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)
    real, saved = folder.save_checkpoint, []

    def full(path, state):
        saved.append(path)
        if len(saved) == 3:
            raise BadInput("cannot write: no space left")
        real(path, state)

    one = stoppable(digits)[0]
    for train in (lambda: train_prepared(one, keep=tmp_path), lambda: kept([one], tmp_path)):
        saved.clear()
        with monkeypatch.context() as patch:
            patch.setattr(folder, "save_checkpoint", full)
            with pytest.raises(BadInput, match="no space"):
                train()
        assert Copies(tmp_path, [one.kept_as]).copy, "two rounds are still there"
        train()


def test_a_run_alone_that_diverges_is_forgotten(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "EVERY", 0.0)
    wild = prepare(digits, "logistic", "fedavg", 0, None, {"rounds": 3, "lr": 1e20, "server_lr": 1e30, "rate": 0.5})
    with pytest.raises(SordinoError, match="no longer finite"):
        train_prepared(wild, keep=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_ledger_of_real_budgets_is_not_copied(tmp_path):
    with Ledger(tmp_path / "real.db") as book, pytest.raises(BadInput, match="spent once"):
        book.copy(tmp_path / "copy.db")
