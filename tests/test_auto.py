"""auto: what it chooses, from what, and that it can be told otherwise."""

import math

import numpy as np
import pytest

import sordino as sd
from sordino import methods, models
from sordino.errors import BadInput
from sordino.methods import auto
from sordino.methods.auto import Learner, Rule
from sordino.methods.training import Population
from sordino.privacy.types import Budget

LEARNER = Learner(dimension=1970, classes=10, reach=1.0)


def people(sizes=(140, 90, 200), epsilons=(0.5, 1.0, 4.0), delta=1e-5):
    names = tuple(f"site-{k}" for k in range(len(sizes)))
    return Population(names, np.array(sizes), tuple(Budget(e, delta) for e in epsilons))


def settled(given=None, who=None, learner=LEARNER, name="auto", rule=auto.RULE):
    return methods.settle(methods.get(name), given or {}, who or people(), learner, 0, rule)


def plain_weights(shares, noise, spread):
    """The constrained least squares, solved by its conditions of optimality."""
    n = len(shares)
    system = np.zeros((n + 1, n + 1))
    for i in range(n):
        system[i, i] = 2 * (spread**2 + noise[i] ** 2)
        system[i, n] = system[n, i] = 1.0
    right = np.append(2 * spread**2 * np.asarray(shares), 1.0)
    return np.linalg.solve(system, right)[:n]


def test_the_noise_on_an_output_at_the_end_is_what_the_rule_says():
    plan = settled()
    training = plan.training
    noise = []
    for client in plan.clients:  # κ_i, each by itself
        noise.append(client.noise / (client.terms.divisor * math.sqrt(training.rounds)))
    sizes = plan.population.sizes
    weights = plain_weights(sizes / sizes.sum(), noise, 0.5 / math.sqrt(LEARNER.dimension))
    combined = math.sqrt(sum(w**2 * k**2 for w, k in zip(weights, noise)))
    way = sum(
        training.lr * training.clip * training.server_rate(t, training.rounds) for t in range(1, training.rounds + 1)
    )
    assert way * combined * LEARNER.reach == pytest.approx(auto.RULE.target(10), rel=0.01)
    assert (weights >= 0).all()


def test_every_budget_is_kept_and_used_up():
    plan = settled()
    for client in plan.clients:
        assert client.epsilon <= client.budget.epsilon
        assert client.epsilon > 0.99 * client.budget.epsilon


def test_outputs_that_move_further_get_shorter_steps():
    near, far = settled(), settled(learner=Learner(1970, 10, 4.0))
    assert far.training.lr == pytest.approx(near.training.lr / 4, rel=0.01)


def test_more_records_or_budget_mean_more_rounds_between_the_limits():
    rounds = [settled(who=people((n, n, n))).training.rounds for n in (30, 3_000, 30_000, 3_000_000)]
    assert rounds == sorted(rounds)
    assert rounds[0] == auto.FEWEST
    assert rounds[-1] == auto.MOST
    assert rounds[1] < rounds[2]


def test_small_batches_are_taken_where_they_cost_no_noise():
    strict = settled(who=people(epsilons=(0.1, 0.1, 0.1))).training
    loose = settled(who=people(epsilons=(8.0, 8.0, 8.0))).training
    assert strict.rate < loose.rate
    for training, epsilon in ((strict, 0.1), (loose, 8.0)):
        steps = training.rounds
        chosen = sd.privacy.calibrate(epsilon, 1e-5, training.rate, steps) / training.rate
        full = sd.privacy.calibrate(epsilon, 1e-5, 1.0, steps, "full")
        assert chosen <= auto.SPARED * full


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"rounds": 7}, {"rounds": 7}),
        ({"lr": 0.25}, {"lr": 0.25}),
        ({"clip": 3.0}, {"clip": 3.0}),
        ({"batch": 20.0}, {"batch": 20.0, "rate": None}),
        ({"rate": 0.4, "cooldown": 0.0}, {"rate": 0.4, "cooldown": 0.0}),
        ({"evaluate": 3}, {"evaluate": 3}),
    ],
    ids=str,
)
def test_every_choice_can_be_overridden(given, seen):
    training = settled(given).training
    assert {key: getattr(training, key) for key in seen} == seen


def test_the_step_is_as_long_whatever_the_clip_and_the_number_of_local_steps():
    usual = settled({"rounds": 50, "rate": 0.2}).training
    assert settled({"rounds": 50, "rate": 0.2, "clip": 4.0}).training.lr == pytest.approx(usual.lr / 4, rel=0.01)
    many = settled({"rounds": 50, "rate": 0.2, "steps": 4}).training
    assert many.lr < usual.lr / 2


@pytest.mark.parametrize("name", ["dp-fedavg", "weiavg", "robust-hdp", "privacy-aware", "fedfdp"])
def test_other_methods_keep_their_defaults_and_may_ask(name):
    plain = settled(name=name).training
    assert (plain.rounds, plain.lr, plain.clip) == (40, 0.5, 1.0)
    asked = settled({"rounds": "auto", "lr": "auto", "clip": "auto", "rate": "auto"}, name=name)
    assert asked.training.rounds >= auto.FEWEST
    assert 0 < asked.training.lr < 100
    assert len(asked.why) == 4


def test_where_fewer_clients_are_averaged_steps_are_shorter():
    given = {"rounds": 100, "rate": 0.2, "lr": "auto"}
    who = people((100,) * 8, (1.0,) * 8)
    few = settled({**given, "select": 2}, who, name="unbiased").training.lr
    every = settled(given, who, name="dp-fedavg").training.lr
    assert few < every


