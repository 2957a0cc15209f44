"""SCAFFOLD, FedProx and FedDyn over rows against scalar recursions, row by row."""

import math

import pytest
import torch

from sordino.client.corrections import feddyn, fedprox, scaffold
from sordino.errors import BadInput

ROWS, D, K, LR = 3, 4, 5, 0.2
generator = torch.Generator().manual_seed(1)
START = torch.randn(D, generator=generator)
GRADIENTS = torch.randn(K, ROWS, D, generator=generator)
OWN = torch.randn(ROWS, D, generator=generator)
COMMON = torch.randn(D, generator=generator)


def turn(rule, state, public):
    params, carried = START.expand(ROWS, D).clone(), dict(state)
    for gradient in GRADIENTS:
        params, carried = rule.update(params, carried, gradient.clone(), public)
    return rule.finish(params, START, carried, public)


@pytest.mark.parametrize("public", [{"lr": LR}, {"lr": LR, "control": COMMON}])
def test_scaffold_subtracts_its_own_control_and_keeps_the_mean_gradient(public):
    upload, state = turn(scaffold(), {"control": OWN}, public)
    common = public.get("control", torch.zeros(D))
    for row in range(ROWS):
        w = START.clone()
        for k in range(K):
            w = w - LR * (GRADIENTS[k, row] - OWN[row] + common)
        assert torch.allclose(upload["update"][row], w - START, atol=1e-5)
        assert torch.allclose(state["control"][row], GRADIENTS[:, row].mean(0), atol=1e-5)
    assert set(upload) == {"update"}


def test_fedprox_pulls_towards_the_start():
    upload, _ = turn(fedprox(0.3), {}, {"lr": LR})
    for row in range(ROWS):
        w = START.clone()
        for k in range(K):
            w = w - LR * (GRADIENTS[k, row] + 0.3 * (w - START))
        assert torch.allclose(upload["update"][row], w - START, atol=1e-5)


def test_feddyn_tilts_by_its_dual_and_updates_it():
    upload, state = turn(feddyn(0.3), {"dual": OWN}, {"lr": LR})
    for row in range(ROWS):
        w = START.clone()
        for k in range(K):
            w = w - LR * (GRADIENTS[k, row] - OWN[row] + 0.3 * (w - START))
        assert torch.allclose(upload["update"][row], w - START, atol=1e-5)
        assert torch.allclose(state["dual"][row], OWN[row] - 0.3 * (w - START), atol=1e-5)


def test_a_dual_at_its_fixed_point_is_the_gradient():
    """FedDyn's aim: where a client has stopped moving, h_i = ∇F_i, so its tilted objective agrees with the server's."""
    rule, target = feddyn(0.5), torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    state = {"dual": torch.zeros(1, D)}
    for _ in range(400):
        params, carried = START[None].clone(), dict(state)
        for _ in range(20):
            params, carried = rule.update(params, carried, (params - target), {"lr": LR})  # F = ½‖w − target‖²
        _, state = rule.finish(params, START, carried, {"lr": LR})
    assert torch.allclose(state["dual"], START[None] - target, atol=1e-3)


@pytest.mark.parametrize("rule", [scaffold(), fedprox(0.3), feddyn(0.3)])
def test_rows_of_several_runs_may_have_weights_and_rates_of_their_own(rule):
    """Where rows of several runs share a stack, ``start`` is a row each and the learning rate a column."""
    starts, rates = torch.stack([START, START + 1, START - 2]), torch.tensor([[0.1], [0.2], [0.3]])
    state = {name: OWN.clone() for name in rule.state}
    params, carried = starts.clone(), dict(state)
    for gradient in GRADIENTS:
        params, carried = rule.update(params, carried, gradient.clone(), {"lr": rates})
    upload, ended = rule.finish(params, starts, carried, {"lr": rates})
    for row in range(ROWS):
        alone, kept = starts[row : row + 1].clone(), {name: OWN[row : row + 1].clone() for name in rule.state}
        public = {"lr": rates[row].item()}
        for gradient in GRADIENTS:
            alone, kept = rule.update(alone, kept, gradient[row : row + 1].clone(), public)
        single, left = rule.finish(alone, starts[row], kept, public)
        assert torch.allclose(upload["update"][row], single["update"][0], atol=1e-5)
        for name in rule.state:
            assert torch.allclose(ended[name][row], left[name][0], atol=1e-5)


def test_strengths_are_numbers_from_zero_on_and_feddyn_needs_more():
    for rule in (fedprox, feddyn):
        for wrong in (-1.0, math.nan, math.inf):
            with pytest.raises(BadInput, match="≥ 0"):
                rule(wrong)
    with pytest.raises(BadInput, match="alpha is 0"):
        feddyn(0)
    assert fedprox(0).name == "sgd"
