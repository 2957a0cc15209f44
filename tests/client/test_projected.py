"""PFA+ at the client: whoever is told to sends k numbers per tensor, and the model is the same."""

import numpy as np
import pytest
import torch

import sordino as sd
from sordino import methods
from sordino.client.local import projected
from sordino.engine.simulate import CHUNK_HELD, collect
from sordino.study import session

SETTINGS = {"rounds": 4, "rate": 0.2, "steps": 2, "lr": 0.2, "clip": 0.7}


def orthonormal(rows, columns, seed):
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn)[0]


def sent_by(private):
    basis = torch.cat([orthonormal(5, 2, 0), orthonormal(3, 2, 1)])
    public = {"basis": basis, "basis_sizes": [5, 3], "private": torch.tensor(private)[:, None]}
    start, ended = torch.zeros(2, 8), torch.arange(16.0).view(2, 8)
    upload, _ = projected().finish(ended.clone(), start, {}, public)
    expected = torch.cat([ended[:, :5] @ basis[:5], ended[:, 5:] @ basis[5:]], 1)
    return upload, ended, expected


def test_a_private_client_sends_coefficients_and_nothing_else():
    upload, _, expected = sent_by([1.0, 1.0])
    assert list(upload) == ["coefficients"]
    assert upload["coefficients"].shape == (2, 4)
    torch.testing.assert_close(upload["coefficients"], expected)


def test_a_public_client_and_everyone_before_the_first_basis_send_updates():
    upload, ended, _ = sent_by([0.0, 0.0])
    assert list(upload) == ["update"]
    torch.testing.assert_close(upload["update"], ended)
    first, _ = projected().finish(ended.clone(), torch.zeros(2, 8), {}, {"lr": 1.0})
    assert list(first) == ["update"]


def test_where_rows_of_both_kinds_are_in_one_matrix_each_has_one_of_the_two():
    upload, ended, expected = sent_by([1.0, 0.0])
    torch.testing.assert_close(upload["update"], ended * torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(upload["coefficients"], expected * torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize("select", [{}, {"select": "uniform"}])
def test_the_model_is_that_of_whole_uploads(digits, monkeypatch, select):
    monkeypatch.setattr(session.Prepared, "key", property(lambda self: "the same for all"))
    keys = {**SETTINGS, "select": 5} if select else SETTINGS
    short = sd.train(digits, "logistic", methods.get("pfa-plus", select), **keys)
    whole = sd.train(digits, "logistic", methods.get("pfa-plus", {"local": "sgd", **select}), **keys)
    gap = np.linalg.norm(short.weights - whole.weights) / np.linalg.norm(whole.weights)
    assert gap < 1e-5


@pytest.fixture
def collected(digits, monkeypatch):
    """Train, with so many bytes of records to a pass; returns what every chunk uploaded."""

    def train(held):
        seen = []
        monkeypatch.setattr("sordino.engine.simulate.CHUNK_HELD", held)
        monkeypatch.setattr(
            "sordino.engine.simulate.collect",
            lambda uploads, upload, rows, count: (seen.append(upload.parts), collect(uploads, upload, rows, count)),
        )
        sd.train(digits, "logistic", "pfa-plus", **SETTINGS)
        return seen

    return train


def test_private_clients_upload_no_update_after_the_first_round(digits, collected):
    seen = [sorted(parts) for parts in collected(held=0)]
    first, later = seen[: len(digits)], seen[len(digits) :]
    assert first == [["update"]] * len(digits)
    assert ["coefficients"] in later
    assert ["update"] in later, "somebody is public"
    assert ["coefficients", "update"] not in later


def test_in_a_pass_of_several_clients_every_row_has_one_of_the_two(collected):
    both = [parts for parts in collected(CHUNK_HELD) if len(parts) == 2]
    assert both, "private and public clients have shared a pass"
    for parts in both:
        sent = torch.stack([parts[name].value.abs().sum(1) > 0 for name in ("update", "coefficients")])
        assert (sent.sum(0) == 1).all()
        assert sent.any(1).all()
