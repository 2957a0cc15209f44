"""What a turn does once over a long vector: descent that leaves the weights as they were."""

import torch

from sordino.client.corrections import fedprox
from sordino.client.local import sgd


def test_plain_descent_leaves_one_row_of_weights_and_others_say_that_they_do_not():
    weights, gradient = torch.randn(1, 9), torch.randn(1, 9)
    before, wanted = weights.clone(), weights - gradient * 0.1
    after, _ = sgd().update(weights, {}, gradient, {"lr": 0.1})
    assert torch.equal(weights, before)
    assert torch.equal(after, wanted)
    assert sgd().leaves
    assert not fedprox(0.1).leaves
