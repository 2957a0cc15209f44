"""Checkpoints keep every place of the server's state; those of sordino 0.1, which had one flat table, still open."""

import json
from dataclasses import fields

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import sordino as sd
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sordino.methods import get
from sordino.server.facts import ServerState

CPU = torch.device("cpu")
SETTINGS = {"rounds": 3, "rate": 0.2, "steps": 2, "lr": 0.2}

OLD = {
    "public/mean_loss": 1.25,
    "public/loss_bound": 3.125,
    "public/control": torch.arange(4.0),
    "public/basis": torch.eye(4)[:, :2],
    "public/basis_sizes": [3, 1],
    "public/radius": 0.75,
    "public/each/private": torch.tensor([[1.0], [0.0]]),
    "public/each/radius": torch.tensor([[0.5], [0.25]]),
    "public/steps": 7,
    "pull_start": torch.full((4,), 0.5),
    "steps_used": torch.tensor([3, 9]),
    "robust_hdp_variances": torch.tensor([0.1, float("nan")], dtype=torch.float64),
    "robust_hdp_start": torch.ones(2, 2, dtype=torch.float64),
    "robust_hdp_clients": [0, 1],
    "factor_hdp_count": 1,
    "factor_hdp_gram_0": torch.eye(2, dtype=torch.float64),
    "factor_hdp_about_0": {"clients": [0, 1], "rows": 4, "rank": 1},
    "random_effects_sum": torch.eye(3, dtype=torch.float64),
    "random_effects_conv.0_sum": torch.eye(2, dtype=torch.float64),
    "random_effects_rounds": 4,
    "feddyn_moved": torch.full((4,), 2.0),
    "ali_spread": 0.125,
    "ali_step": torch.full((4,), 3.0),
}
AFTER = {"after_velocity": torch.full((4,), 6.0), "after_average": torch.full((4,), 7.0), "after_count": 5}
OUT = {"out": torch.full((4,), 8.0), "out_count": 6}


def write_old(path, server, **about):
    """A file as sordino 0.1 wrote it: tensors under ``server/``, all else in the metadata."""
    tensors = {"weights": torch.arange(4.0), "client/control": torch.ones(2, 4)}
    tensors |= {f"server/{name}": value.contiguous() for name, value in server.items() if torch.is_tensor(value)}
    plain = {name: value for name, value in server.items() if not torch.is_tensor(value)}
    told = {"round": 2, "server": plain, "history": [{"round": 1}, {"round": 2}], "seconds": 1.5, **about}
    save_file(tensors, path, {"sordino": json.dumps(told)})


def same(a, b) -> bool:
    if isinstance(a, ServerState):
        return all(same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a))
    if isinstance(a, dict):
        return sorted(a) == sorted(b) and all(same(a[name], b[name]) for name in a)
    if torch.is_tensor(a):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(-9), b.nan_to_num(-9))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("step", ["after", "out"])
def test_every_name_of_the_first_version_opens_into_its_place(tmp_path, step):
    write_old(tmp_path / "old", OLD | (AFTER if step == "after" else OUT))
    found = load_checkpoint(tmp_path / "old", CPU)
    average = torch.full((4,), 7.0 if step == "after" else 8.0)
    kept = {"average": average, "count": 5, "velocity": torch.full((4,), 6.0)}
    expected = ServerState(
        rule={
            "variances": OLD["robust_hdp_variances"],
            "start": OLD["robust_hdp_start"],
            "clients": [0, 1],
            "count": 1,
            "gram_0": OLD["factor_hdp_gram_0"],
            "about_0": {"clients": [0, 1], "rows": 4, "rank": 1},
            "sum": OLD["random_effects_sum"],
            "conv.0_sum": OLD["random_effects_conv.0_sum"],
            "rounds": 4,
            "feddyn_moved": OLD["feddyn_moved"],
            "ali_spread": 0.125,
            "ali_step": OLD["ali_step"],
        },
        step=kept if step == "after" else {"average": average, "count": 6},
        public={
            "mean_loss": 1.25,
            "loss_bound": 3.125,
            "control": OLD["public/control"],
            "basis": OLD["public/basis"],
            "basis_sizes": [3, 1],
            "radius": 0.75,
        },
        each={"private": OLD["public/each/private"], "radius": OLD["public/each/radius"]},
        next_steps=7,
        start=OLD["pull_start"],
        steps_used=OLD["steps_used"],
    )
    for one in fields(ServerState):
        assert same(getattr(found.server, one.name), getattr(expected, one.name)), one.name
    assert (found.round, found.seconds, len(found.history)) == (2, 1.5, 2)
    assert torch.equal(found.weights, torch.arange(4.0))
    assert found.shown is found.weights
    assert torch.equal(found.clients["control"].values, torch.ones(2, 4))


