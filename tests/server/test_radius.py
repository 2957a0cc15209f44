"""The server's part of adaptive clipping: the published formulas, and limits that no draw can leave."""

import math

import numpy as np
import pytest
import torch

from sordino.errors import BadInput
from sordino.server import after, radius
from sordino.server.facts import Facts, Outcome, ServerState, Told


def facts(rows=3, clip=2.0, rounds=50, spreads=(0.1, 0.2, 0.4), sizes=(100, 300, 600), **more):
    ones = np.ones(rows)
    noise = np.array(spreads, dtype=float)
    return Facts(
        clients=np.arange(rows),
        sizes=np.array(sizes, dtype=float),
        epsilons=ones,
        batches=10 * ones,
        noises=ones,
        steps=ones,
        variances=0.01 * ones,
        selection=ones,
        clip=clip,
        rounds=rounds,
        answer_noise={"squared-norm": noise, "under-radius": noise},
        **more,
    )


def published_radius(answers, sigmas, ceiling, tau, rounds, u=0.01):
    """Algorithm 1, line 9, with ν̃ of Proposition 4, term by term."""
    total, variance = 0.0, 0.0
    for answer, sigma in zip(answers, sigmas):
        total += answer / len(answers)
        variance += sigma**2 / len(answers)
    clients = len(answers)
    nu = math.sqrt(2) * math.sqrt(variance / clients) * ceiling**2 * math.sqrt(math.log(2 * clients * rounds / u))
    return min(ceiling, math.sqrt(max(0.0, 2 * tau * (total + nu))))


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_the_radius_is_the_papers(tau):
    answers, sigmas = [0.3, 0.1, 0.2], [0.001, 0.002, 0.004]
    found = radius.RootMeanSquare(tau=tau)(torch.tensor(answers), facts(spreads=sigmas))
    assert found.public["radius"] == pytest.approx(published_radius(answers, sigmas, 2.0, tau, 50), rel=1e-6)


def test_without_the_margin_it_is_the_root_of_twice_tau_times_the_mean():
    found = radius.RootMeanSquare(margin=0.0)(torch.tensor([0.3, 0.1, 0.2]), facts())
    assert found.public["radius"] == pytest.approx(math.sqrt(2 * 0.2))


@pytest.mark.parametrize("sigmas", [-1000, -10, -1, 0, 10, 1000])
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_radius_never_leaves_its_limits_whatever_was_drawn(sigmas, margin):
    spreads = np.array([0.1, 0.2, 0.4])
    answers = torch.from_numpy(0.01 + sigmas * spreads * 2.0**2)
    found = radius.RootMeanSquare(margin=margin, floor=0.01)(answers, facts()).public["radius"]
    assert 0.01 * 2.0 <= found <= 2.0


def test_precise_answers_count_more_when_asked_to():
    answers = torch.tensor([0.1, 0.5, 0.9])
    found = radius.RootMeanSquare(margin=0.0, weigh="precision")(answers, facts()).public["radius"]
    weights = np.array([1 / 0.1**2, 1 / 0.2**2, 1 / 0.4**2])
    assert found == pytest.approx(math.sqrt(2 * (weights @ answers.numpy()) / weights.sum()))


def test_a_public_client_answers_alone_when_precision_counts():
    found = radius.RootMeanSquare(weigh="precision")(torch.tensor([0.1, 0.5, 0.9]), facts(spreads=[0.1, 0.0, 0.4]))
    assert found.public["radius"] == pytest.approx(1.0), "no noise, hence no margin either"


def test_a_broken_answer_does_not_count_and_none_at_all_changes_nothing():
    found = radius.RootMeanSquare(margin=0.0)(torch.tensor([math.nan, 0.1, 0.3]), facts())
    assert found.public["radius"] == pytest.approx(math.sqrt(2 * 0.2))
    before = ServerState(public={"radius": 0.7})
    for rule in (radius.RootMeanSquare(), radius.Quantile()):
        assert before.told(rule(torch.full((3,), math.nan), facts(public=before.public))) == before


