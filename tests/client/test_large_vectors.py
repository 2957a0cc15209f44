"""What a turn does once over a long vector: descent that leaves the weights, noise in pieces of any size."""

import numpy as np
import torch

from sordino.client.corrections import fedprox
from sordino.client.local import sgd
from sordino.privacy import generators


def test_plain_descent_leaves_one_row_of_weights_and_others_say_that_they_do_not():
    weights, gradient = torch.randn(1, 9), torch.randn(1, 9)
    before, wanted = weights.clone(), weights - gradient * 0.1
    after, _ = sgd().update(weights, {}, gradient, {"lr": 0.1})
    assert torch.equal(weights, before)
    assert torch.equal(after, wanted)
    assert sgd().leaves
    assert not fedprox(0.1).leaves


def test_noise_does_not_depend_on_the_size_of_pieces_bit_for_bit(monkeypatch):
    found = []
    for size in (1 << 12, 1 << 15, generators.PIECE):
        monkeypatch.setattr(generators, "PIECE", size)
        stream, out = np.random.Generator(np.random.Philox(key=7)), np.empty(150_001, np.float32)
        generators.normals(stream, out)
        found.append(out)
    assert all(np.array_equal(found[0], other) for other in found[1:])
