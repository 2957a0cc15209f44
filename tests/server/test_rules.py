"""Aggregation rules over a round's rows: each against a plain reference in loops, with memory and participation."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino import methods
from sordino.errors import BadInput
from sordino.server import aggregate, directions, projected, rules
from sordino.server.facts import Facts, Outcome

LAYOUT = (("conv.weight", (4, 5, 3), 0), ("conv.bias", (4,), 60), ("fc.weight", (12, 10), 64))
SIZE = 184
LR, CLIP = 0.1, 1.0


def facts_of(clients, *, epsilons=None, round_number=1, dimension=None, layout=(), **more):
    """Facts of a round whose clients differ in size, batch, steps and noise, all by their number."""
    clients = np.asarray(clients, dtype=np.int64)
    numbers = clients.astype(float)
    batches, steps, noises = 16.0 * (1 + numbers % 3), 4.0 + numbers % 4, 0.5 + 0.25 * numbers
    variances = steps * (LR * CLIP * noises / batches) ** 2
    return Facts(
        clients=clients,
        sizes=100.0 + 50.0 * numbers,
        epsilons=np.asarray(epsilons) if epsilons is not None else 1.0 + numbers,
        batches=batches,
        noises=noises,
        steps=steps,
        variances=variances,
        selection=np.ones(len(clients)),
        layout=layout,
        round=round_number,
        **{"lr": LR, "true_variances": variances, "population": int(clients.max()) + 1, **more},
    )


def round_of(facts, *, dimension=4000, seed=0, reach=0.6):
    """Updates with the noise that the facts declare; steps go a common way and an own one, ``reach`` × η·C far."""
    rng = np.random.default_rng(seed)
    one_step = reach * LR * CLIP / np.sqrt(dimension)
    common = rng.normal(size=dimension)
    rows = [
        k * one_step * (0.9 * common + 0.4 * rng.normal(size=dimension)) + rng.normal(size=dimension) * np.sqrt(v)
        for k, v in zip(facts.steps, facts.variances)
    ]
    return torch.tensor(np.array(rows), dtype=torch.float32)


def told(facts, outcome):
    """The facts of the next round, with what the last one broadcast."""
    public, each = {**facts.public, **outcome.told.public}, {**facts.each, **outcome.told.each}
    return replace(facts, public=public, each=each)


def combined(weights, updates):
    total = torch.zeros(updates.shape[1])
    for weight, row in zip(weights, updates):
        total += float(weight) * row
    return total


@pytest.mark.parametrize("name", sorted(rules.RULES))
def test_rules_are_pure_and_their_state_fits_a_checkpoint(name):
    state, outcome = {}, Outcome(torch.zeros(SIZE), None)
    for number in (1, 2, 3):
        facts = told(facts_of(range(8), round_number=number, layout=LAYOUT), outcome)
        updates = round_of(facts, dimension=SIZE, seed=number)
        copy, kept = updates.clone(), dict(state)
        outcome = rules.RULES[name]()(updates, facts, state)
        again = rules.RULES[name]()(updates, facts, state)
        assert torch.equal(updates, copy)
        assert {k: id(v) for k, v in state.items()} == {k: id(v) for k, v in kept.items()}
        assert torch.equal(outcome.delta, again.delta)
        assert outcome.delta.shape == (SIZE,)
        assert torch.isfinite(outcome.delta).all()
        for held in (outcome.memory, outcome.told.public, outcome.told.each):
            json.dumps({k: v for k, v in held.items() if not isinstance(v, torch.Tensor)})
        json.dumps(outcome.diagnostics)
        if outcome.weights is not None:
            torch.testing.assert_close(outcome.delta, combined(outcome.weights, updates), rtol=1e-4, atol=1e-6)
        state = outcome.memory


@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"pfa", "pfa-plus", "random-effects"}))
def test_weights_are_a_distribution(name):
    facts = facts_of(range(8))
    weights = rules.RULES[name]()(round_of(facts), facts, {}).weights
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0)


def test_balanced_weights_are_the_best_of_their_kind():
    """No small move along the simplex lowers spread²‖w − p‖²/d + Σ w²κ²; κ² is the noise of a unit of the way."""
    facts = replace(facts_of([0, 3, 5, 7], layout=LAYOUT), rounds=50, clip=CLIP)
    weights = rules.balanced(spread=0.7).weights(facts)
    kappas = [v / ((LR * CLIP * k) ** 2 * 50) for v, k in zip(facts.variances, facts.steps)]
    shares = facts.sizes / facts.sizes.sum()

    def cost(w):
        return sum(0.7**2 / SIZE * (w[i] - shares[i]) ** 2 + w[i] ** 2 * kappas[i] for i in range(4))

    assert weights.sum() == pytest.approx(1.0)
    for i in range(4):
        for j in range(4):
            moved = weights.copy()
            moved[i] += 1e-4
            moved[j] -= 1e-4
            assert cost(moved) >= cost(weights) - 1e-15
    still = replace(facts, variances=np.zeros(4))
    assert rules.balanced().weights(still) == pytest.approx(shares)
    with pytest.raises(BadInput, match="spread"):
        rules.balanced(spread=0.0)


def test_known_weights_by_loops():
    facts = facts_of([0, 3, 5])
    updates = round_of(facts)
    sizes, epsilons, variances = (list(v) for v in (facts.sizes, facts.epsilons, facts.variances))
    expected = {
        "data-weighted": [n / sum(sizes) for n in sizes],
        "uniform": [1 / 3] * 3,
        "weiavg": [e / sum(epsilons) for e in epsilons],
        "declared-variance": [(1 / v) / sum(1 / u for u in variances) for v in variances],
        "optimum": [(1 / v) / sum(1 / u for u in variances) for v in variances],
    }
    norms = [sum(float(x) ** 2 for x in row) for row in updates]
    expected["column-norm"] = [(1 / n) / sum(1 / m for m in norms) for n in norms]
    for name, weights in expected.items():
        outcome = rules.RULES[name]()(updates, facts, {})
        np.testing.assert_allclose(outcome.weights, weights, rtol=1e-5, err_msg=name)
        torch.testing.assert_close(outcome.delta, combined(weights, updates), rtol=1e-4, atol=1e-6)


def test_importance_weights_of_the_selection_enter_plain_averages():
    facts = facts_of([0, 1])
    from dataclasses import replace

    facts = replace(facts, selection=np.array([0.5, 2.0]))
    updates = round_of(facts)
    np.testing.assert_allclose(rules.uniform()(updates, facts, {}).weights, [0.25, 1.0])
    np.testing.assert_allclose(rules.data_weighted()(updates, facts, {}).weights, [0.5 * 100 / 250, 2 * 150 / 250])


def test_an_update_that_a_rule_remembers_is_not_the_steps_to_write_over():
    facts, plain = facts_of([0, 1]), rules.uniform()
    updates = round_of(facts)
    assert plain(updates, facts, {}).own

    def combine(updates, facts, memory):
        found = plain.combine(updates, facts, memory)
        return replace(found, memory={"last": found.delta})

    assert not replace(plain, combine=combine)(updates, facts, {}).own


def test_public_data_takes_all_of_weiavg():
    facts = facts_of([0, 1, 2], epsilons=[1.0, np.inf, 5.0])
    assert rules.weiavg()(round_of(facts), facts, {}).weights.tolist() == [0.0, 1.0, 0.0]


def test_optimum_needs_a_simulation():
    facts = facts_of([0, 1])
    facts = replace(facts, true_variances=None)
    with pytest.raises(BadInput, match="only a simulation knows"):
        rules.optimum()(round_of(facts), facts, {})


def test_noise_power_is_shown_for_every_rule_with_weights():
    facts = facts_of(range(8))
    updates = round_of(facts)
    for name in ("uniform", "robust-hdp", "optimum"):
        outcome = rules.RULES[name]()(updates, facts, {})
        power = sum(w * w * v / LR**2 for w, v in zip(outcome.weights, facts.variances))
        assert outcome.diagnostics["noise_power"] == pytest.approx(power)
        assert outcome.diagnostics["least_noise_power"] <= power * (1 + 1e-9)
    assert outcome.diagnostics["noise_power"] == pytest.approx(outcome.diagnostics["least_noise_power"])


def test_unknown_options_are_refused_with_those_that_exist():
    def study(name, **options):
        return methods.get("dp-fedavg", {"aggregate": {"name": name, **options}})

    with pytest.raises(BadInput, match="'robust-hdp' has no option 'evry': did you mean 'every'"):
        study("robust-hdp", evry=3)
    with pytest.raises(BadInput, match="'robust-hdp' has no option 'xyz': use every, rows"):
        study("robust-hdp", xyz=3)
    with pytest.raises(BadInput, match="it has none"):
        study("uniform", every=3)


class TestRobustHdp:
    def test_weights_are_those_of_the_column_matrix(self):
        facts = facts_of(range(8))
        updates = round_of(facts)
        outcome = rules.robust_hdp()(updates, facts, {})
        np.testing.assert_allclose(outcome.weights, aggregate.robust_hdp(updates.T), rtol=1e-4)
        assert outcome.diagnostics["converged"]
        assert len(outcome.diagnostics["low_rank_singular_values"]) == 8
        top = np.linalg.svd(updates.numpy(), compute_uv=False)
        np.testing.assert_allclose(outcome.diagnostics["update_singular_values"], top, rtol=1e-3)

    def test_every_third_round_estimates_and_the_others_remember(self):
        rule, state, weights = rules.robust_hdp(every=3), {}, []
        for number in range(1, 6):
            facts = facts_of(range(8), round_number=number)
            outcome = rule(round_of(facts, seed=number), facts, state)
            state = outcome.memory
            weights.append(outcome.weights)
        np.testing.assert_allclose(weights[0], weights[1])
        np.testing.assert_allclose(weights[0], weights[2])
        assert not np.allclose(weights[0], weights[3], rtol=1e-3)
        np.testing.assert_allclose(weights[3], weights[4])

    def test_remembered_variances_follow_a_change_of_learning_rate(self):
        from dataclasses import replace

        facts = facts_of(range(8))
        first = rules.robust_hdp(every=10)(round_of(facts), facts, {})
        later = replace(facts, round=2, variances=facts.variances / 100)
        second = rules.robust_hdp(every=10)(round_of(facts) / 10, later, first.memory)
        np.testing.assert_allclose(
            second.diagnostics["estimated_variances"], np.array(first.diagnostics["estimated_variances"]) / 100
        )

    def test_a_client_seen_for_the_first_time_asks_for_an_estimate(self):
        facts = facts_of([0, 1, 2, 4])
        first = rules.robust_hdp(every=10)(round_of(facts), facts, {})
        known = facts_of([2, 4, 1], round_number=2)
        assert "converged" not in rules.robust_hdp(every=10)(round_of(known), known, first.memory).diagnostics
        new = facts_of([2, 3, 1], round_number=2)
        assert "converged" in rules.robust_hdp(every=10)(round_of(new), new, first.memory).diagnostics

    def test_senseless_options_are_refused(self):
        with pytest.raises(BadInput, match="every"):
            rules.robust_hdp(every=0)


class TestFactorHdp:
    def test_the_first_round_is_a_plain_fit_and_later_ones_pool(self):
        state, off = {}, []
        for number in range(1, 7):
            facts = facts_of(range(10), round_number=number)
            outcome = rules.factor_hdp(rounds=4)(round_of(facts, dimension=600, seed=number), facts, state)
            state = outcome.memory
            estimates = np.array(outcome.diagnostics["estimated_variances"])
            own = facts.variances + (0.4 * 0.6 * LR * CLIP * facts.steps) ** 2 / 600  # what no one shares is noise
            off.append(np.abs(np.log(estimates / own)).mean())
            assert outcome.diagnostics["rounds"] == min(number, 4)
            if number == 1:
                plain = aggregate.factor_hdp(round_of(facts, dimension=600, seed=1).T)
                np.testing.assert_allclose(outcome.weights, plain, rtol=1e-4)
        assert np.mean(off[3:]) < 0.8 * off[0]

    def test_rounds_with_different_participants_pool(self):
        state = {}
        for number, who in enumerate(([0, 1, 2, 3, 4], [3, 9, 4, 1, 7], [0, 7, 9, 2, 5]), start=1):
            facts = facts_of(who, round_number=number)
            outcome = rules.factor_hdp()(round_of(facts, seed=number), facts, state)
            state = outcome.memory
        own = facts.variances + (0.4 * 0.6 * LR * CLIP * facts.steps) ** 2 / 4000
        np.testing.assert_allclose(outcome.diagnostics["estimated_variances"], own, rtol=0.2)

    def test_too_few_clients_are_weighed_as_they_declare(self):
        facts = facts_of([0, 4, 6])
        outcome = rules.factor_hdp()(round_of(facts), facts, {})
        np.testing.assert_allclose(outcome.weights, rules.declared_variance()(round_of(facts), facts, {}).weights)
        assert "declared" in outcome.diagnostics["fallback"]

    def test_virtual_copies_of_a_client_are_rows_like_others(self):
        facts = facts_of([0, 1, 1, 2, 3, 4])
        outcome = rules.factor_hdp()(round_of(facts), facts, {})
        assert outcome.weights.sum() == pytest.approx(1.0)
        assert outcome.weights[1] == pytest.approx(outcome.weights[2], rel=0.2)


class TestRandomEffects:
    def test_the_first_round_is_that_of_the_column_matrix_with_the_length_of_a_plain_average(self):
        facts = facts_of(range(8))
        updates = round_of(facts)
        outcome = rules.random_effects()(updates, facts, {})
        shares = facts.sizes / facts.sizes.sum()
        plain = aggregate.random_effects(updates.T, facts.variances, steps=facts.steps, shares=shares)
        np.testing.assert_allclose(outcome.weights / outcome.weights.sum(), plain, rtol=1e-4)
        votes = np.array(outcome.diagnostics["votes"])
        assert votes.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(outcome.weights @ facts.steps, shares @ facts.steps)

    def test_memory_averages_the_spread_over_rounds(self):
        """By loops: the average of the noise-free Gram matrices, weighted by memory^age."""
        from sordino.server import spread

        state, history = {}, []
        for number in range(1, 5):
            facts = facts_of(range(6), round_number=number)
            updates = round_of(facts, seed=number)
            per_step = updates.double().numpy() / facts.steps[:, None]
            variances = facts.variances / facts.steps**2
            history.append(per_step @ per_step.T / updates.shape[1] - np.diag(variances))
            outcome = rules.random_effects(memory=0.5)(updates, facts, state)
            state = outcome.memory
        ages = 0.5 ** np.arange(4)[::-1]
        average = sum(a * g for a, g in zip(ages, history)) / ages.sum()
        worth = ages.sum() ** 2 / (ages**2).sum()
        expected = spread.reml(average + np.diag(variances), variances, worth * 4000)
        assert outcome.diagnostics["spread"] == pytest.approx(expected.estimate, rel=1e-3)
        assert outcome.diagnostics["spread_error"] == pytest.approx(expected.error, rel=1e-3)

    def test_any_participants_in_any_round(self):
        state = {}
        for number, who in enumerate(([0, 1, 2], [5, 1], [7], [2, 2, 5, 0]), start=1):
            facts = facts_of(who, round_number=number)
            outcome = rules.random_effects()(round_of(facts), facts, state)
            assert np.isfinite(outcome.weights).all()
            assert (outcome.weights >= 0).all()
            state = outcome.memory

    LAYERS = (("a.weight", (1500,), 0), ("a.bias", (500,), 1500), ("b.weight", (2000,), 2000))

    def test_layers_are_weighed_apart_as_if_each_were_the_whole_model(self):
        state, apart = {}, {"a": {}, "b": {}}
        for number in (1, 2, 3):
            facts = facts_of(range(6), layout=self.LAYERS, round_number=number)
            updates = round_of(facts, seed=number)
            outcome = rules.random_effects(per_layer=True)(updates, facts, state)
            state = outcome.memory
            for name, part in (("a", slice(0, 2000)), ("b", slice(2000, 4000))):
                alone = rules.random_effects()(updates[:, part], replace(facts, layout=()), apart[name])
                apart[name] = alone.memory
                torch.testing.assert_close(outcome.delta[part], alone.delta, rtol=1e-4, atol=1e-6)
                assert outcome.diagnostics["layers"][name]["votes"] == pytest.approx(alone.diagnostics["votes"])

    def test_clients_that_differ_about_one_layer_only_are_heard_by_their_noise_in_the_other(self):
        """Variances far apart: by noise alone one client has nearly all the vote, by shares everyone has a sixth."""
        facts = facts_of(range(6), layout=self.LAYERS, clip=1000.0)
        quiet = np.array([1e-4, 1.0, 1.0, 1.0, 1.0, 1.0])
        facts = replace(facts, steps=np.ones(6), sizes=np.full(6, 100.0), variances=quiet)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(6, 4000, generator=generator) * torch.from_numpy(facts.variances).float().sqrt()[:, None]
        noise[:, 2000:] += torch.randn(6, 2000, generator=generator)
        found = rules.random_effects(per_layer=True, horizon=1.0)(noise, facts, {}).diagnostics["layers"]
        assert max(found["a"]["votes"]) > 0.9
        assert max(found["b"]["votes"]) < 0.4
        whole = rules.random_effects(horizon=1.0)(noise, facts, {}).diagnostics["votes"]
        assert max(whole) < 0.5, "together, the layer that clients differ about decides for both"

    def test_noise_power_of_layers_is_the_mean_over_coordinates(self):
        facts = facts_of(range(6), layout=self.LAYERS)
        outcome = rules.random_effects(per_layer=True, per_step=False)(round_of(facts), facts, {})
        votes = {name: np.array(one["votes"]) for name, one in outcome.diagnostics["layers"].items()}
        power = [float(votes[name] ** 2 @ facts.variances) for name in ("a", "b")]
        rate = facts.lr
        assert outcome.diagnostics["noise_power"] == pytest.approx(np.mean(power) / rate**2, rel=1e-6)

    @pytest.mark.parametrize("options", [{"noise": "factor"}, {"spread_by": "structured"}, {"per_step": False}])
    def test_variants_run(self, options):
        facts = facts_of(range(8))
        outcome = rules.random_effects(**options)(round_of(facts), facts, {})
        assert sum(outcome.diagnostics["votes"]) == pytest.approx(1.0)

    @pytest.mark.parametrize("options", [{"noise": "guess"}, {"memory": 1.0}, {"spread_by": "x"}])
    def test_senseless_options_are_refused(self, options):
        facts = facts_of([0, 1])
        with pytest.raises(BadInput, match=next(iter(options))):
            rules.random_effects(**options)(round_of(facts), facts, {})


class TestPfa:
    EPSILONS = (0.5, 0.6, 0.4, 5.0, 6.0, 5.5)

    def plain(self, updates, epsilons, public, k):
        """Per tensor, with the full SVD of the centred public updates."""
        updates, epsilons = updates.double().numpy(), np.array(epsilons)
        private = [i for i in range(len(epsilons)) if i not in public]
        mean = lambda rows: sum(epsilons[i] * updates[i] for i in rows) / sum(epsilons[i] for i in rows)  # noqa: E731
        centre = updates[public].mean(0) if len(public) > 1 else np.zeros(updates.shape[1])
        answer = mean(private)
        for _, shape, offset in LAYOUT:
            part = slice(offset, offset + int(np.prod(shape)))
            rows = updates[public][:, part] - centre[part]
            basis = np.linalg.svd(rows.T, full_matrices=False)[0][:, : min(k, max(1, len(public) - 1))]
            answer[part] = centre[part] + basis @ basis.T @ (answer[part] - centre[part])
        share = epsilons[public].sum() / epsilons.sum()
        return share * mean(public) + (1 - share) * answer

    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_equals_the_projection_by_full_svd_per_tensor(self, k):
        facts = facts_of(range(6), epsilons=self.EPSILONS, layout=LAYOUT)
        updates = round_of(facts, dimension=SIZE)
        outcome = rules.pfa(directions=k)(updates, facts, {})
        assert outcome.diagnostics["public"] == [3, 4, 5]
        np.testing.assert_allclose(outcome.delta, self.plain(updates, self.EPSILONS, [3, 4, 5], k), atol=1e-6)

    def test_one_public_client_is_its_own_direction(self):
        facts = facts_of(range(6), epsilons=self.EPSILONS, layout=LAYOUT)
        updates = round_of(facts, dimension=SIZE)
        outcome = rules.pfa(split="top-share", share=0.1)(updates, facts, {})
        assert outcome.diagnostics["public"] == [4]
        np.testing.assert_allclose(outcome.delta, self.plain(updates, self.EPSILONS, [4], 1), atol=1e-6)

    def test_who_is_public(self):
        rows = projected.public_rows
        assert rows(np.array([0.2, 0.25, 0.3, 4.0, 5.0]), "mixture", 0.1).tolist() == [False] * 3 + [True] * 2
        assert rows(np.array([1.0, np.inf, 50.0]), "mixture", 0.1).tolist() == [False, True, False]
        assert rows(np.full(4, 2.0), "mixture", 0.1).all()
        assert rows(np.arange(1.0, 21.0), "top-share", 0.1).nonzero()[0].tolist() == [18, 19]
        with pytest.raises(BadInput, match="split"):
            rules.pfa(split="halves")
        with pytest.raises(BadInput, match="share"):
            rules.pfa_plus(split="top-share", share=1.5)

    def test_equal_budgets_are_a_plain_average(self):
        facts = facts_of(range(4), epsilons=[2.0] * 4)
        updates = round_of(facts)
        torch.testing.assert_close(rules.pfa()(updates, facts, {}).delta, updates.mean(0), rtol=1e-4, atol=1e-6)


class TestPfaPlus:
    FACTS = facts_of(range(6), epsilons=TestPfa.EPSILONS, layout=LAYOUT)

    def test_warms_up_as_pfa_and_then_projects_on_the_basis_of_the_round_before(self):
        first, second = (round_of(self.FACTS, dimension=SIZE, seed=seed) for seed in (1, 2))
        warm = rules.pfa_plus(directions=2)(first, self.FACTS, {})
        torch.testing.assert_close(warm.delta, rules.pfa(directions=2)(first, self.FACTS, {}).delta)
        basis = warm.told.public["basis"]
        outcome = rules.pfa_plus(directions=2)(second, told(self.FACTS, warm), warm.memory)
        private = (0.5 * second[0] + 0.6 * second[1] + 0.4 * second[2]) / 1.5
        public = (5.0 * second[3] + 6.0 * second[4] + 5.5 * second[5]) / 16.5
        centre = second[3:].mean(0)
        expected = centre.clone()
        for _, shape, offset in LAYOUT:
            part = slice(offset, offset + int(np.prod(shape)))
            expected[part] += basis[part] @ (basis[part].T @ (private - centre)[part])
        torch.testing.assert_close(outcome.delta, (16.5 * public + 1.5 * expected) / 18.0, rtol=1e-4, atol=1e-6)

    def test_coefficients_are_enough(self):
        """Private rows that hold only what k numbers per tensor say give the very same step."""
        first, second = (round_of(self.FACTS, dimension=SIZE, seed=seed) for seed in (1, 2))
        known = told(self.FACTS, rules.pfa_plus(directions=2)(first, self.FACTS, {}))
        sent = directions.coefficients(second[:3], known.public["basis"], LAYOUT)
        assert sent.shape == (3, 2 * len(LAYOUT))
        rows = torch.cat([directions.expand(sent, known.public["basis"], LAYOUT), second[3:]])
        whole, short = (rules.pfa_plus(directions=2)(u, known, {}).delta for u in (second, rows))
        torch.testing.assert_close(short, whole, rtol=1e-4, atol=1e-6)

    def test_what_a_client_uploads_is_what_it_was_told_and_a_broken_one_is_refused(self):
        first, second = (round_of(self.FACTS, dimension=SIZE, seed=seed) for seed in (1, 2))
        rule = rules.pfa_plus(directions=2)
        known = told(self.FACTS, rule(first, self.FACTS, {}))
        assert known.each["private"][:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        sent = directions.coefficients(second, known.public["basis"], LAYOUT)
        sent[3:], rows = 0.0, second.clone()
        rows[:3] = 0.0
        whole = rule(second, known, {}).delta
        heard = replace(known, uploads={"coefficients": sent})

        def received():
            return rule(rule.receive({"update": rows, "coefficients": sent}, heard), heard, {})

        torch.testing.assert_close(received().delta, whole, rtol=1e-4, atol=1e-6)
        sent[1] = math.nan
        assert torch.isfinite(received().delta).all()
        assert "client 1 refused" in received().diagnostics["log"][0]

    def test_the_basis_is_orthonormal_in_every_tensor_or_zero(self):
        basis = rules.pfa_plus(directions=3)(round_of(self.FACTS, dimension=SIZE), self.FACTS, {}).told.public["basis"]
        for part in directions.tensors(LAYOUT, SIZE):
            inner = basis[part].T @ basis[part]
            expected = torch.diag(torch.tensor([1.0, 1.0, 0.0]))  # three centred updates have two directions
            torch.testing.assert_close(inner, expected, rtol=1e-4, atol=1e-5)

    def test_a_round_without_public_clients_keeps_the_basis(self):
        before = rules.pfa_plus()(round_of(self.FACTS, dimension=SIZE), self.FACTS, {})
        alone = told(facts_of([0], epsilons=[0.5], layout=LAYOUT, round_number=2), before)
        outcome = rules.pfa_plus()(round_of(alone, dimension=SIZE), alone, before.memory)
        assert torch.isfinite(outcome.delta).all()
        assert torch.equal(outcome.told.public["basis"], before.told.public["basis"])
        with pytest.raises(BadInput, match="directions"):
            rules.pfa_plus(directions=0)
