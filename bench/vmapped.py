"""The peer that one writes with torch alone: per-record gradients by ``torch.func``, clipped, summed and noised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bench.workloads import Task

Named = dict[str, Tensor]
LR, CLIP = 0.05, 1.0
KEPT = 1 << 30
"""Bytes of per-record gradients that stacked clients may keep at a time."""


def vmapped(task: Task) -> Callable[[], Named]:
    """``vmap`` over the records of a batch, clients one after the other."""
    first, step = _weights(task), _step_of(task.model)

    def run() -> Named:
        total = {name: torch.zeros_like(one) for name, one in first.items()}
        for client in range(task.work.clients):
            now, own = first, task.own(client)
            for batch in task.batches[client]:
                where = task.place(own[batch])
                real = torch.ones(len(batch), device=where.device)
                now = step(now, task.x[where], task.y[where], real, task.spread(client), task.work.batch)
            total = {name: one + now[name] - first[name] for name, one in total.items()}
        return total

    return run


def vmapped_stacked(task: Task) -> Callable[[], Named]:
    """``vmap`` over clients and over their records: padded batches, as many clients at a time as may be kept."""
    first, step = _weights(task), _step_of(task.model)
    count, steps = task.work.clients, task.work.steps
    most = max(len(batch) for own in task.batches for batch in own)
    size = sum(one.numel() * one.element_size() for one in first.values())
    some = max(1, KEPT // (size * most))
    mapped = vmap(step, in_dims=(0, 0, 0, 0, 0, None), randomness="different", chunk_size=some)
    spread = torch.tensor([task.spread(client) for client in range(count)], device=task.y.device)

    def run() -> Named:
        now = {name: one.expand(count, *one.shape) for name, one in first.items()}
        for place in range(steps):
            where = torch.zeros(count, most, dtype=torch.long)
            real = torch.zeros(count, most)
            for client in range(count):
                drawn = task.own(client)[task.batches[client][place]]
                where[client, : len(drawn)], real[client, : len(drawn)] = torch.from_numpy(drawn), 1.0
            there = where.to(task.y.device)
            now = mapped(now, task.x[there], task.y[there], real.to(there.device), spread, task.work.batch)
        return {name: (one - first[name]).sum(0) for name, one in now.items()}

    return run


def _weights(task: Task) -> Named:
    return {name: one.detach() for name, one in task.model.named_parameters()}


def _step_of(model: nn.Module) -> Callable[..., Named]:
    def loss(named: Named, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, named, (x[None],)), y[None])

    def step(named: Named, x: Tensor, y: Tensor, real: Tensor, spread: Tensor | float, batch: int) -> Named:
        """w − η(Σ_j min(1, C/‖g_j‖) g_j + zC·N(0, 1))/b over the real records of a batch."""
        found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(named, x, y)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)
        factors = real * (CLIP / norms.clamp_min(1e-30)).clamp(max=1.0)
        sums = {name: torch.tensordot(factors, one, dims=1) for name, one in found.items()}
        noised = {name: one + spread * CLIP * torch.randn_like(one) for name, one in sums.items()}
        return {name: one - LR * noised[name] / batch for name, one in named.items()}

    return step
