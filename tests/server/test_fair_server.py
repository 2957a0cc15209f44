"""What the server makes of losses and updates: living bounds, weights, controls, pace; and the theory as functions."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from papers.round_budget import rounds_within
from papers.theory_fair import Convex, coefficients, optimal_lambda, theorem1
from sordino.errors import BadInput
from sordino.server import rules
from sordino.server.facts import Facts, ServerState
from sordino.server.fair import FAIR_RULES, feddyn, hear_loss, q_ffl, scaffold
from sordino.server.pace import ali_dpfl, optimal_steps

SIZES = np.array([10.0, 30.0, 60.0])


def facts(sizes=SIZES, clients=None, variances=0.0, steps=2.0, losses=None, **more):
    rows = len(sizes)
    some = np.ones(rows)
    known = {"lr": 0.1, "server_lr": 1.0, "clip": 1.0, "records": int(sizes.sum()), **more}
    return Facts(
        clients=np.arange(rows) if clients is None else np.array(clients),
        sizes=np.asarray(sizes, dtype=float),
        epsilons=some,
        batches=8 * some,
        noises=some,
        steps=steps * some,
        variances=variances * some,
        selection=some,
        answers={} if losses is None else {"loss": np.array(losses, dtype=float)},
        **known,
    )


# Losses


def test_the_mean_loss_counts_records_and_the_next_bound_follows_it():
    state = ServerState(public={"kept": 1}).told(hear_loss()(torch.tensor([1.0, 2.0, 0.5]), facts()))
    mean = 0.1 * 1 + 0.3 * 2 + 0.6 * 0.5
    assert state.public["mean_loss"] == pytest.approx(mean)
    assert state.public["loss_bound"] == pytest.approx(2.5 * mean)
    assert state.public["kept"] == 1


def test_answers_that_are_not_finite_are_left_out():
    told = hear_loss()(torch.tensor([1.0, math.nan, 3.0]), facts())
    assert told.public["mean_loss"] == pytest.approx((10 * 1 + 60 * 3) / 70)
    kept = ServerState(public={"kept": 1})
    assert kept.told(hear_loss()(torch.tensor([math.nan] * 3), facts())) == kept


@pytest.mark.parametrize("noise", [0.02, 0.5, 20.0])
@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_the_loss_bound_neither_collapses_nor_explodes_in_a_thousand_rounds(noise, decay):
    """Losses that stay or fall to nothing, and noise up to twenty times the bound."""
    generator = np.random.default_rng(0)
    bound, bounds = 2.5, []
    for number in range(1000):
        true = generator.exponential(2.0 * decay**number, (3, 50))
        heard = np.minimum(true, bound).mean(1) + noise * bound * generator.standard_normal(3)
        bound = hear_loss()(torch.from_numpy(heard), facts()).public["loss_bound"]
        bounds.append(bound)
    assert 0.1 <= min(bounds) <= max(bounds) <= 10.0
    if noise == 0.02:
        assert np.mean(bounds[-100:]) == pytest.approx(max(0.1, 2.5 * 2.0 * decay**950), rel=0.3)


def test_the_published_bound_shrinks_while_the_losses_stay():
    """Next bound = released mean: E min(F, C) < C, so it falls for ever; losses stay at a mean of 2."""
    generator = np.random.default_rng(0)
    bound = 2.5
    for _ in range(1000):
        true = generator.exponential(2.0, 50)
        bound = np.minimum(true, bound).mean() + 0.02 * bound * generator.standard_normal()
    assert 0 < bound < 0.02


@pytest.mark.parametrize("wrong", [{"kappa": 1.0}, {"floor": 0.0}, {"ceiling": 0.01}, {"ceiling": math.inf}])
def test_rules_for_the_bound_that_could_collapse_or_explode_are_refused(wrong):
    with pytest.raises(BadInput, match="loss bound"):
        hear_loss(**wrong)


# q-FFL


def q_ffl_loops(updates, losses, q, lr):
    above, below = np.zeros(updates.shape[1]), 0.0
    for u, f in zip(updates.astype(float), losses):
        gradient = -u / lr
        above += f**q * gradient
        below += q * f ** (q - 1) * sum(g * g for g in gradient) + f**q / lr
    return -above / below


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 3.0])
def test_q_ffl_equals_its_definition(q):
    updates = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    losses = [0.3, 1.7, 2.2]
    found = q_ffl(q=q)(torch.from_numpy(updates), facts(losses=losses), {})
    assert np.allclose(found.delta.numpy(), q_ffl_loops(updates, losses, q, 0.1), rtol=1e-5)
    assert np.allclose((found.weights[:, None] * updates).sum(0), found.delta.numpy(), atol=1e-6)


def test_q_ffl_can_leave_declared_noise_out_of_the_updates_norms():
    generator = np.random.default_rng(1)
    losses, spread, dimension = [0.3, 1.7, 2.2], np.array([0.5, 1.0, 2.0]), 50_000
    signal = generator.standard_normal((3, dimension)) / math.sqrt(dimension)
    noisy = signal + spread[:, None] * generator.standard_normal((3, dimension))
    heard = facts(losses=losses, variances=spread**2)
    found = q_ffl(q=1.0, corrected=True)(torch.from_numpy(noisy), heard, {})
    above, below = np.zeros(dimension), 0.0
    for update, loss, v in zip(noisy, losses, spread**2):
        length = max(0.0, sum(x * x for x in update) - dimension * v)
        above += loss * update / 0.1
        below += length / 0.1**2 + loss / 0.1
    assert np.allclose(found.delta.numpy(), above / below, rtol=1e-5)
    plain = q_ffl(q=1.0)(torch.from_numpy(noisy), heard, {})
    assert plain.weights.sum() < 0.01 * found.weights.sum(), "with it, steps are next to nothing"


def test_q_ffl_survives_negative_losses_and_broken_updates():
    updates = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    updates[1] = math.nan
    found = q_ffl(q=0.5)(updates, facts(losses=[-5.0, 1.0, math.nan]), {})
    assert torch.isfinite(found.delta).all()
    assert found.weights[1] == 0.0
    with pytest.raises(BadInput, match="q-ffl"):
        q_ffl(q=-1)(updates, facts(losses=np.ones(3)), {})


# SCAFFOLD and FedDyn


def test_the_servers_control_is_the_mean_of_the_clients_controls_whoever_takes_part():
    generator = np.random.default_rng(0)
    own, told, everyone = np.zeros((3, 5)), {}, SIZES / SIZES.sum()
    for _ in range(20):
        here = np.flatnonzero(generator.random(3) < 0.6)
        if len(here) == 0:
            continue
        control = told.get("control", torch.zeros(5)).numpy().copy()
        updates = generator.standard_normal((len(here), 5)).astype(np.float32)
        known = facts(SIZES[here], here, records=100, public=told)
        told = scaffold()(torch.from_numpy(updates), known, {}).told.public
        for row, i in enumerate(here):
            own[i] += -updates[row] / (2 * 0.1) - control
        assert np.allclose(told["control"].numpy(), everyone @ own, atol=1e-4)


def test_a_client_drawn_twice_counts_with_its_last_turn():
    updates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    twice = facts(np.array([30.0, 10.0, 30.0]), [1, 0, 1], records=100)
    control = scaffold()(updates, twice, {}).told.public["control"]
    assert control.tolist() == pytest.approx([-0.3 * 2 / 0.2, -0.1 * 1 / 0.2 - 0.3 * 2 / 0.2])
    moved = feddyn()(updates, twice, {}).memory["feddyn_moved"]
    assert moved.tolist() == pytest.approx([0.3 * 2, 0.1 * 1 + 0.3 * 2])


def test_feddyn_equals_the_published_server_step():
    generator = np.random.default_rng(0)
    alpha, h, w, state = 0.3, np.zeros(5), np.zeros(5), {}
    for _ in range(4):
        updates = generator.standard_normal((3, 5)).astype(np.float32)
        found = feddyn()(torch.from_numpy(updates), facts(), state)
        state = found.memory
        shares = SIZES / SIZES.sum()
        mean = w + shares @ updates
        h = h - alpha * (mean - w)
        published = mean - h / alpha
        assert np.allclose(found.delta.numpy(), published - w, atol=1e-5)
        w = published


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_broken_and_poisoned_updates_do_not_enter_what_the_server_keeps(name):
    updates = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    updates[1], updates[2] = math.nan, 1e9
    found = FAIR_RULES[name]()(updates, facts(np.full(6, 10.0)), {})
    kept = found.told.public["control"] if name == "scaffold" else found.memory["feddyn_moved"]
    assert torch.isfinite(found.delta).all()
    assert kept.norm() < 1e3


@pytest.mark.parametrize("combine", ["uniform", "weiavg", "declared-variance"])
def test_the_combination_is_that_of_the_rule_named(combine):
    updates = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    known = facts(variances=0.5, steps_left=np.full(3, 9), step_budget=np.full(3, 12), rounds=6)
    plain = rules.RULES[combine]()(updates, known, {})
    assert torch.equal(scaffold(combine=combine)(updates, known, {}).delta, plain.delta)
    assert torch.equal(ali_dpfl(combine=combine)(updates, known, {}).delta, plain.delta)


# ALI-DPFL


def test_the_best_pace_is_the_published_formula():
    for clip, d, mu, gamma, t in [(1.0, 0.5, 1.0, 0.0, 100), (0.1, 0.0, 0.2, 0.3, 50), (2.0, 9.0, 3.0, 1.0, 1000)]:
        above = 4 / mu**2 + 3 * clip**2 + gamma * mu * t + d
        best = math.sqrt(1 + above / ((2 + 2 / t) * (clip**2 + d)))
        found = optimal_steps(clip=clip, noise_variance=d, convexity=mu, heterogeneity=gamma, budget=t)
        assert found == min(100, max(1, round(best)))
    assert optimal_steps(clip=1e-4, noise_variance=0, convexity=0.01, heterogeneity=5, budget=1000) == 100
    with pytest.raises(BadInput, match="convexity"):
        optimal_steps(clip=1, noise_variance=0, convexity=0, heterogeneity=0, budget=1)


def test_convexity_and_heterogeneity_are_found_in_quadratics_from_updates_alone():
    """F_i = ½μ‖w − t_i‖², noisy gradients: μ within a tenth, Γ = ½μ Σp‖t_i − t̄‖² within a tenth."""
    generator = np.random.default_rng(0)
    mu, lr, steps, d, spread = 1.7, 0.05, 2, 400, 0.02
    targets = generator.standard_normal((3, d))
    shares = SIZES / SIZES.sum()
    gamma = 0.5 * mu * float(shares @ ((targets - shares @ targets) ** 2).sum(1))
    w, state = 3 * np.ones(d), {}
    for _ in range(40):
        gradients = mu * (w - targets) + spread / math.sqrt(steps) * generator.standard_normal((3, d))
        updates = torch.from_numpy(-steps * lr * gradients).float()
        known = facts(
            variances=steps * (lr * spread) ** 2,
            lr=lr,
            steps_left=np.full(3, 900),
            step_budget=np.full(3, 1000),
            rounds=100,
        )
        found = ali_dpfl()(updates, known, state)
        state, w = found.memory, w + found.delta.double().numpy()
    assert found.diagnostics["convexity"] == pytest.approx(mu, rel=0.1)
    assert found.diagnostics["heterogeneity"] == pytest.approx(gamma, rel=0.1)


def test_the_pace_is_one_when_rounds_outlast_the_steps():
    updates = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    scarce = facts(variances=0.5, steps_left=np.full(3, 5), step_budget=np.full(3, 12), rounds=6)
    assert ali_dpfl()(updates, scarce, {}).next_steps == 1


# Theory


def test_theorem_1_is_the_published_bound():
    at = Convex(smoothness=4.0, convexity=0.5, gradient=2.0, heterogeneity=0.3, noise_variance=0.7, distance=1.5)
    for t, c in [(1, 1.0), (10, 0.8), (300, 1.4)]:
        a = 4.0 * c**3 + 3 * 4.0 * c**2 + 2 * 4.0 * 0.3 * c + 2 * 0.7
        assert theorem1(t, c, at) == pytest.approx(4.0 / (2 * t) * (a / (0.25 * (2 * c - 1)) + 1.5))
    with pytest.raises(BadInput, match="½"):
        theorem1(10, 0.5, at)


def test_the_coefficients_give_the_bound_as_a_function_of_lambda():
    """Numerator at the largest factor, denominator at the smallest: with Q0 = Q1 it is Theorem 1's bound exactly."""
    at = Convex(smoothness=4.0, convexity=0.5, gradient=2.0, heterogeneity=0.3, noise_variance=0.7, distance=1.5)
    a1, a2, a3, a4, a5 = coefficients(0.4, 0.4, at)
    for weight in (0.0, 0.3, 2.0):
        value = (a1 * weight**3 + a2 * weight**2 + a3 * weight + a4) / (a5 * weight + 1)
        assert 4.0 / (2 * 0.25 * 7) * value == pytest.approx(theorem1(7, 1 + 0.4 * weight, at))


