"""Personal models: equal to loops on a blackboard, judged and kept by client, alone at λ = 0, deployed as simulated."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_rig import Rig, simulated, table
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import sordino as sd
from sordino import methods
from sordino.errors import BadInput
from sordino.study.run import prepare

_spec = importlib.util.spec_from_file_location("plain_fair", Path(__file__).with_name("plain_fair.py"))
plain = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain)

SETTINGS = {"rounds": 5, "rate": 0.2, "lr": 0.3, "clip": 0.7}


def pulled(weight):
    return methods.get("mr-mtl", {"local": {"name": "mr-mtl", "weight": weight}})


def tuned(alone=0.4, head=False):
    return methods.get("fine-tuned", {"aggregate": {"name": "fine-tuned", "alone": alone, "head": head}})


def trained(clients, method, model="logistic", **more):
    return sd.train(clients, model, method, seed=0, **{**SETTINGS, **more})


def blackboard(clients, method, model="logistic", **more):
    return plain.Plain(prepare(clients, model, method, 0, None, {**SETTINGS, **more}))


def plain_mr_mtl(p, weight):
    """Everybody's own w_k and their mean, from all rounds; the gradient of the pull is written out."""
    own, mean = [p.start.clone() for _ in p.everyone], p.start.clone()
    for number in range(1, p.rounds + 1):
        for i in p.everyone:
            terms = p.plan.clients[i].terms
            for step, where in enumerate(p.batches(i, number, terms)):
                g = p.gradient(own[i], i, number, step, where, terms)
                own[i] = own[i] - p.lr * (g + weight * (own[i] - mean))
        mean = sum(share * w for share, w in zip(p.shares, own))
    return mean, own


def plain_fine_tuned(p, together, moving):
    """FedAvg, then everybody alone; ``moving`` says which parameters move then."""
    w = p.start.clone()
    own = [w.clone() for _ in p.everyone]
    for number in range(1, p.rounds + 1):
        for i in p.everyone:
            terms = p.plan.clients[i].terms
            own[i] = own[i] if number > together + 1 else w.clone()
            for step, where in enumerate(p.batches(i, number, terms)):
                g = p.gradient(own[i], i, number, step, where, terms)
                own[i] = own[i] - p.lr * (g if number <= together else g * moving)
        if number <= together:
            w = sum(share * one for share, one in zip(p.shares, own))
    return w, own


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_mr_mtl_equals_a_plain_loop(digits, weight, steps):
    run = trained(digits, pulled(weight), steps=steps)
    mean, own = plain_mr_mtl(blackboard(digits, pulled(weight), steps=steps), weight)
    assert_close(run.weights, mean)
    assert_close(run.personal, torch.stack(own))


def test_a_strong_pull_ends_each_step_at_the_mean_and_does_not_diverge(digits):
    """ηλ ≥ 1 goes all the way back and not beyond: then λ no longer matters."""
    runs = [sd.train(digits, "logistic", pulled(w), rounds=3, lr=0.5, rate=0.2) for w in (2.0, 1e6)]
    gap = runs[0].personal - runs[0].weights
    assert gap.norm(dim=1).max() < 50
    assert torch.isfinite(runs[1].personal).all()


@pytest.mark.parametrize("head", [False, True])
def test_fine_tuned_equals_a_plain_loop(digits, head):
    run = trained(digits, tuned(head=head), "mlp", steps=2)
    p = blackboard(digits, tuned(head=head), "mlp", steps=2)
    last = sum(one.numel() for one in list(run.template.parameters())[-2:])
    moving = torch.ones_like(p.start)
    moving[: len(moving) - last if head else 0] = 0
    w, own = plain_fine_tuned(p, 3, moving)
    assert_close(run.weights, w)
    assert_close(run.personal, torch.stack(own))
    changed = (run.personal - run.weights).abs().amax(0) > 0
    assert changed.any()
    assert not changed[moving == 0].any()


