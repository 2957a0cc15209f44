"""Several versions of every record: the mean of their gradients is clipped as one, in every layout and at a site."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_rig import Rig, five_clients, simulated, table
from torch import nn

import sordino as sd
from sordino.client import gradients
from sordino.client.augment import MOST, Augment
from sordino.client.clip import flat
from sordino.client.gradients import Alone
from sordino.client.gradients.losses import loss_by_name
from sordino.client.local import sgd
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, take_turn
from sordino.engine.clipping import watch_clipping
from sordino.engine.federation.wire import HELLO, REFUSED, Packet, pack, unpack
from sordino.errors import BadInput, CannotStack
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.types import Release, Sampling
from sordino.study import run as running
from sordino.study import session
from sordino.study.session import train_prepared, train_together

_spec = importlib.util.spec_from_file_location("plain_loop", Path(__file__).with_name("plain_loop.py"))
plain_loop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_loop)

COPIES = {"copies": 3, "shift": 1, "mirror": True}
SETTINGS = {"rate": 0.1, "lr": 0.3, "clip": 0.7, "augment": COPIES}
CLIP = 0.5


def plain_move(image, move):
    """An image moved by hand: mirrored, its edges repeated, cut out again."""
    pixels = image.numpy()
    pixels = pixels[:, :, ::-1] if move.mirrored else pixels
    wide = max(abs(move.down), abs(move.right), 1)
    padded = np.pad(pixels, ((0, 0), (wide, wide), (wide, wide)), mode="edge")
    top, left = wide - move.down, wide - move.right
    return torch.from_numpy(padded[:, top : top + image.shape[1], left : left + image.shape[2]].copy())


def versions(one, number, step):
    return [plain_move(one, move) for move in Augment(**COPIES).moves(number, step)]


def test_moves_are_public_different_and_change_from_step_to_step():
    augment = Augment(4, shift=2, mirror=True)
    seen = [augment.moves(number, step) for number in (1, 2) for step in (0, 1)]
    assert all(len(set(moves)) == 4 and moves[0] == (0, 0, False) for moves in seen)
    assert len(set(seen)) == 4
    assert augment.moves(1, 0) == seen[0]
    assert seen[0] == ((0, 0, False), (0, 2, True), (1, -2, True), (1, 1, True)), "the same on every machine, for good"
    every = {move for number in range(200) for move in augment.moves(number, 0)}
    assert len(every) == 50, "each of 5 × 5 × 2 comes sooner or later"
    assert not any(move.mirrored for move in Augment(9, shift=1).moves(1, 0))


def test_copies_are_moved_as_by_hand():
    x = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    augment = Augment(7, shift=3, mirror=True)
    copies = augment.of(x, 5, 1)
    assert copies.shape == (2, 7, 3, 4, 5)
    for record, each in zip(x, copies):
        for move, got in zip(augment.moves(5, 1), each):
            assert torch.equal(got, plain_move(record, move))
    assert torch.equal(Augment(1).of(x, 1, 0), x), "a single copy is the record, without an axis of its own"


@pytest.mark.parametrize(
    ("model", "options", "steps"),
    [("logistic", {}, 2), ("cnn-small", {}, 1), ("cnn-small", {}, 2), ("random-features", {"hidden": 16}, 1)],
)
def test_training_equals_a_plain_loop_over_copies(digits, model, options, steps):
    """Batches of rows with equal weights, and one row at a time; copies are made before features that stay fixed."""
    keys = {"rounds": 2, "steps": steps, **SETTINGS}
    ready = running.prepare(digits, model, "dp-fedavg", 0, options, keys)
    done = train_prepared(ready)
    expected = plain_loop.dp_fedavg(ready.template, digits, ready.plan, ready.key, 2, versions)
    assert plain_loop.close(done.weights, expected) < 1e-5
    assert done.result["study"]["training"]["augment"] == COPIES


@pytest.mark.parametrize("steps", [1, 2])
def test_stacked_rows_give_the_same_weights(digits, steps, monkeypatch):
    one_by_one = sd.train(digits, "cnn-small", rounds=2, steps=steps, **SETTINGS)
    plain = session.Work
    monkeypatch.setattr(session, "Work", lambda *a, stack: plain(*a, stack=True))
    stacked = sd.train(digits, "cnn-small", rounds=2, steps=steps, **SETTINGS)
    assert plain_loop.close(stacked.weights, one_by_one.weights) < 1e-5


def test_runs_in_a_stack_end_as_alone_and_share_it_with_their_like_only(digits):
    """Questions about losses and norms see the copies, too."""
    cases = [("dp-fedavg", 0), ("fedfdp", 1), ("quantile-clipping", 0)]
    ready = [running.prepare(digits, "cnn-small", name, seed, None, {"rounds": 2, **SETTINGS}) for name, seed in cases]
    for one, (name, seed) in zip(train_together(ready, device="cpu"), cases):
        alone = sd.train(digits, "cnn-small", name, rounds=2, seed=seed, **SETTINGS)
        assert plain_loop.close(one.weights, alone.weights) < 1e-5
    other = running.prepare(digits, "cnn-small", "dp-fedavg", 0, None, {"rounds": 2, **SETTINGS, "augment": None})
    with pytest.raises(CannotStack):
        train_together([ready[0], other], device="cpu")


def test_noise_and_charges_are_those_without_copies_and_random_streams_are_not(digits):
    keys = {"rounds": 2, "rate": 0.1}
    plain, rich = (
        running.prepare(digits, "logistic", "dp-fedavg", 0, None, {**keys, **more})
        for more in ({}, {"augment": COPIES})
    )
    assert [c.noise for c in plain.plan.clients] == [c.noise for c in rich.plan.clients]
    assert [c.terms for c in plain.plan.clients] == [c.terms for c in rich.plan.clients]
    spent = [[one["spent_epsilon"] for one in train_prepared(ready).privacy] for ready in (plain, rich)]
    assert spent[0] == spent[1]
    assert "augment" not in plain.study["training"], "what is not asked for changes no key"
    assert plain.key != rich.key


class Free(Gate):
    """A gate whose charges are paid elsewhere."""

    private = True

    def __init__(self):
        super().__init__(None, Keyed("key"), "attack")


def total(model, x, y, some, exact):
    """The sum that one step without noise lets out, from some of the records; with C as the clip, and η = 1."""
    augment, turn = Augment(**COPIES), Turn("north", 4)
    engine = gradients.build(model, "cross-entropy", copies=augment.copies)
    alone = Alone(model, loss_by_name("cross-entropy"), copies=augment.copies) if exact else None
    work = Work(engine, flat(), sgd(), alone=alone, augment=augment)
    rows = Rows([turn], [Batches(np.array(some), np.array([len(some)]))], Records(x, y))
    permit = Permit([turn], [Terms(Sampling.full(), (("gradient", 0.0),), 1, 1.0)])
    start = Release.public(engine.flatten(model), "weights")
    upload, _ = take_turn(work, rows, start, Release.public({}, ""), {"lr": 1.0, "clip": CLIP}, permit, Free())
    return -upload.parts["update"].value[0].double()


@pytest.mark.parametrize("exact", [False, True])
def test_a_record_moves_a_sum_by_at_most_the_clip_whatever_its_copies(exact):
    """Each record in turn left out: quiet ones, huge ones, and one whose copies' gradients nearly cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 3
    x[1] *= 1e6
    x[2] = 1e-6
    x[3] = 1e18 * torch.randn(1, 6, 6)
    x[4] -= x[4].flip(-1)  # opposite in its mirror image
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
    everyone = list(range(6))
    whole = total(model, x, y, everyone, exact)
    moved = [float((whole - total(model, x, y, [j for j in everyone if j != k], exact)).norm()) for k in everyone]
    assert max(moved) <= CLIP * (1 + 1e-5)
    assert moved[1] == pytest.approx(CLIP, rel=1e-3), "and a large one by all of it"