def test_regression_and_two_classes_have_targets_of_their_own():
    rule = Rule(noise=10.0, power=1.0, regression=0.5)
    assert (rule.target(10), rule.target(2), rule.target(None)) == (1.0, 5.0, 0.5)
    real = settled(learner=Learner(29, None, 1.0), rule=rule).training.lr
    two = settled(learner=Learner(29, 2, 1.0), rule=rule).training.lr
    assert two == pytest.approx(10 * real, rel=0.02)


def test_without_any_budget_it_still_trains_and_is_not_private():
    plan = settled(who=people(epsilons=(math.inf,) * 3))
    assert plan.training.rounds == auto.MOST
    assert not plan.private
    assert "no noise" in plan.why[-1]


def test_only_some_settings_can_be_automatic():
    with pytest.raises(BadInput, match=r"training\.steps cannot be"):
        settled({"steps": "auto"})


def test_the_choice_sees_no_record(digits, monkeypatch):
    """Records of another kind, sizes and budgets the same: the same plan."""
    from dataclasses import replace

    other = replace(digits, x=np.random.default_rng(0).random(digits.x.shape, dtype=np.float32), y=digits.y * 0)
    one, two = sd.plan(digits), sd.plan(other)
    assert one.why == two.why
    assert one.plan.training == two.plan.training


@pytest.mark.parametrize(
    ("shape", "ranged", "name", "features"),
    [
        ((1, 8, 8), None, "scatter-linear", None),
        ((3, 32, 32), None, "scatter-linear", None),
        ((1, 6, 6), None, "linear", "unit"),
        ((12,), None, "linear", "unit"),
        ((12,), (5, 0.0, 1.0), "linear", {"name": "binned", "columns": 5, "low": 0.0, "high": 1.0}),
    ],
    ids=str,
)
def test_the_model_follows_from_what_records_are(shape, ranged, name, features):
    found, options = models.usual(shape, ranged, {})
    assert found == name
    assert options.get("features") == features
    model = models.build(found, shape, 3, **options)
    assert models.reach(model, shape) == pytest.approx(1.0, abs=0.01)


def test_reach_is_the_length_of_outputs_gradients():
    model = models.build("logistic", (4,), 3)
    import torch

    drawn = torch.rand((16, 4), generator=torch.Generator().manual_seed(0))
    wanted = math.sqrt(float((drawn.square().sum(1) + 1).mean()))  # weights of one output see x, its bias 1
    assert models.reach(model, (4,)) == pytest.approx(wanted, rel=1e-5)


def test_a_network_keeps_its_noise_below_a_few_sizes_of_its_weights():
    model = models.build("cnn-small", (1, 8, 8), 10)
    numbers = [float(one) for p in model.parameters() for one in p.detach().flatten()]
    size = math.sqrt(sum(one**2 for one in numbers) / len(numbers))
    assert models.weight_size(model) == pytest.approx(size, rel=1e-5)
    assert models.weight_size(models.build("scatter-linear", (1, 8, 8), 10)) == math.inf
    free, bound = settled(), settled(learner=Learner(1970, 10, 1.0, size))
    assert bound.training.lr < free.training.lr
    wide = settled(learner=Learner(1970, 10, 1.0, 1e6))
    assert wide.training.lr == free.training.lr


def test_a_network_learns_by_default(digits):
    run = sd.train(digits, model="mlp", rounds=60)
    assert run.result["final"]["accuracy"] > 0.4


def test_a_default_run_learns_and_says_what_it_chose(digits, tmp_path):
    run = sd.train(digits, out=tmp_path / "run", rounds=60)
    study = run.result["study"]
    assert study["method"]["name"] == "auto"
    assert study["model"]["name"] == "scatter-linear"
    assert any(line.startswith("lr ") for line in study["auto"])
    assert study["training"]["rounds"] == 60
    assert run.result["final"]["accuracy"] > 0.5
    again = sd.train(digits, rounds=60)
    assert again.result["checksum"] == run.result["checksum"]


def test_a_table_learns_by_default():
    clients = sd.data.load("breast-cancer").partition("iid", clients=3, seed=0).with_budgets(2.0, delta=1e-4)
    run = sd.train(clients)
    assert run.result["study"]["model"]["features"]["name"] == "binned"
    assert run.result["final"]["accuracy"] > 0.88


def test_an_unpartitioned_data_set_is_told_what_is_missing():
    with pytest.raises(BadInput, match="partition"):
        sd.train(sd.data.load("digits"))


def test_the_plan_says_what_was_chosen_and_why(in_folder, tmp_path):
    (tmp_path / "study.toml").write_text(
        '[data]\nname = "digits"\npartition = "iid"\nclients = 3\n[budgets]\nepsilon = 2.0\n'
    )
    code, out, _ = in_folder("plan", "study.toml")
    assert code == 0
    for word in ("auto rounds", "auto rate", "auto lr", "auto clip"):
        assert word in out
    code, out, _ = in_folder("plan", "study.toml", "--set", "study.rounds=5", "--set", "training.lr=0.5")
    assert "auto rounds" not in out
    assert "auto lr" not in out


def test_a_plan_shows_every_setting_as_it_was_settled(digits):
    plain = sd.plan(digits, "logistic", "dp-fedavg", clip=0.25)
    assert plain.settings == {
        "rounds": 40, "lr": 0.5, "server_lr": 1.0, "cooldown": 0.0, "pull": 0.0, "clip": 0.25, "sampling": "poisson",
        "evaluate": 1,
    }  # fmt: skip
    chosen = sd.plan(digits, "logistic", augment={"copies": 2, "shift": 1}).settings
    assert chosen["lr"] != 0.5
    assert chosen["augment"]["copies"] == 2