def test_every_client_is_judged_by_its_own_model(digits, tmp_path):
    run = trained(digits, pulled(0.2), steps=2, out=tmp_path / "run")
    assert run.result["personal"] is True
    assert "personal" not in trained(digits, "dp-fedavg").result
    for name, held, accuracy, loss in zip(
        digits.names, digits.test, run.result["final"]["client_accuracy"], run.result["final"]["client_loss"]
    ):
        x, y = torch.from_numpy(digits.x[held]), torch.from_numpy(digits.y[held])
        with torch.no_grad():
            out = run.model_of(name)(x)
        assert accuracy == pytest.approx(float((out.argmax(1) == y).double().mean()))
        assert loss == pytest.approx(float(cross_entropy(out, y)), rel=1e-5)
    assert run.metrics[-1]["client_loss"] == run.result["final"]["client_loss"]
    for again in (sd.load(tmp_path / "run"), run):
        again.save(tmp_path / "saved")
        kept = sd.load(tmp_path / "saved")
        torch.testing.assert_close(kept.personal, run.personal, rtol=0, atol=0)
    before = run.model.state_dict()["1.weight"].clone()
    kept.model_of(digits.names[2])
    assert torch.equal(before, run.model.state_dict()["1.weight"])
    with pytest.raises(BadInput, match="'nobody' is unknown"):
        run.model_of("nobody")
    with pytest.raises(BadInput, match="no models of clients' own"):
        trained(digits, "dp-fedavg", rounds=1).model_of(digits.names[0])


@pytest.mark.parametrize("method", [pulled(0.5), tuned()], ids=["mr-mtl", "fine-tuned"])
def test_a_resumed_run_ends_like_one_that_was_not_stopped(digits, tmp_path, method):
    whole = trained(digits, method)

    def stop(record):
        if record["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(digits, method, out=tmp_path / "run", callbacks=[stop])
    resumed = trained(digits, method, out=tmp_path / "run", resume=True)
    torch.testing.assert_close(resumed.personal, whole.personal, rtol=0, atol=0)
    assert resumed.result["final"] == whole.result["final"]


@pytest.mark.parametrize("method", ["mr-mtl", "fine-tuned"])
def test_a_site_finds_its_own_model_on_its_disk(digits, tmp_path, method):
    """What a simulation hands out as ``model_of`` is what the site keeps, also when the run is over."""
    study = table(method, digits, rounds=3, steps=2, rate=0.1, lr=0.2)
    alone = simulated(digits, study, tmp_path / "simulated")
    with Rig(tmp_path, digits, study, alone.key, alone.noises) as rig:
        rig.train()
        kept = {name: list(tmp_path.rglob(f"*{name}*/**/own-model.safetensors")) for name in digits.names}
    again = sd.load(tmp_path / "simulated")
    for name, files in kept.items():
        (file,) = files
        for key, value in load_file(file).items():
            torch.testing.assert_close(value, again.model_of(name).state_dict()[key], atol=1e-5, rtol=0)


def test_clients_that_take_no_part_have_the_common_model(digits):
    drawn = methods.get("mr-mtl", {"select": "uniform"})
    run = trained(digits, drawn, rounds=1, select=2)
    took = {name for one in run.metrics for name in one["participants"]}
    for name, own in zip(digits.names, run.personal):
        assert torch.equal(own, run.weights) == (name not in took)


@pytest.mark.parametrize(
    ("part", "table_", "told"),
    [
        ("local", {"name": "mr-mtl", "weight": -1.0}, "weight"),
        ("local", {"name": "mr-mtl", "weight": float("nan")}, "weight"),
        ("aggregate", {"name": "fine-tuned", "alone": 1.0}, "alone"),
        ("local", "fine-tuned", "do not go together"),
    ],
)
def test_senseless_options_are_refused(part, table_, told):
    with pytest.raises(BadInput, match=told):
        methods.get("mr-mtl" if part == "local" else "fine-tuned", {part: table_})


@pytest.mark.slow
def test_on_school_a_pull_to_the_mean_is_never_worse_than_training_alone(school_folder):
    from papers.school import errors_of

    found = errors_of(range(5), school_folder)
    alone, together = np.array(found["mr-mtl, λ = 0"]), np.array(found["mr-mtl, λ = 1"])
    assert (together <= alone).all(), found
