"""The debug backend: every tensor of one client's step, as the run itself computes it; errors that name the place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.client.local import Local
from sordino.engine import debug
from sordino.engine.checkpoint import Checkpoint
from sordino.errors import BadInput, SordinoError
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Secret
from sordino.study.run import prepare
from sordino.study.session import make_setup
from sordino.study.trace import trace

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7}


def close(a, b, gap=1e-5):
    return torch.linalg.vector_norm(a - b) <= gap * torch.linalg.vector_norm(b)


def test_what_is_seen_fits_together(digits):
    seen = trace(digits, "cnn-small", rounds=3, steps=3, client="client-02", step=1, **SETTINGS)
    plan = sd.plan(digits, "cnn-small", rounds=3, steps=3, **SETTINGS).plan
    batch = plan.clients[2].terms.divisor
    assert set(seen["positions"].tolist()) <= set(digits.train[2].tolist())
    assert close(seen["gradients"].norm(dim=1), seen["norms"])
    assert ((seen["bounded"] * seen["norms"]) <= 0.7 * (1 + 1e-6)).all()
    assert close(seen["sum"], seen["bounded"] @ seen["gradients"])
    assert close(seen["released"], (seen["sum"] + seen["noise"]) / batch)
    assert float(seen["noise"].std()) == pytest.approx(0.7 * plan.clients[2].noise, rel=0.05)
    assert close(seen["after"], seen["weights"] - 0.3 * seen["released"])
    assert "client-02, round 1, step 1" in str(seen)
    assert all(name in str(seen) for name in ("losses", "norms", "bounded", "noise", "upload"))


def test_the_uploads_that_are_seen_make_the_round_that_a_run_makes(digits):
    options = {"model": "logistic", "method": "dp-fedavg", "rounds": 1, "steps": 2, **SETTINGS}
    shares = digits.sizes / digits.sizes.sum()
    seen = [trace(digits, client=name, **options) for name in digits.names]
    start = seen[0]["weights"]
    combined = start + sum(float(share) * one["upload"] for share, one in zip(shares, seen))
    assert close(combined, sd.train(digits, **options).weights)


def test_the_next_round_of_an_interrupted_run(digits, tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    options = {"model": "logistic", "method": "dp-scaffold", "rounds": 3, **SETTINGS}
    with pytest.raises(KeyboardInterrupt):
        sd.train(digits, out=tmp_path / "run", callbacks=[stop], **options)
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    seen = trace(digits, client="client-00", out=tmp_path / "run", **options)
    assert seen.round == 2
    assert not torch.equal(seen["weights"], trace(digits, client="client-00", **options)["weights"])
    assert {file: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_a_client_that_takes_no_part_is_refused_with_those_who_do(digits):
    with pytest.raises(BadInput, match="takes no part in round 1: client-00"):
        trace(digits, "logistic", client="nobody", **SETTINGS)
    with pytest.raises(BadInput, match="steps 0 to 0"):
        trace(digits, "logistic", client="client-00", step=1, **SETTINGS)


def test_a_site_cannot_be_looked_at(digits):
    ready = prepare(digits, "logistic", "dp-fedavg", 0, None, {"rounds": 1, **SETTINGS})
    setup = make_setup(ready, Gate(None, Secret(), "run"), {}, torch.device("cpu"))
    first = ready.engine.flatten(ready.template)
    with pytest.raises(SordinoError, match="in simulation only"):
        debug.trace(setup, Checkpoint(0, first, first), "client-00")


@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_names_client_round_step_and_stage_though_rows_share_a_chunk(digits, steps):
    labels = digits.y.copy()
    labels[digits.train[3]] = 99
    broken = replace(digits, y=labels)
    with pytest.raises(SordinoError, match=r"client 'client-03', round 1, step 0, gradients of the batch: \w+Error"):
        sd.train(broken, "logistic", rounds=1, steps=steps, **SETTINGS)


def test_an_error_in_a_method_names_its_rule(digits):
    def update(params, state, gradient, public):
        raise ValueError("a mistake")

    method = sd.Method("mine", local=Local("wrong", update, lambda p, s, k, public: ({"update": p - s}, k)))
    with pytest.raises(SordinoError, match=r"client 'client-00', round 1, step 0, local rule 'wrong': .*a mistake"):
        sd.train(digits, "logistic", method, rounds=1, **SETTINGS)


def test_positions_are_those_of_the_run(digits):
    """Full batches: every record of the client, once."""
    seen = trace(digits, "logistic", sampling="full", client="client-01", rounds=1, lr=0.1)
    assert np.array_equal(np.sort(seen["positions"].numpy()), np.sort(digits.train[1]))