@pytest.mark.parametrize("model", ["cnn-small", "logistic"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_lets_out_the_clipped_means_of_a_plain_loop(model, exact):
    network = sd.models.build(model, (1, 8, 8), 4, 2)
    x, y = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(7) % 4
    got = total(network, x, y, [0, 2, 3, 6], exact)
    kept = [0, 2, 3, 6]
    wanted = plain_loop.clipped_sum(
        network.double(), x[kept].double(), y[kept], CLIP, partial(versions, number=4, step=0)
    )
    assert plain_loop.close(got, wanted) < 2e-5  # of which the gate keeps 1.2e-5 for rounding


def test_a_deployed_study_ends_with_the_simulations_weights(tmp_path):
    clients = five_clients()
    study = table("fedfdp", clients, rounds=2, steps=2, rate=0.05, lr=0.2, augment=COPIES)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        assert rig.ready.brief["augment"] == COPIES
        state = rig.train()
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
    without = {**study, "training": {key: value for key, value in study["training"].items() if key != "augment"}}
    assert not torch.allclose(simulated(clients, without, tmp_path / "without").weights, alone.weights, atol=1e-3)


def test_an_observer_of_clipping_sees_the_copies():
    torch.manual_seed(0)
    augment, model = Augment(**COPIES), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    engine = gradients.build(model, "cross-entropy", copies=augment.copies)
    work = Work(engine, flat(), sgd(), augment=augment)
    records, weights = Records(torch.rand(5, 1, 4, 4), torch.arange(5) % 3), engine.flatten(model)
    seen = watch_clipping(work, records, [np.arange(5)], weights, {"clip": 0.1}, number=2)
    norms = engine(weights[None], augment.of(records.x, 2, 0)[None], records.y[None]).norms[0]
    assert seen["median_norm"] == pytest.approx(float(norms.median()), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (4, "is a table of copies, shift, mirror"),
        ({"shift": 2}, "of which copies is needed"),
        ({"copies": 2, "turn": 90}, "is a table of copies, shift, mirror"),
        ({"copies": 0}, "copies is 0: it is a whole number from 1"),
        ({"copies": True}, "copies is True"),
        ({"copies": 2, "shift": -1}, "shift is -1"),
        ({"copies": 2, "mirror": "yes"}, "true or false"),
        ({"copies": 2, "shift": 0}, "gives 1 different ones; use fewer copies or a larger shift"),
        ({"copies": MOST + 1, "shift": 8}, "at most 64 are made"),
        ({"copies": 2, "shift": 8}, "the images have 8×8 pixels: use less"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(digits, given, told):
    with pytest.raises(BadInput, match=told):
        sd.plan(digits, "logistic", rounds=2, rate=0.1, augment=given)


def test_records_that_are_no_images_are_refused():
    clients = sd.data.load("breast-cancer").partition("iid", clients=3, seed=0).with_budgets(3.0, 1e-5)
    with pytest.raises(BadInput, match=r"moves and mirrors images .* shape \(30,\): leave it out"):
        sd.plan(clients, "logistic", rounds=2, rate=0.1, augment=COPIES)


def test_a_site_refuses_more_copies_than_anyone_makes(tmp_path):
    clients = five_clients()
    study = table("dp-fedavg", clients, rounds=2, rate=0.05, augment=COPIES)
    with Rig(tmp_path, clients, study) as rig:
        brief = {**rig.ready.brief, "augment": {**COPIES, "copies": 1000, "shift": 7}}
        reply = unpack(rig.site(clients.names[0]).handle(pack(Packet(HELLO, {"brief": brief}))))
    assert reply.kind == REFUSED
    assert "at most 64 are made" in reply.facts["reason"]
