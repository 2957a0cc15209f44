"""Every layer the fast engine has a rule for, against a float64 loop over records."""

import pytest
import torch
from gradient_reference import assert_graded_like_plain
from torch import nn

from sordino.client import gradients
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.layers import order_of
from sordino.client.gradients.losses import loss_by_name
from sordino.models import isolated
from sordino.models.standardised import StandardisedConv2d


def head(features, classes=3):
    return [nn.Flatten(), nn.Linear(features, classes)]


def partly_frozen():
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), *head(6 * 36))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


@isolated
class Residual(nn.Module):
    """Forward code of its own: a branch, a skip connection, a functional call, a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.unused = nn.Linear(4, 4)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = nn.functional.gelu(self.norm(self.first(x)))
        h = h + torch.tanh(self.second(h))
        return self.out(h.mean((2, 3)))


@isolated
class Overwriting(nn.Module):
    """Activations written over their inputs, as much published code does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = self.act(self.norm(self.act(self.first(x))))
        skipped = self.second(h)
        skipped += h
        return self.out(self.act(skipped).mean((2, 3)))


@isolated
class Tokens(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        self.table = nn.Embedding(7, 5, padding_idx=padding)
        self.norm = nn.LayerNorm(5)
        self.mix = nn.Linear(5, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.relu(self.mix(self.norm(self.table(x)))).mean(1))


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(6, 3, bias=False)), (6,)),
    "linear, few positions": (lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(), *head(60)), (2, 20)),
    "linear, many positions": (lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), *head(60)), (5, 6, 3)),
    "conv2d, one channel": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), *head(256)), (1, 8, 8)),
    "conv2d, one channel, strided": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(1, 0)), nn.ReLU(), *head(112)),
        (1, 8, 8),
    ),
    "conv2d, one channel, after a layer": (
        lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.Tanh(), nn.Conv2d(1, 4, 3, padding=1), *head(144)),
        (3, 8, 8),
    ),
    "conv2d, dense": (
        lambda: nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, (5, 3)), *head(200)),
        (6, 12, 7),
    ),
    "conv2d, stride": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, bias=False), *head(200)), (6, 12, 11)),
    "conv2d, dilation": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3, dilation=2, padding=2), *head(400)), (6, 10, 10)),
    "conv2d, groups": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, groups=2, padding=1), *head(288)), (6, 6, 6)),
    "conv2d, depthwise": (
        lambda: nn.Sequential(nn.Conv2d(6, 12, 3, groups=6, stride=2, padding=1), *head(108)),
        (6, 6, 6),
    ),
    "conv2d, ghost, one position": (lambda: nn.Sequential(nn.Conv2d(16, 32, 4), *head(32)), (16, 4, 4)),
    "conv2d, ghost, few positions": (lambda: nn.Sequential(nn.Conv2d(16, 300, 3), *head(1200)), (16, 4, 4)),
    "conv2d, ghost, many positions": (lambda: nn.Sequential(nn.Conv2d(16, 64, 3), *head(1024)), (16, 6, 6)),
    "conv2d, same padding": (lambda: nn.Sequential(nn.Conv2d(6, 5, 4, padding="same"), *head(180)), (6, 6, 6)),
    "conv2d, reflected": (
        lambda: nn.Sequential(nn.Conv2d(6, 5, 3, padding=1, padding_mode="reflect"), *head(180)),
        (6, 6, 6),
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), *head(160)), (6, 20)),
    "conv1d, stride, dilation, groups": (
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3, stride=2, dilation=2, groups=2), nn.ReLU(), *head(64)),
        (6, 20),
    ),
    "conv1d, circular": (
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"), *head(80)),
        (6, 10),
    ),
    "conv2d, standardised": (
        lambda: nn.Sequential(
            StandardisedConv2d(1, 4, 3), nn.Tanh(), StandardisedConv2d(4, 6, 3, stride=2, padding=1), *head(54)
        ),
        (1, 8, 8),
    ),
    "conv2d, standardised, pooled, groups": (
        lambda: nn.Sequential(
            StandardisedConv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2), StandardisedConv2d(6, 4, 2, groups=2), *head(16)
        ),
        (4, 8, 8),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.MaxPool2d(2), *head(54)),
        (3, 8, 8),
    ),
    "group norm of vectors": (lambda: nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), *head(8)), (5,)),
    "instance norm 2d": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.ReLU(), *head(75)),
        (3, 5, 5),
    ),
    "instance norm 1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), *head(32)),
        (3, 10),
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), *head(24)), (4, 5)),
    "layer norm over two axes": (lambda: nn.Sequential(nn.LayerNorm([4, 5]), nn.ReLU(), *head(60)), (3, 4, 5)),
    "layer norm without bias": (lambda: nn.Sequential(nn.LayerNorm(5, bias=False), nn.ReLU(), *head(5)), (5,)),
    "relu before pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1), *head(45)),
        (2, 7, 7),
    ),
    "a chain of other modules": (
        lambda: nn.Sequential(
            nn.Hardtanh(),
            nn.Sequential(nn.Conv2d(2, 5, 3), nn.GELU(), nn.AvgPool2d(2)),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Sigmoid(),
            nn.ReLU(),
            *head(20),
        ),
        (2, 8, 8),
    ),
    "partly frozen": (partly_frozen, (2, 8, 8)),
    "forward code of its own": (Residual, (3, 6, 6)),
    "activations in place": (Overwriting, (1, 8, 8)),
    "activations in place, in a chain": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Hardtanh(inplace=True), *head(144)),
        (1, 8, 8),
    ),
}