@pytest.mark.parametrize("server", [{}, OLD | AFTER, OLD | OUT], ids=["nothing", "after", "out"])
def test_saved_loaded_and_saved_again_it_is_the_same_file(tmp_path, server):
    write_old(tmp_path / "old", server)
    once = load_checkpoint(tmp_path / "old", CPU)
    save_checkpoint(tmp_path / "new", once)
    again = load_checkpoint(tmp_path / "new", CPU)
    assert same(again.server, once.server)
    save_checkpoint(tmp_path / "newer", again)
    third = load_checkpoint(tmp_path / "newer", CPU)
    assert same(third.server, once.server)
    assert sorted(names(tmp_path / "newer")) == sorted(names(tmp_path / "new"))
    assert (tmp_path / "newer").stat().st_size == (tmp_path / "new").stat().st_size


def names(path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def test_what_parts_of_ones_own_remember_keeps_its_place_whatever_its_name(tmp_path):
    """Names that mean something elsewhere, or meant something in the first version, in every place."""
    odd = (
        "start",
        "next_steps",
        "out",
        "after_count",
        "robust_hdp_start",
        "public",
        "step/count",
        "rule/x",
        "pull_start",
    )
    held = {name: torch.full((2,), float(i)) if i % 2 else i for i, name in enumerate(odd)}
    told = {name: value for name, value in held.items() if torch.is_tensor(value)}
    state = ServerState(dict(held), dict(held), dict(held), told, 3, torch.ones(2), torch.tensor([1, 2]))
    weights = torch.zeros(2)
    save_checkpoint(tmp_path / "c", Checkpoint(1, weights, weights, state))
    found = load_checkpoint(tmp_path / "c", CPU).server
    for one in fields(ServerState):
        assert same(getattr(found, one.name), getattr(state, one.name)), one.name


# A run that 0.1 left half done


class Interrupted(Exception):
    """What stops a run after its second round."""


def stop_after(rounds):
    def callback(record):
        if record["round"] == rounds:
            raise Interrupted

    return callback


def rename(path, prefix, step) -> None:
    """Write a checkpoint's server state under the names of the first version."""
    singles = {"start": "pull_start", "next_steps": "public/steps"}
    renamed = {"average": "out", "count": "out_count"}

    def old(name: str) -> str:
        place, _, rest = name.partition("/")
        if place == "rule":
            return rest if rest.startswith(("feddyn_", "ali_")) else f"{prefix}_{rest}"
        if place == "step":
            return renamed[rest] if step == "ball" else f"after_{rest}"
        return singles.get(name, name)

    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["sordino"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    held = {"server/" + old(n.removeprefix("server/")) if n.startswith("server/") else n: t for n, t in tensors.items()}
    about["server"] = {old(name): value for name, value in about["server"].items()}
    told = [*about["server"], *(name.removeprefix("server/") for name in held if name.startswith("server/"))]
    assert not any(name.startswith(("rule/", "step/")) or name in ("start", "next_steps") for name in told)
    save_file({name: value.contiguous() for name, value in held.items()}, path, {"sordino": json.dumps(about)})


HALF_DONE = {
    "robust-hdp": ("robust-hdp", {"aggregate": {"name": "robust-hdp", "every": 5}, "server": "ema"}, {}),
    "factor-hdp": ("factor-hdp", {"server": {"name": "momentum", "beta": 0.5}}, {"pull": 0.1}),
    "random-effects": ("random-effects", {"server": "polyak"}, {}),
    "pfa-plus": ("pfa-plus", {}, {}),
    "dp-scaffold": ("dp-scaffold", {}, {}),
    "dp-feddyn": ("dp-fedavg", {"local": "feddyn", "aggregate": "feddyn"}, {}),
    "ali-dpfl": ("ali-dpfl", {}, {}),
    "averaged": ("adaptdp", {"local": "averaged", "aggregate": "averaged", "server": "ball"}, {}),
    "per client": ("adaptdp", {"ask": {"name": "squared-norm", "per_client": True}}, {}),
    "fedfdp": ("fedfdp", {}, {}),
}


@pytest.mark.parametrize("case", HALF_DONE)
def test_a_run_that_the_first_version_left_goes_on_as_if_nothing_had_happened(digits, tmp_path, case):
    name, exchanged, more = HALF_DONE[case]
    method, settings = get(name, exchanged), SETTINGS | more
    whole = sd.train(digits, "logistic", method, out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        sd.train(digits, "logistic", method, out=tmp_path / "half", callbacks=[stop_after(2)], **settings)
    (kept,) = (tmp_path / "half").glob("checkpoint*")
    before = load_checkpoint(kept, CPU).server
    assert before.rule or before.step or before.public or before.each, "there is something to lose"
    rename(kept, method.aggregate.name.partition("(")[0].replace("-", "_"), method.server.name.partition("(")[0])
    assert same(load_checkpoint(kept, CPU).server, before)
    done = sd.train(digits, "logistic", method, out=tmp_path / "half", resume=True, **settings)
    assert torch.equal(done.weights, whole.weights)
    assert [one["participants"] for one in done.metrics] == [one["participants"] for one in whole.metrics]
