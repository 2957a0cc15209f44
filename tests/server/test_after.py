"""Server steps after combination: each against the recurrence written out over plain numbers."""

import pytest
import torch

from sordino.errors import BadInput
from sordino.server import after
from sordino.server.facts import Outcome

DELTAS = [torch.tensor([float(k), -1.0]) for k in (1, 2, -3, 4, 0.5)]


def roll(step, start=(0.0, 10.0)):
    """All iterates and all shown weights, carrying memory along."""
    weights, state, iterates, shown = torch.tensor(start), {}, [], []
    for delta in DELTAS:
        weights, show, state = step.take(weights, Outcome(delta, None), state)
        iterates.append(weights)
        shown.append(show)
    return iterates, shown, state


def test_plain_adds_the_scaled_update_and_shows_the_iterate():
    iterates, shown, state = roll(after.plain(lr=0.5))
    expected = torch.tensor([0.0, 10.0])
    for iterate, show, delta in zip(iterates, shown, DELTAS):
        expected = expected + 0.5 * delta
        assert torch.equal(iterate, expected)
        assert show is iterate
    assert state == {}


def test_momentum_is_a_geometric_sum_of_updates():
    iterates, _, _ = roll(after.momentum(beta=0.8, lr=2.0))
    for t, iterate in enumerate(iterates):
        moved = sum(2.0 * sum(0.8 ** (s - k) * DELTAS[k] for k in range(s + 1)) for s in range(t + 1))
        torch.testing.assert_close(iterate, torch.tensor([0.0, 10.0]) + moved)


def test_polyak_shows_the_mean_of_the_iterates_after_those_it_skips():
    iterates, shown, _ = roll(after.polyak())
    for t in range(5):
        torch.testing.assert_close(shown[t], torch.stack(iterates[: t + 1]).mean(0))
    iterates, shown, _ = roll(after.polyak(skip=2))
    assert torch.equal(shown[1], iterates[1])
    torch.testing.assert_close(shown[4], torch.stack(iterates[2:]).mean(0))


def test_ema_is_the_plain_mean_until_its_memory_is_full_and_then_decays():
    iterates, shown, _ = roll(after.ema(decay=0.6))
    torch.testing.assert_close(shown[0], iterates[0])
    torch.testing.assert_close(shown[1], (iterates[0] + iterates[1]) / 2)
    torch.testing.assert_close(shown[2], 0.6 * shown[1] + 0.4 * iterates[2])
    torch.testing.assert_close(shown[3], 0.6 * shown[2] + 0.4 * iterates[3])


def test_recent_has_a_memory_of_a_share_of_the_rounds_so_far():
    iterates, shown, _ = roll(after.recent(share=0.5))
    kept = [max(0.0, 1 - 1 / (0.5 * t)) for t in range(1, 6)]
    assert kept[:2] == [0.0, 0.0]
    expected = iterates[0]
    for a, iterate, show in zip(kept, iterates, shown):
        expected = a * expected + (1 - a) * iterate
        torch.testing.assert_close(show, expected)
    iterates, shown, _ = roll(after.recent())  # a tenth of five rounds is less than one
    assert all(torch.equal(one, other) for one, other in zip(iterates, shown))


def test_averages_never_change_what_clients_start_from():
    plain, _, _ = roll(after.plain())
    for step in (after.ema, after.polyak, after.recent):
        iterates, _, _ = roll(step())
        assert all(torch.equal(a, b) for a, b in zip(iterates, plain))


def test_momentum_and_averages_combine():
    alone, _, _ = roll(after.momentum(beta=0.5))
    for step in (after.ema, after.polyak, after.recent):
        iterates, _, _ = roll(step(beta=0.5))
        assert all(torch.equal(a, b) for a, b in zip(iterates, alone))


def test_steps_are_pure_and_keep_what_is_remembered():
    weights, delta, state = torch.ones(2), torch.ones(2), {"pfa_basis": torch.ones(2, 1)}
    for name, step in after.STEPS.items():
        step().take(weights, Outcome(delta, None), state)
        _, _, following = step().take(weights, Outcome(delta, None), state)
        assert torch.equal(weights, torch.ones(2)), name
        assert list(state) == ["pfa_basis"]
        assert "pfa_basis" in following


@pytest.mark.parametrize("name", list(after.STEPS))
def test_an_update_that_is_nobody_elses_is_written_over_and_the_step_is_the_same(name):
    step = after.STEPS[name]()
    (kept, kept_memory), (over, over_memory) = (torch.zeros(2), {}), (torch.zeros(2), {})
    for delta in DELTAS:
        kept, kept_shown, kept_memory = step.take(kept, Outcome(delta, None), kept_memory)
        own = delta.clone()
        over, over_shown, over_memory = step.take(over, Outcome(own, None, own=True), over_memory)
        assert torch.equal(over, kept)
        assert torch.equal(over_shown, kept_shown)
        assert name in ("momentum", "ball") or over.data_ptr() == own.data_ptr()


@pytest.mark.parametrize(
    ("step", "options"), [(after.momentum, {"beta": 1.0}), (after.ema, {"decay": -0.1}), (after.polyak, {"skip": -1})]
)
def test_senseless_options_are_refused(step, options):
    with pytest.raises(BadInput, match=next(iter(options))):
        step(**options)
