"""A GPU that repeats itself: what is switched on while a run lasts, put back after it, refused and said.

A stand-in for a GPU: the switches are torch's own and global, so that a CPU sees them too.
"""

import logging
import math
import os
from dataclasses import replace

import pytest
import torch

import sordino as sd
from sordino.client.gradients.choose import disagreement
from sordino.client.gradients.exact import Exact
from sordino.client.gradients.losses import loss_by_name
from sordino.engine import devices
from sordino.errors import BadInput
from sordino.study import session
from sordino.study.run import prepare

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.delenv(devices.WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU takes products for repeatable."""
    monkeypatch.setattr(devices, "_products_repeat", lambda device: True)


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_a_gpu_repeats_itself_while_a_run_lasts_and_is_left_as_it_was(gpu, monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    with devices.repeatable(GPU):
        assert switches() == (True, False, False)
        assert os.environ[devices.WORKSPACE] == ":4096:8"
    assert switches() == (*before, True)
    with pytest.raises(KeyError), devices.repeatable(GPU):
        raise KeyError
    assert switches() == (*before, True)


@pytest.mark.parametrize(("device", "wanted"), [(torch.device("cpu"), True), (GPU, False)])
def test_nothing_is_touched_where_it_is_not_wanted_or_not_needed(device, wanted):
    with devices.repeatable(device, wanted):
        assert switches()[:2] == (False, False)
        assert devices.WORKSPACE not in os.environ


def test_a_setting_of_the_users_own_stays(gpu, monkeypatch):
    monkeypatch.setenv(devices.WORKSPACE, ":16:8")
    with devices.repeatable(GPU):
        assert os.environ[devices.WORKSPACE] == ":16:8"


def test_where_products_came_first_a_warning_says_so_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(devices, "_products_repeat", lambda device: False)
    with caplog.at_level(logging.WARNING), devices.repeatable(GPU):
        assert switches()[:2] == (False, False)
    assert "may not repeat bit for bit: CUBLAS_WORKSPACE_CONFIG was not :4096:8" in caplog.text


def test_products_are_asked_by_making_one(monkeypatch):
    assert devices._products_repeat(torch.device("cpu"))

    def refuse(*shape, device):
        raise RuntimeError("it uses CuBLAS … you must set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    monkeypatch.setattr(torch, "ones", refuse)
    assert not devices._products_repeat(torch.device("cpu"))


def test_an_operation_that_cannot_repeat_itself_is_refused_by_name(gpu):
    with pytest.raises(BadInput, match=r"put_ cannot repeat itself .* deterministic = false"), devices.repeatable(GPU):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(RuntimeError, match="something else"), devices.repeatable(GPU):
        raise RuntimeError("something else")


class Unrepeatable(torch.nn.Module):
    """A layer that torch has no repeatable way for, on a CPU too."""

    def forward(self, x):
        return x.clone().put_(torch.tensor([0]), x.detach().reshape(-1)[:1])


@pytest.fixture(scope="module")
def clients():
    found = sd.data.load("digits").subset(100, 0).partition("iid", clients=2, seed=0)
    return found.with_budgets([1.0, 4.0], delta=1e-4)


def test_a_run_is_repeatable_unless_it_is_told_otherwise_and_is_the_same_run(gpu, monkeypatch, clients):
    seen = []

    def on_a_gpu(device, wanted):
        seen.append(wanted)
        return devices.repeatable(GPU, wanted)

    monkeypatch.setattr(session, "repeatable", on_a_gpu)
    quick = {"rounds": 1, "rate": 0.3}
    # Torch fills fresh memory with NaN while it is on: nothing reads what was never written.
    strict = sd.train(clients, "cnn-small", callbacks=[lambda record: seen.append(switches()[0])], **quick)
    loose = sd.train(clients, "cnn-small", deterministic=False, **quick)
    assert seen == [True, True, False]
    assert strict.result["checksum"] == loose.result["checksum"]
    assert math.isfinite(strict.result["final"]["loss"])
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), Unrepeatable())
    with pytest.raises(BadInput, match="put_ cannot repeat itself"):
        sd.train(clients, own, **quick)
    with pytest.raises(BadInput, match="deterministic is 'no': it is True or False"):
        sd.train(clients, deterministic="no")


def test_it_is_no_part_of_what_a_run_is(clients):
    ready = prepare(clients, "logistic", "dp-fedavg", 0, None, {"rounds": 1})
    other = replace(ready, deterministic=False)
    assert (other.key, other.kept_as, other.kinship) == (ready.key, ready.kept_as, ready.kinship)


def test_an_engine_is_compared_by_any_algorithm():
    """Plain autograd may need what cannot repeat itself, where the engine that is compared with it does not."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), Unrepeatable())
    loss = loss_by_name("cross-entropy")
    torch.use_deterministic_algorithms(True)
    engine, x, y = Exact(model, loss, "asked for"), torch.randn(2, 4), torch.tensor([0, 1])
    assert disagreement(engine, model, loss, engine.flatten(model), x, y) is None
    assert switches()[0]
