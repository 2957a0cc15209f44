"""Steps that are recorded once and replayed give what steps taken one by one give.

A GPU records a CUDA graph; here the same step is played again in the same tensors, as a graph would be.
"""

from dataclasses import replace

import pytest
import torch

import sordino as sd
from sordino.client import recorded
from sordino.client.recorded import Recorder, Recording, one_step
from sordino.client.rows import Rows
from sordino.errors import SordinoError
from sordino.methods import get, names
from sordino.privacy.gate import Gate, Terms
from sordino.privacy.generators import Keyed, Secret, Turn
from sordino.privacy.types import Sampling
from sordino.study import session
from sordino.study.run import prepare
from sordino.study.session import train_together

pytest.importorskip("triton", reason="a GPU's noise is drawn by a kernel, which pip install triton interprets")


def small():
    """Few parameters: every one's noise is drawn by a kernel that is interpreted, step by step."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 10))


SETTINGS = {"steps": 5, "rate": 0.2, "rounds": 4, "lr": 0.3, "clip": 0.7, "evaluate": 4}
DRAWN = ["uniform", "unbiased", "unbiased-compensated", "privacy-aware", "power-of-choice"]


def played(body, given):
    """A recording whose replay takes the step again, in the tensors that a graph would read and write."""
    inputs = given.copied()
    if one_step(body, given.copied()) is None:
        return None
    after, answers = one_step(body, inputs)

    def again():
        _, found = one_step(body, inputs)
        for what, answer in answers.items():
            answer.value.copy_(found[what].value)

    return Recording(inputs, after, answers, again)


@pytest.fixture
def stacked(monkeypatch):
    """Rows in stacks with noise as on a GPU; how often steps were recorded, and replayed."""
    from sordino.privacy import noise_cuda  # needs triton

    def normal(self, turns, what, step, out, scale=None):
        return noise_cuda.fill(out, self.keys_on(turns, what, out.device), step, scale)

    real, counted = session.make_setup, {"recorded": 0, "replayed": 0}

    class Counted(Recording):
        def run(self, given, steps):
            counted["replayed"] += len(steps)
            return super().run(given, steps)

    def record(body, given):
        found = played(body, given)
        counted["recorded"] += found is not None
        return None if found is None else Counted(found.inputs, found.after, found.answers, found.again)

    def setup(recording):
        def make(*given, **more):
            made = real(*given, **more)
            recorder = Recorder(make=record) if recording else None
            return replace(made, work=replace(made.work, stack=True, recorder=recorder))

        monkeypatch.setattr(session, "make_setup", make)
        return counted

    monkeypatch.setattr(Keyed, "normal", normal)
    monkeypatch.setattr(Rows, "_widths", property(lambda self: [128] * self.steps))  # a GPU's are of few sizes
    return setup


@pytest.mark.parametrize("method", [name for name in names() if get(name).local.trains is None and name != "optimum"])
def test_every_method_ends_in_the_same_bits_whether_its_steps_are_recorded_or_not(method, digits, stacked):
    how = SETTINGS | ({"select": 3} if method in DRAWN else {})

    def train(recording):
        counted = stacked(recording)
        done = sd.train(digits, small(), method, seed=3, **how)
        return done, dict(counted)

    plain, _ = train(False)
    found, counted = train(True)
    assert torch.equal(plain.weights, found.weights)
    assert plain.privacy == found.privacy
    assert counted["recorded"] >= 1
    assert counted["replayed"] > 0


def test_a_stack_of_different_runs_is_recorded_too_and_ends_in_the_same_bits(digits, stacked):
    """Other rules, rates and numbers of steps in one stack; rows that ask beside their step have one of their own."""
    common = {"rounds": 5, "batch": [8, 8, 16, 16, 8, 8], "epochs": 0.5, "clip": 0.7, "evaluate": 5}
    cases = [
        ("dp-fedavg", 0, {"lr": 0.3}), ("weiavg", 1, {"lr": 0.1}), ("dp-scaffold", 0, {"lr": 0.2}),
        ("fedfdp", 2, {"lr": 0.2}), ("fedfair", 3, {"lr": 0.2}), ("adaptdp", 1, {"lr": 0.2}),
    ]  # fmt: skip

    def train(recording):
        counted = stacked(recording)
        ready = [prepare(digits, small(), method, seed, None, {**common, **own}) for method, seed, own in cases]
        return train_together(ready, device="cpu"), dict(counted)

    plain, found = train(False)[0], train(True)
    for one, other in zip(plain, found[0]):
        assert torch.equal(one.weights, other.weights)
        assert one.privacy == other.privacy
    assert found[1]["replayed"] > found[1]["recorded"] >= 2


def permit_of(gate):
    return gate.grant([Turn("a", 1)], [Terms(Sampling.full(), (("gradient", 1.0),), 4, 1.0)], "r")


def test_what_was_booked_for_a_recording_is_used_up():
    gate = Gate(None, Keyed("k"), "run")
    permit = permit_of(gate)
    gate.book(permit, ["gradient"], range(1, 4))
    gate.book(permit, ["gradient"], range(1))
    for steps in (range(2, 3), range(4, 5)):
        with pytest.raises(SordinoError, match="was not charged, or was released already"):
            gate.book(permit, ["gradient"], steps)


def test_a_sites_steps_are_never_recorded():
    gate = Gate(None, Secret(), "run")
    with pytest.raises(SordinoError, match="in a simulation only"):
        gate.terms_of(permit_of(gate), {"gradient": torch.ones(1)})


def given_of(width, lr=0.1):
    shape = torch.zeros(3, 2, width, dtype=torch.long)
    public = {"lr": lr, "clip": torch.ones(2)}
    return recorded.Inputs(torch.zeros(2, 5), {}, shape, shape > 0, torch.zeros((), dtype=torch.int32), public, {})


def test_only_shapes_that_come_again_are_recorded_and_few_of_them():
    """Recording costs as much as many steps, and every graph owns its buffers."""
    made = []
    recorder = Recorder(make=lambda body, given: made.append(given) or len(made))

    def seen(width, per_record=1, to=recorder, **how):
        return to.of(lambda inputs: None, given_of(width, **how), per_record)

    for _ in range(recorded.SEEN - 1):
        assert seen(1) is None
    assert seen(1) == seen(1) == 1, "recorded once"
    found = {width: [seen(width) for _ in range(recorded.SEEN)][-1] for width in range(2, 50)}
    assert [width for width, one in found.items() if one] == list(range(2, recorded.MOST_GRAPHS + 1))
    assert seen(1) == 1, "what was recorded stays"
    assert seen(1, lr=0.2) is None, "a number that was broadcast is part of what was recorded"
    other = Recorder(make=recorder.make)
    tenths = [[seen(w, recorded.MOST_BYTES // 20, other) for _ in range(recorded.SEEN)][-1] for w in (3, 3, 3, 2, 6)]
    assert [one is None for one in tenths] == [False, False, False, False, True], "five tenths leave no room for six"