def test_the_optimal_lambda_minimises_the_bound_where_its_condition_holds():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        a = generator.uniform(0.01, 5.0, 5)

        def bound(x, a=a):
            return (a[0] * x**3 + a[1] * x**2 + a[2] * x + a[3]) / (a[4] * x + 1)

        found = optimal_lambda(*a)
        best = optimize.minimize_scalar(bound, bounds=(0, 50), method="bounded", options={"xatol": 1e-10}).x
        assert bound(found.value) <= bound(best) + 1e-9
        if a[2] < a[3] * a[4]:
            held += 1
            roots = np.roots([2 * a[0] * a[4], 3 * a[0] + a[1] * a[4], 2 * a[1], a[2] - a[3] * a[4]])
            real = roots[np.abs(roots.imag) < 1e-7].real
            assert found.value == pytest.approx(real.max(), rel=1e-6)
            assert "positive root" in found.why
        else:
            assert found.value == 0.0
            assert "≥ a4·a5" in found.why
    assert 20 < held < 180


def test_where_losses_lie_on_both_sides_of_the_mean_the_answer_is_zero_and_says_why():
    at = Convex(smoothness=4.0, convexity=0.5, gradient=2.0)
    found = optimal_lambda(*coefficients(-0.5, 2.0, at))
    assert found.value == 0.0
    assert "Q0" in found.why