def random_batch(shape, rows=2, width=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, *shape, generator=generator), torch.randint(
        0, 3, (rows, width), generator=generator
    )


@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_the_losses_norms_and_sums_of_a_loop_over_records(case):
    torch.manual_seed(0)
    factory, shape = CASES[case]
    model = factory()
    x, y = random_batch(shape)
    engine = gradients.build(model, "cross-entropy", "fast")
    assert_graded_like_plain(engine, model, x, y)


@pytest.mark.parametrize("case", CASES)
def test_rows_stacked_for_a_gpu_give_the_same(case):
    torch.manual_seed(0)
    factory, shape = CASES[case]
    model = factory()
    x, y = random_batch(shape, rows=3, width=4)
    assert_graded_like_plain(Fast(model, loss_by_name("cross-entropy"), stack=True), model, x, y)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("stack", [None, True])
def test_an_embedding_counts_repeated_tokens_together(padding, stack):
    torch.manual_seed(0)
    model = Tokens(padding)
    x = torch.tensor([[[1, 1, 2, 0], [3, 3, 3, 3], [0, 0, 6, 5]], [[4, 2, 2, 4], [0, 0, 0, 0], [6, 5, 4, 3]]])
    y = torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert_graded_like_plain(Fast(model, loss_by_name("cross-entropy"), stack=stack), model, x, y)


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_regression_has_half_the_squared_error(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    x, y = torch.randn(2, 5, 4), torch.randn(2, 5)
    engine = gradients.build(model, "half-squared-error", kind)
    assert_graded_like_plain(engine, model, x, y, loss="half-squared-error")


def test_a_batch_in_many_blocks_is_the_same_as_in_one(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 80, 3), nn.ReLU(), *head(80))
    engine = gradients.build(model, "cross-entropy", "fast")
    x, y = random_batch((1, 8, 8), rows=1, width=50)
    params = engine.flatten(model).unsqueeze(0)
    whole = engine(params, x, y)
    norms, total = whole.norms, whole.pull(torch.ones(1, 50))
    monkeypatch.setattr("sordino.client.gradients.fast.BLOCK_BYTES", 1)
    monkeypatch.setattr("sordino.client.gradients.fast.WEIGHT_READS", 0)
    blocks = engine(params, x, y)
    torch.testing.assert_close(blocks.norms, norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(blocks.pull(torch.ones(1, 50)), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", torch.channels_last), ("meta", torch.contiguous_format)])
def test_group_norm_keeps_channels_last_where_its_kernels_take_them(device, wanted):
    """A GPU's refuse them; a tensor without values stands for one on it."""
    images = torch.empty(2, 6, 4, 4, device=device).contiguous(memory_format=torch.channels_last)
    assert order_of(images) is wanted
    assert order_of(images.contiguous()) is torch.contiguous_format
