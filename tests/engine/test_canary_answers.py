"""The audit of everything that leaves a client, answers to questions included: one canary a client."""

import pytest

from sordino.errors import BadInput
from sordino.methods import Method, get
from sordino.methods.asking import candidate_loss
from sordino.methods.selection import power_of_choice
from sordino.privacy import gate
from sordino.server import rules
from sordino.study.audit import Trial, audit_releases

SHORT = Trial(epsilon=2.0, rounds=1, steps=1, canaries=10_000)
OWN = {"ask": {"name": "loss", "share": 0.5}}
SAME = {"ask": {"name": "loss", "share": 0.5, "batch": "step"}}


def loudest(candidates):
    ask = (candidate_loss(bound=4.0, share=0.5),)
    select = power_of_choice(candidates, headroom=10.0)
    return Method("loudest", select=select, ask=ask, aggregate=rules.uniform())


@pytest.mark.parametrize(
    "method",
    [get("fedfdp", OWN), get("fedfdp", SAME), get("dp-q-ffl", OWN), loudest(SHORT.canaries)],
    ids=["fedfdp", "fedfdp, same batch", "dp-q-ffl", "power-of-choice"],
)
def test_gradients_and_losses_together_keep_the_claim(method):
    found = audit_releases(method, SHORT)
    assert found.passed
    assert found.claimed <= 2.0
    assert found.gaussian > (0.3 if method.name == "loudest" else 0.7) * found.claimed


@pytest.mark.parametrize("parts", [OWN, SAME], ids=["own batch", "same batch"])
def test_a_loss_with_too_little_noise_is_caught(monkeypatch, parts):
    honest = gate.Terms.noise
    monkeypatch.setattr(gate.Terms, "noise", lambda self, part: honest(self, part) / (2 if part == "loss" else 1))
    assert not audit_releases(get("fedfdp", parts), SHORT).passed


def test_a_method_without_privacy_has_nothing_to_audit():
    with pytest.raises(BadInput, match="NOT PRIVATE"):
        audit_releases("fedfair", SHORT)
