"""The peers: the same records, the same steps, as one writes them with each library. Each returns "one round"."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.flower import flower
from bench.ours import Running, persons, sordino
from bench.vmapped import vmapped, vmapped_stacked
from bench.workloads import Task
from sordino.errors import BadInput
from sordino.models.attention import take_apart

Round = Callable[[], object]


def plain(task: Task, channels_last: bool = False) -> Round:
    """Non-private PyTorch: sequential clients, contiguous tensors, ``torch.optim.SGD``. NOT PRIVATE."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = task.x.to(memory_format=form) if task.x.dim() == 4 else task.x
    first = copy.deepcopy(task.model)
    first.to(memory_format=form)  # type: ignore[call-overload]  # documented, not annotated
    local = copy.deepcopy(first)

    def run() -> None:
        total = [torch.zeros_like(p) for p in trained(first)]
        for client in range(task.work.clients):
            local.load_state_dict(first.state_dict())
            optimizer = torch.optim.SGD(trained(local), lr=0.05)
            own = task.own(client)
            for batch in task.batches[client]:
                where = task.place(own[batch])
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x[where]), task.y[where]).backward()
                optimizer.step()
            _add(total, local, first)

    return run


def plain_channels_last(task: Task) -> Round:
    """Non-private PyTorch with channels last. NOT PRIVATE."""
    return plain(task, channels_last=True)


def opacus(task: Task) -> Round:
    """Opacus with hooks: per-sample gradients, ``DPOptimizer``."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    first = _hooked(task)
    local = GradSampleModule(copy.deepcopy(first))

    def step(optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(local(x), y).backward()
        optimizer.step()

    return _opacus_round(task, first, local, DPOptimizer, step, {})


def ghost(task: Task) -> Round:
    """Opacus with ghost clipping: two backward passes, no per-sample gradients."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    first = _hooked(task)
    local = GradSampleModuleFastGradientClipping(copy.deepcopy(first), max_grad_norm=1.0, use_ghost_clipping=True)

    def step(optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = DPLossFastGradientClipping(local, optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean")
        loss(local(x), y).backward()
        optimizer.step()

    return _opacus_round(task, first, local, DPOptimizerFastGradientClipping, step, {})


def _hooked(task: Task) -> nn.Module:
    """The model with layers that Opacus has hooks for: attention with its projections as linear layers."""
    model = copy.deepcopy(task.model)
    list(take_apart(model))
    return model


def _opacus_round(task: Task, first: nn.Module, local: Any, kind: Any, step: Any, options: dict[str, Any]) -> Round:
    def run() -> None:
        total = [torch.zeros_like(p) for p in trained(first)]
        for client in range(task.work.clients):
            local._module.load_state_dict(first.state_dict())
            optimizer = kind(
                torch.optim.SGD(trained(local), lr=0.05),
                noise_multiplier=task.plan.clients[client].noise,
                max_grad_norm=1.0,
                expected_batch_size=task.work.batch,
                **options,
            )
            own = task.own(client)
            for batch in task.batches[client]:
                where = task.place(own[batch])
                optimizer.zero_grad()
                step(optimizer, task.x[where], task.y[where])
            _add(total, local._module, first)

    return run


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained: all but frozen ones."""
    return [one for one in model.parameters() if one.requires_grad]


def _add(total: list[torch.Tensor], local: nn.Module, first: nn.Module) -> None:
    with torch.no_grad():
        for t, a, b in zip(total, trained(local), trained(first)):
            t.add_(a.data - b.data)


PEERS: dict[str, Callable[[Task], Round]] = {
    "sordino": sordino,
    "sordino-running": Running,
    "sordino-mixed": partial(Running, mixed=True),
    "persons": persons,
    "plain": plain,
    "plain-channels-last": plain_channels_last,
    "opacus": opacus,
    "ghost": ghost,
    "vmap": vmapped,
    "vmap-stacked": vmapped_stacked,
    "flower": flower,
}


def find(name: str) -> Callable[[Task], Round]:
    """A peer by name."""
    if name not in PEERS:
        raise BadInput(f"peer {name!r} is unknown: use one of {', '.join(PEERS)}")
    return PEERS[name]