# Rounds from ε: the golden lists

Z = (1.0, 1.5, 2.0, 2.5, 3.0)


@pytest.mark.parametrize(
    ("loss", "rounds"),
    [
        ({}, [6, 114, 268, 463, 702]),
        ({"loss_noise": 5.0}, [6, 108, 237, 379, 525]),
        ({"loss_noise": 5.0, "same_batch": True}, [4, 97, 220, 355, 495]),
    ],
)
def test_the_published_round_budgets_on_the_strict_side(loss, rounds):
    assert [rounds_within(2.0, 1e-5, 0.05, z, accountant="rdp", **loss) for z in Z] == rounds


@pytest.mark.parametrize(
    ("loss", "rdp", "pld"),
    [
        ({}, 782, 914),
        ({"loss_noise": 5.0}, 688, 803),
        ({"loss_noise": 5.0, "same_batch": True}, 650, 763),
    ],
)
def test_table_4_affords_fewer_rounds_when_the_loss_counts(loss, rdp, pld):
    assert rounds_within(3.52, 1e-5, 0.05, 2.0, accountant="rdp", **loss) == rdp
    assert rounds_within(3.52, 1e-5, 0.05, 2.0, **loss) == pld


def test_several_steps_a_round_count_as_several_releases():
    once = rounds_within(2.0, 1e-5, 0.05, 2.0)
    assert rounds_within(2.0, 1e-5, 0.05, 2.0, steps=3) == once // 3
    with pytest.raises(BadInput, match="steps"):
        rounds_within(2.0, 1e-5, 0.05, 2.0, steps=0)


def test_a_budget_that_does_not_pay_for_one_round_affords_none():
    assert rounds_within(0.01, 1e-5, 1.0, 1.0) == 0
