"""Per-record gradients the plain way: float64, one record at a time, ordinary autograd."""

import copy

import torch
from torch import nn


def plain_losses(outputs, labels, loss):
    if loss == "cross-entropy":
        return nn.functional.cross_entropy(outputs, labels)
    return 0.5 * ((outputs.reshape(-1) - labels.reshape(-1)) ** 2).sum()


def plain_gradients(model, flat, x, y, loss="cross-entropy"):
    """Losses ``[n]`` and gradients ``[n, d]`` of every record under the flat parameters."""
    model = copy.deepcopy(model).double().eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    offset = 0
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(flat[offset : offset + parameter.numel()].view(parameter.shape))
            offset += parameter.numel()
    losses, gradients = [], []
    for record, label in zip(x, y):
        record = record.double() if record.is_floating_point() else record
        label = label.double() if label.is_floating_point() else label
        value = plain_losses(model(record.unsqueeze(0)), label.unsqueeze(0), loss)
        grads = torch.autograd.grad(value, trained, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, grads)]
        losses.append(value.detach())
        gradients.append(torch.cat([piece.reshape(-1) for piece in pieces]))
    return torch.stack(losses), torch.stack(gradients)


def relative(got, wanted):
    """‖got − wanted‖ / ‖wanted‖."""
    return float((got.double() - wanted).norm() / wanted.norm())


def rows_of_parameters(engine, model, rows, spread=0.02):
    """``[rows, d]``: the model's parameters and perturbed copies of them."""
    flat = engine.flatten(model)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(rows, flat.numel(), generator=generator, dtype=flat.dtype)
    return flat + spread * noise


def assert_graded_like_plain(engine, model, x, y, loss="cross-entropy", tolerance=1e-5):
    """Rows, padded rows and a ragged shared batch against the plain way, in losses, norms and weighted sums."""
    rows, width = y.shape[:2]
    params = rows_of_parameters(engine, model, rows)
    factors = torch.rand(rows, width, generator=torch.Generator().manual_seed(6)).to(params.dtype) + 0.1
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[-1, -1] = False
    graded = engine(params, x, y, mask)
    pulled = graded.pull(factors)
    for row in range(rows):
        losses, gradients = plain_gradients(model, params[row], x[row], y[row], loss)
        keep = mask[row].double()
        assert relative(graded.losses[row], losses * keep) < tolerance
        assert relative(graded.norms[row], gradients.norm(dim=1) * keep) < tolerance
        assert relative(pulled[row], (factors[row].double() * keep) @ gradients) < tolerance
    flat_x, flat_y, flat_factors = x.flatten(0, 1), y.flatten(0, 1), factors.flatten()
    owner = torch.arange(rows * width) * 3 // (rows * width)
    owner[owner == 1] = 0  # row 1 of the ragged batch is empty
    graded = engine.shared(params[0], flat_x, flat_y, owner, 4)
    pulled = graded.pull(flat_factors)
    losses, gradients = plain_gradients(model, params[0], flat_x, flat_y, loss)
    assert relative(graded.losses, losses) < tolerance
    assert relative(graded.norms, gradients.norm(dim=1)) < tolerance
    weights = torch.zeros(4, rows * width, dtype=torch.float64)
    weights[owner, torch.arange(rows * width)] = flat_factors.double()
    assert relative(pulled, weights @ gradients) < tolerance
    assert not pulled[1].any()
    assert not pulled[3].any()
