"""The audit of every method as it really runs, and of mechanisms broken on purpose, which it must catch."""

import pytest
import torch

from sordino.client.clip import Clip
from sordino.errors import BadInput
from sordino.methods import Method, get, names
from sordino.privacy import gate
from sordino.study.audit import Trial, audit_method

PRIVATE = [name for name in names() if get(name).private]


@pytest.mark.parametrize("name", PRIVATE)
def test_every_method_keeps_its_claim_and_the_sharp_bound_comes_near_it(name):
    found = audit_method(name, Trial(epsilon=2.0, canaries=50_000))
    assert found.passed
    assert found.claimed <= 2.0
    # Questions take their share; the common model of clients with models of their own forgets earlier releases.
    near = 0.5 if get(name).local.begin is not None else 0.65 if get(name).ask else 0.85
    assert found.gaussian > near * found.claimed


@pytest.mark.parametrize("name", PRIVATE)
def test_every_method_keeps_its_claim_under_subsampling(name):
    found = audit_method(name, Trial(epsilon=1.0, rate=0.2, canaries=50_000))
    assert found.passed
    assert found.gaussian > 0


def test_too_little_noise_is_caught(monkeypatch):
    honest = gate.Terms.noise
    monkeypatch.setattr(gate.Terms, "noise", lambda self, part: honest(self, part) / 1.2)
    assert not audit_method("dp-fedavg").passed


def test_clipping_switched_off_is_caught(monkeypatch):
    monkeypatch.setattr(gate, "bounded", lambda factors, norms, bound: factors)
    assert not audit_method("dp-fedavg").passed


def test_the_fair_clipping_factor_as_printed_in_the_fedfdp_paper_is_caught(monkeypatch):
    """min(1 + λ(F_j − F), C/‖g_j‖) without the guard: a loss far below the broadcast gives a large negative factor."""
    monkeypatch.setattr(gate, "bounded", lambda factors, norms, bound: torch.minimum(factors, bound / norms))

    def printed(losses, norms, public):
        return 1 + 0.5 * (losses - 1e9)

    broken = Method("as-printed", clip=Clip("as-printed", printed, lambda public: float(public["clip"])))
    found = audit_method(broken)
    assert not found.passed


def test_the_same_factor_is_harmless_behind_the_real_gate():
    """The gate bounds |a_j|·‖g_j‖, so even that rule keeps its claim (its sign is turned, so its scores are too)."""

    def printed(losses, norms, public):
        return 1 + 0.5 * (losses - 1e9)

    method = Method("as-printed", clip=Clip("as-printed", printed, lambda public: float(public["clip"])))
    assert audit_method(method).passed


def test_an_accumulator_that_is_never_cleared_is_caught(monkeypatch):
    kept = {}
    honest = gate.Gate._seal

    def hoarding(self, permit, part, step, total, bound):
        kept[part] = kept.get(part, 0) + total
        return honest(self, permit, part, step, kept[part].clone(), bound)

    monkeypatch.setattr(gate.Gate, "_seal", hoarding)
    assert not audit_method("dp-fedavg").passed


def test_a_method_without_privacy_has_nothing_to_audit():
    with pytest.raises(BadInput, match="NOT PRIVATE"):
        audit_method("fedavg")
