"""Whatever weights a server sends and whatever a record holds: no record moves a sum by more than was charged."""

from __future__ import annotations

import pytest
import torch
from fuzz import MODELS, OF_WORDS, Case, case
from torch import Tensor, nn

from sordino import models, native
from sordino.client import gradients
from sordino.client.gradients import Alone, fused, loops
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.privacy.gate import Block, OneByOne, bounded, exact_sums
from sordino.privacy.lattice import Lattice
from sordino.privacy.threads import one_thread

LOSS = loss_by_name("cross-entropy")
OWN = 1 + 1e-6
"""A record's own term may be this much longer than the clip, no more."""


def trained(model: nn.Module) -> Tensor:
    """The trained parameters of a model as one vector."""
    return torch.nn.utils.parameters_to_vector(one for one in model.parameters() if one.requires_grad).detach()


def own_terms(one: Case, layout: str) -> Tensor:
    """‖what each record adds‖/C through an engine and the gate, [n] in float64."""
    if layout == "site":
        return _at_a_site(one)
    engine = (
        gradients.build(one.model, "cross-entropy", "exact", copies=one.copies)
        if layout == "vmap"
        else Fast(one.model, LOSS, stack=layout == "stack", copies=one.copies)
    )
    weights, n = engine.flatten(one.model), len(one.y)
    found = []
    for j in range(n):
        alone = torch.arange(n) == j
        if layout == "shared":
            graded = engine.shared(weights, one.x, one.y, torch.zeros(n, dtype=torch.long), 1)
            factors = bounded(one.factors, graded.limits, one.clip)
            pulled = graded.pull(torch.where(alone, factors, 0.0))
        elif layout == "stack":  # every record a row of its own
            graded = engine(weights.expand(n, -1), one.x[:, None], one.y[:, None])
            factors = bounded(one.factors[:, None], graded.limits, one.clip)
            return graded.pull(factors).double().norm(dim=1) / one.clip
        else:
            graded = engine(weights[None], one.x[None], one.y[None])
            factors = bounded(one.factors[None], graded.limits, one.clip)
            pulled = graded.pull(torch.where(alone, factors, 0.0))
        found.append(pulled.double().norm() / one.clip)
    return torch.stack(found)


def _at_a_site(one: Case) -> Tensor:
    """Here over the sensitivity that is charged, which is C(1 + 10⁻⁶) and half a lattice step a coordinate."""
    weights = trained(one.model)
    lattice = Lattice(one.clip, len(weights))
    found = []
    with one_thread():
        graded = Alone(one.model, LOSS, copies=one.copies).under(weights)(one.x, one.y)
        norms = graded.gradients.double().norm(dim=1).tolist()
        for k, factor in enumerate(one.factors.tolist()):
            total = torch.zeros(len(weights), dtype=torch.float64)
            lattice.add(total, graded.gradients[k : k + 1], norms[k : k + 1], [factor])
            found.append(total.norm() * lattice.step / lattice.sensitivity)
    return torch.stack(found)


LAYOUTS = ("site", "one row", "shared", "stack", "vmap")


def worst(layout: str, seeds: range, copies: int = 1) -> tuple[float, str]:
    """The longest own term over all models and seeds, and whose it was."""
    found = (0.0, "")
    for seed in seeds:
        for name in MODELS:
            if layout == "vmap" and name in OF_WORDS and seed % 3:
                continue  # slow
            longest = float(own_terms(case(name, seed, copies), layout).max())
            found = max(found, (longest, f"{name}, seed {seed}"))
            assert longest <= OWN, f"{layout}, {name}, seed {seed}: a record adds {longest:.8g} C"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_record_adds_more_than_the_clip(layout: str):
    length, where = worst(layout, range(6))
    print(f"worst own term, {layout}: {length:.9f} C ({where})")
    assert length > 0.99, "some record must reach the clip, or this shows nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_record_of_several_inputs_adds_more_than_the_clip(layout: str):
    length, where = worst(layout, range(2), copies=3)
    print(f"worst own term, {layout}: {length:.9f} C ({where})")
    assert length > 0.99, "some record must reach the clip, or this shows nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", [1e3, 1e18, 3e38, 1e-30, float("inf"), float("nan")])
def test_no_record_adds_more_than_the_clip_beside_any_frozen_weights(frozen: float, layout: str):
    """Adapters are computed beside weights that somebody else chose; beside what is no number a record adds nothing."""
    torch.manual_seed(1)
    model = models.lora(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)), rank=2, alpha=30.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if parameter.requires_grad else frozen)
            parameter.add_(torch.randn_like(parameter) if parameter.requires_grad else 0.0)
    x = torch.randn(5, 6) * torch.tensor([1.0, 1e4, 0.0, 1e20, 1.0])[:, None]
    x[4, 0] = torch.nan
    found = own_terms(Case("adapters", model, x, torch.arange(5) % 3, torch.ones(5), 1e-2), layout)
    assert float(found.max()) <= OWN
    assert float(found[4]) == 0
    if not frozen < float("inf"):
        assert not found.any()
    elif frozen == 1e3:
        assert float(found.max()) > 0.99, "some record must reach the clip, or this shows nothing"