def test_a_run_without_privacy_has_no_radius():
    assert radius.RootMeanSquare()(torch.ones(3), facts(clip=math.inf)) == Told()
    assert radius.Quantile()(torch.ones(3), facts(clip=math.inf)) == Told()


def test_the_quantile_moves_geometrically_by_how_far_the_share_is_off():
    weights = np.array([100, 300, 600]) / 1000
    centred = np.array([0.1, -0.2, 0.3])
    found = radius.Quantile(target=0.7, rate=0.2)(torch.from_numpy(centred), facts(public={"radius": 1.5}))
    assert found.public["radius"] == pytest.approx(1.5 * math.exp(-0.2 * (weights @ (centred + 0.5) - 0.7)))


def test_the_quantile_starts_at_the_clip_and_one_round_cannot_run_away():
    found = radius.Quantile()(torch.full((3,), -1000.0), facts())
    assert found.public["radius"] == pytest.approx(2.0 * math.exp(0.2 * 0.5))


def test_the_quantile_converges_to_the_quantile_from_far_away():
    """Exact answers: from 0.1× and 10× the median, 60 rounds end within 15 % of it (with noise: engine tests)."""
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, 4000)
    for start in (0.1, 10.0):
        told = {}
        for _ in range(60):
            known = facts(rows=1, clip=start, spreads=[0.0], sizes=[4000], public=told)
            now = told.get("radius", start)
            told = radius.Quantile()(torch.tensor([(norms <= now).mean() - 0.5]), known).public
        assert told["radius"] == pytest.approx(np.median(norms), rel=0.15)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (radius.RootMeanSquare, {"tau": 0.0}),
        (radius.RootMeanSquare, {"floor": 0.0}),
        (radius.RootMeanSquare, {"floor": 2.0}),
        (radius.RootMeanSquare, {"weigh": "luck"}),
        (radius.Quantile, {"target": 1.0}),
        (radius.Quantile, {"rate": -1.0}),
    ],
)
def test_senseless_options_are_refused(rule, options):
    with pytest.raises(BadInput):
        rule(**options)


def test_the_ball_projects_what_lies_outside_and_nothing_else():
    ball = after.ball(bound=2.0)
    inside, _, _ = ball.take(torch.tensor([0.0, 1.0]), Outcome(torch.tensor([0.5, 0.0]), None), {})
    assert torch.equal(inside, torch.tensor([0.5, 1.0]))
    outside, shown, _ = ball.take(torch.tensor([0.0, 1.0]), Outcome(torch.tensor([30.0, 39.0]), None), {})
    assert torch.allclose(outside, 2.0 * torch.tensor([0.6, 0.8]))
    assert shown is outside


def test_the_output_iterate_is_the_mean_over_rounds_of_the_clients_mean_iterates():
    generator = torch.Generator().manual_seed(0)
    weights, memory, state, seen = torch.zeros(4), {}, {}, []
    for _ in range(5):
        updates, iterates = torch.randn(2, 3, 4, generator=generator)
        shares = torch.tensor([0.1, 0.3, 0.6])
        seen.append(weights + shares @ iterates)
        outcome = radius.averaged()(updates, facts(uploads={"iterate": iterates}), memory)
        assert torch.allclose(outcome.delta, shares @ updates, atol=1e-6)
        memory = outcome.memory
        weights, shown, state = after.ball().take(weights, outcome, state)
        assert "iterate" not in memory
    assert torch.allclose(shown, torch.stack(seen).mean(0), atol=1e-5)


def test_a_broken_iterate_is_refused_like_a_broken_update():
    iterates = torch.ones(3, 4)
    iterates[1] = math.nan
    outcome = radius.averaged()(torch.ones(3, 4), facts(uploads={"iterate": iterates}), {})
    assert torch.isfinite(outcome.iterate).all()


def test_averaging_iterates_needs_clients_that_send_them():
    with pytest.raises(BadInput, match="local = 'averaged'"):
        radius.averaged()(torch.ones(3, 4), facts(), {})
    with pytest.raises(BadInput, match="unknown"):
        radius.averaged(combine="luck")(torch.ones(3, 4), facts(uploads={"iterate": torch.ones(3, 4)}), {})
