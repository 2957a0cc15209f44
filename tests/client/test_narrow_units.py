"""A batch in which nobody has as many records as the largest unit of all: it is cut to the batch's own width."""

import pytest
import torch
from gradient_reference import plain_gradients, relative

from sordino import models
from sordino.client import gradients
from sordino.client.rows import Records


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_units_with_few_records_are_graded_by_the_mean_of_their_own(kind):
    model = models.build("logistic", (5,), 2)
    engine = gradients.build(model, "cross-entropy", kind, copies=4)
    x, y = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    members = torch.tensor([[0, 1, 2, 3], [4, 5, -1, -1], [6, -1, -1, -1]])
    own_x, own_y, mask = Records(x, y, members=members).at(torch.tensor([1, 2]))
    assert own_x.shape == (2, 2, 5)
    weights = engine.flatten(model)
    graded = engine(weights[None], own_x[None], own_y[None], mask[None])
    _, each = plain_gradients(model, weights.double(), x, y)
    wanted = torch.stack([each[4:6].mean(0), each[6]])
    assert relative(graded.norms[0], wanted.norm(dim=1)) < 1e-5
    assert relative(graded.pull(torch.tensor([[0.5, 2.0]]))[0], torch.tensor([0.5, 2.0]).double() @ wanted) < 1e-5