@pytest.mark.parametrize("layout", ["one row", "shared"])
def test_factors_so_small_that_slopes_lose_their_digits(layout: str):
    """Inputs and weights of 1e30: a·dy is no normal number any more, and its rounding was 1.4e-5 of the clip."""
    assert float(own_terms(case("tramer-mnist", 179, 3), layout).max()) <= OWN


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_record_adds_more_than_the_clip_in_ten_thousand_cases(layout: str, copies: int):
    length, where = worst(layout, range(100, 225), copies)  # all models × 125 seeds × 5 layouts
    print(f"worst own term, {layout}: {length:.9f} C ({where})")


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("layout", ["one row", "shared"])
def test_records_are_bounded_with_compiled_loops_and_without(layout: str, copies: int):
    """The layouts above take compiled loops where there is a compiler; here the same cases in both ways."""
    for seed in range(6):
        for name in ("cnn-small", "robust-hdp-cnn", "pooled"):
            one = case(name, seed, copies)
            assert float(own_terms(one, layout).max()) <= OWN, (name, seed)
            with native.set_aside():
                assert float(own_terms(one, layout).max()) <= OWN, (name, seed)


def test_the_kernels_of_a_gpu_bound_records_too(monkeypatch: pytest.MonkeyPatch):
    """Interpreted on a CPU where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "INTERPRETED", not torch.cuda.is_available())
    for seed in range(2):
        for name in ("logistic", "ghost", "tanh"):
            assert float(own_terms(case(name, seed), "stack").max()) <= OWN


def test_a_tiny_gradient_times_a_huge_factor_stays_below_the_clip():
    """‖x‖²·‖dy‖² vanished in float32, and a factor of 1e30 then passed: 4·10⁷ C."""
    model = nn.Linear(4, 3)
    x, y = torch.full((2, 4), 1e18), torch.tensor([0, 1])
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([60.0, 0.0, 0.0]))  # the first record is all but right: its slopes are 1e-27
    engine = Fast(model, LOSS)
    graded = engine(engine.flatten(model)[None], x[None], y[None])
    factors = bounded(torch.full((1, 2), 1e30), graded.limits, 1.0)
    for j in range(2):
        assert float(graded.pull(torch.where(torch.arange(2) == j, factors, 0.0)).double().norm()) <= OWN


def test_cancelling_positions_do_not_hide_a_loud_record():
    """Norms of convolutions by inner products are differences of large numbers: 16,000 deviations were released."""
    model = MODELS["ghost"][0]()
    torch.manual_seed(0)
    x = 1e4 * torch.rand(16, 8, 1, 1).expand(16, 8, 4, 4).clone()  # constant images: every position sees the same
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
        model[0].bias.fill_(1.0)
        signs = torch.tensor([1.0, -1.0]).repeat(32)  # and the head takes the difference between neighbours
        model[3].weight.copy_(1e6 * signs + torch.randn(3, 64))
    one = Case("ghost", model, x, torch.arange(16) % 3, torch.ones(16), 1e-2)
    for layout in LAYOUTS:
        assert float(own_terms(one, layout).max()) <= OWN, layout


def test_a_measured_term_does_not_rest_on_the_norm_it_was_told():
    lattice, total = Lattice(1.0, 3), torch.zeros(3, dtype=torch.float64)
    lattice.add(total, torch.tensor([[3.0, 4.0, 0.0]]), [1e-9], [1.0])
    assert not total.any(), "a lie about the norm adds nothing"
    assert lattice.sensitivity <= 1 + 1e-5


@pytest.mark.parametrize("name", list(MODELS))
def test_a_record_contributes_the_same_bits_in_every_company(name: str):
    """Row invariance: batch size, place, neighbours, null records and threads change nothing, with hostile weights."""
    for seed in range(40, 44):
        one = case(name, seed)
        weights = trained(one.model)
        engine = Alone(one.model, LOSS)

        def alone(order: list[int], engine=engine, weights=weights, one=one) -> dict[int, Tensor]:
            with one_thread():
                graded = engine.under(weights)(one.x[order], one.y[order])
                return {j: g.clone() for j, g in zip(order, graded.gradients)}

        reference = {j: alone([j])[j] for j in range(5)}
        for order in ([0, 1], [1, 0, 2], [4, 3, 2, 1, 0], [2, 2, 2, 0, 0, 1, 4, 3]):
            for j, gradient in alone(order).items():
                assert torch.equal(gradient.view(torch.int32), reference[j].view(torch.int32)), (name, seed, order, j)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_exact_sums_differ_by_one_term_and_nothing_else(threads: int):
    one = case("robust-hdp-cnn", 7)
    model = models.build("robust-hdp-cnn", (1, 8, 8), 3)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    engine = Alone(model, LOSS)
    x = torch.randn(37, *one.x.shape[1:], generator=torch.Generator().manual_seed(1))
    y, lattice = torch.arange(37) % 3, Lattice(0.1, len(weights))

    def total(keep: list[int]) -> Tensor:
        grade = engine.under(weights)

        def terms(some):
            found = grade(x[[keep[k] for k in some]], y[[keep[k] for k in some]]).gradients
            return {"gradient": Block(found, loops.norms(found), [1.0] * len(some))}

        return exact_sums(OneByOne(len(keep), terms, engine.block), {"gradient": lattice})["gradient"][0]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        everyone = total(list(range(37)))
        assert torch.equal(everyone, total(list(reversed(range(37)))))
        assert torch.equal(everyone / lattice.step, (everyone / lattice.step).round()), "on the lattice"
        for left_out in (0, 17, 36):
            rest = total([k for k in range(37) if k != left_out])
            assert torch.equal(everyone - rest, total([left_out]))
            assert float((everyone - rest).norm()) <= lattice.sensitivity
    finally:
        torch.set_num_threads(before)
