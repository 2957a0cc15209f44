"""The workloads: one round each, on random data, the same records for every peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import methods, models
from sordino.errors import BadInput
from sordino.methods import Plan, Population, Training
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.types import Budget

KEY = "bench"


@dataclass(frozen=True)
class Workload:
    """One round: ``clients`` × ``steps`` × an expected ``batch``."""

    name: str
    clients: int
    steps: int
    batch: int
    records: int
    model: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    words_of: int | None = None
    """Records are whole numbers below this, such as words' ids; None: they are numbers at random."""

    @property
    def words(self) -> str:
        """The workload in words."""
        options = "".join(f", {key} {value}" for key, value in self.options.items())
        clients, steps = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in zip((self.clients, self.steps), WORDS))
        return f"{clients} × {steps} × batch {self.batch}, {self.model.rpartition(':')[2]}{options}"


WORDS = ("client", "step")

# W3 is ResNet-18 as it is usual on 32×32 images (3×3 stem, 11,173,962 parameters): the work that the field's figures
# were measured on. The published 7×7 stem (11,181,642 parameters) shrinks the image to 8×8 before the first block: an
# eighth of the work over as many parameters, so that what a round does once over all of them weighs far more.
# W5 is a round of scatter-linear on 28×28 images: its features are computed once, for every peer, before any round.
# W6 is a transformer encoder of two layers, width 128, on 64 words of 1,000; W7 the same, frozen, with LoRA of rank 8.
# W8 is what small tables and features are trained by: many steps of many clients, hardly any arithmetic in each.
ENCODER = "bench.encoder:encoder"
WORKLOADS = {
    one.name: one
    for one in (
        Workload("W1", 20, 38, 64, 2400, "robust-hdp-cnn", (1, 28, 28)),
        Workload("W2", 10, 1, 300, 6000, "fedavg-cnn", (1, 28, 28)),
        Workload("W3", 1, 1, 32, 640, "resnet18-gn", (3, 32, 32), {"stem": "small"}),
        Workload("W3-large-stem", 1, 1, 32, 640, "resnet18-gn", (3, 32, 32), {"stem": "large"}),
        Workload("W4", 1000, 1, 32, 320, "robust-hdp-cnn", (1, 28, 28)),
        Workload("W5", 20, 1, 240, 2400, "linear", (2402,)),
        Workload("W6", 1, 10, 64, 1280, ENCODER, (64,), {}, 1000),
        Workload("W7", 1, 10, 64, 1280, ENCODER, (64,), {"lora": 8}, 1000),
        Workload("W8", 20, 10, 32, 640, "mlp", (64,)),
    )
}


@dataclass(frozen=True)
class Task:
    """A workload made concrete: data, first model, plan, and the batches every peer must use."""

    work: Workload
    x: Tensor
    y: Tensor
    model: nn.Module
    plan: Plan
    batches: list[Batches]
    deterministic: bool = True
    """Whether a GPU is to repeat sordino's rounds bit for bit, as it does by default."""

    def own(self, client: int) -> NDArray[np.int64]:
        """Positions of a client's records in the pool. Clients of a large workload share one pool, to save memory."""
        pool = len(self.y) // self.work.records
        start = (client % pool) * self.work.records
        return np.arange(start, start + self.work.records)

    def place(self, where: NDArray[np.int64]) -> Tensor:
        """Positions of records, on the records' device."""
        return torch.from_numpy(where).to(self.y.device)

    def spread(self, client: int) -> float:
        """z, a client's noise multiplier."""
        return self.plan.clients[client].noise


def find(name: str) -> Workload:
    """A workload by name."""
    if name not in WORKLOADS:
        raise BadInput(f"workload {name!r} is unknown: use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def trained_in(model: nn.Module) -> int:
    """How many numbers of a model are trained."""
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def plan_of(work: Workload, dimension: int, unit: int = 1, rounds: int = 2) -> Plan:
    """dp-fedavg's plan; with units of several records of as many fewer units a batch, so that records are as many."""
    names = tuple(f"client-{i}" for i in range(work.clients))
    sizes = np.full(work.clients, work.records // unit, dtype=np.int64)
    population = Population(names, sizes, (Budget(8.0, 1e-5),) * work.clients)
    # More rounds are planned than are timed: nobody looks at the model but after the last.
    training = Training(rounds=rounds, batch=work.batch // unit, steps=work.steps, lr=0.05, clip=1.0, evaluate=rounds)
    return methods.make_plan(methods.get("dp-fedavg"), training, population, dimension, 0)


def prepare(work: Workload, pool: int = 40, device: str = "cpu", deterministic: bool = True) -> Task:
    """Random records, the model, dp-fedavg's plan, and one round's batches as sordino's sampler draws them."""
    generator = torch.Generator().manual_seed(0)
    records = work.records * min(work.clients, pool)
    if work.words_of is None:
        x = torch.randn(records, *work.shape, generator=generator)
    else:
        x = torch.randint(1, work.words_of, (records, *work.shape), generator=generator)
    y = torch.randint(0, 10, (records,), generator=generator)
    model = models.build(work.model, work.shape, 10, 0, **work.options)
    plan = plan_of(work, trained_in(model))
    source = Keyed(KEY)
    batches = [
        source.batches(Turn(c.name, 1), "gradient", c.terms.sampling, c.records, c.terms.count) for c in plan.clients
    ]
    return Task(work, x.to(device), y.to(device), model.to(device), plan, batches, deterministic)
