"""What an observer sees in simulation, of the model and of clipping: free, and not covered by any guarantee (R12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.gradients import Engine
from sordino.client.rows import Records
from sordino.engine.sharded import ALONE, Shard

BATCH = 1024

Own = Callable[[int], Tensor]
"""A client's own model, by its place."""


def _means(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Means of consecutive stretches of these sizes; NaN of an empty one."""
    ends = np.cumsum(sizes)
    return np.array([values[end - size : end].mean() if size else np.nan for size, end in zip(sizes, ends)])


def spread(accuracy: NDArray[np.float64]) -> dict[str, float]:
    """How unequal clients fare: variance over clients, and the means of the worst and the best tenth (at least one)."""
    ranked = np.sort(accuracy)
    tenth = max(1, round(len(ranked) / 10))
    return {
        "accuracy_variance": float(ranked.var()),
        "worst_decile": float(ranked[:tenth].mean()),
        "best_decile": float(ranked[-tenth:].mean()),
    }


def budget_groups(epsilons: Sequence[float], groups: int = 3) -> list[list[int]]:
    """Places of the clients in at most ``groups`` groups by ε, strictest first; none when all have the same ε.

    Groups are as equal in number as they can be without parting clients of one ε.
    """
    levels, counts = np.unique(np.asarray(epsilons, dtype=np.float64), return_counts=True)
    if len(levels) < 2:
        return []
    middles = np.cumsum(counts) - counts / 2
    place = np.minimum((middles * groups / counts.sum()).astype(int), groups - 1)
    mine = place[np.searchsorted(levels, epsilons)]
    return [np.flatnonzero(mine == group).tolist() for group in np.unique(place)]


def by_budget(
    epsilons: Sequence[float], accuracy: Sequence[float | None] | None, loss: Sequence[float | None], groups: int = 3
) -> list[dict[str, Any]]:
    """Do strict clients get a worse model? Accuracy and loss of ``budget_groups``, strictest first."""
    found = []
    for members in budget_groups(epsilons, groups):
        inside = [epsilons[i] for i in members]
        hits = [] if accuracy is None else [a for i in members if (a := accuracy[i]) is not None]
        misses = [v for i in members if (v := loss[i]) is not None]
        found.append(
            {
                "least_epsilon": float(min(inside)),
                "most_epsilon": float(max(inside)),
                "clients": len(members),
                "accuracy": float(np.mean(hits)) if hits else None,
                "loss": float(np.mean(misses)) if misses else None,
            }
        )
    return found


class Observer:
    """Evaluates weights on every client's test records and on the central test set, in one sweep over the records.

    Clients without test records are judged by their training records. Where several processes simulate a run, each
    looks at the clients of its ``shard`` and at a share of the central test set.
    """

    def __init__(
        self,
        engine: Engine,
        loss: Callable[[Tensor, Tensor], Tensor],
        records: Records,
        held: list[NDArray[np.int64]],
        sizes: NDArray[np.int64],
        central: Records | None,
        classification: bool,
        train: list[NDArray[np.int64]] | None = None,
        shard: Shard = ALONE,
    ) -> None:
        self.engine = engine
        self.loss = loss
        self.records = records.single
        self.held, self.train = held, train or []
        if records.valid is not None:
            valid = records.valid.cpu().numpy()
            self.held, self.train = ([one[valid[one]] for one in part] for part in (self.held, self.train))
        self.shares = sizes / sizes.sum()
        self.central = central
        self.classification = classification
        self.shard = shard

    def look(self, weights: Tensor, own: Own | None = None) -> dict[str, Any]:
        """Accuracy (mean, spread, per client), loss Σ p_i F_i, unfairness Ψ = Σ p_i (F_i − F)², central accuracy.

        With ``own``, every client's records are judged by its own model; the central test set always by ``weights``.
        """
        loss, accuracy = self._each(weights, self.held, own)
        overall, unfairness = self._psi(loss, self.held)
        found: dict[str, Any] = {
            "accuracy": float(np.nanmean(accuracy)) if self.classification else None,
            "loss": overall,
            "psi": unfairness,
            "worst_accuracy": float(np.nanmin(accuracy)) if self.classification else None,
            "client_accuracy": [None if np.isnan(a) else float(a) for a in accuracy] if self.classification else None,
            "client_loss": [None if np.isnan(v) else float(v) for v in loss],
        }
        if self.classification:
            found |= spread(accuracy[~np.isnan(accuracy)])
        if (central := self.central) is not None:
            where = torch.arange(len(central.y))[self.shard.rank :: self.shard.size]
            swept = self.shard.together(lambda: self._sweep(weights, central, where))
            central_loss, hits = self._added(np.array([one.sum() for one in swept])) / len(central.y)
            found["central_accuracy"] = float(hits) if self.classification else None
            found["central_loss"] = float(central_loss)
        return found

    def look_back(self, weights: Tensor, own: Own | None = None) -> dict[str, float]:
        """Loss and Ψ on the records that were trained on, where the observer was given them."""
        if not self.train:
            return {}
        overall, unfairness = self._psi(self._each(weights, self.train, own)[0], self.train)
        return {"train_loss": overall, "train_psi": unfairness}

    def constant(self) -> dict[str, Any]:
        """How good it is to answer every client's records alike: its majority training class, or its mean target."""
        labels = self.records.y.cpu().numpy()
        found = []
        for train, held in zip(self.train, self.held):
            if not len(train) or not len(held):
                found.append(np.nan)
            elif self.classification:
                found.append(float((labels[held] == np.bincount(labels[train]).argmax()).mean()))
            else:
                gap = (labels[held] - labels[train].mean(axis=0)).reshape(len(held), -1)
                found.append(float((gap**2).sum(axis=1).mean() / 2))
        key = "accuracy" if self.classification else "loss"
        mean = np.nanmean(found) if self.classification else self._psi(np.array(found), self.held)[0]
        return {key: float(mean), f"client_{key}": [None if np.isnan(one) else one for one in found]}

    def outputs(self, weights: Tensor, own: Own | None = None) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Outputs and targets, a row a record: of the central test set where there is one, else of clients' records.

        With ``own`` always of the clients' records, each judged by its client's own model.
        """
        if own is not None:
            mine = self.shard.rows(np.arange(len(self.held))).tolist()
            part = self.shard.together(
                lambda: {i: self._outputs(own(i), self.records, torch.from_numpy(self.held[i])) for i in mine}
            )
            each = {i: one for some in self.shard.gathered(part) for i, one in some.items()}
            found = [each[i] for i in range(len(self.held))]
        elif self.central is not None:
            central, every = self.central, torch.arange(len(self.central.y))
            found = [self.shard.of_first(lambda: self._outputs(weights, central, every))]
        else:
            every = torch.from_numpy(np.concatenate(self.held))
            found = [self.shard.of_first(lambda: self._outputs(weights, self.records, every))]
        rows = torch.cat([outputs for some in found for outputs, _ in some])
        return rows.reshape(len(rows), -1).numpy(), torch.cat([y for some in found for _, y in some]).numpy()

    def _outputs(self, weights: Tensor, records: Records, where: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Outputs and targets of these records, batch by batch."""
        found = []
        with torch.no_grad():
            for piece in where.split(BATCH) if len(where) else ():
                x, y, _ = records.at(piece.to(records.y.device))
                found.append((self.engine.predict(weights, x).double().cpu(), y.cpu()))
        return found

    def _psi(self, loss: NDArray[np.float64], lists: list[NDArray[np.int64]]) -> tuple[float, float]:
        """F = Σ p_i F_i and Ψ = Σ p_i (F_i − F)², over clients with records; not a number where a loss is none."""
        seen = np.array([len(one) > 0 for one in lists])
        shares = self.shares[seen] / max(self.shares[seen].sum(), 1e-300)
        with np.errstate(invalid="ignore", over="ignore"):
            overall = float((shares * loss[seen]).sum())
            return overall, float((shares * (loss[seen] - overall) ** 2).sum())

    def _each(
        self, weights: Tensor, lists: list[NDArray[np.int64]], own: Own | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean loss and accuracy of every client's records; NaN for a client without any."""
        mine = self.shard.rows(np.arange(len(lists)))
        sizes = np.array([len(lists[i]) for i in mine], dtype=np.int64)

        def swept() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            if own is None:
                where = np.concatenate([np.zeros(0, dtype=np.int64), *(lists[i] for i in mine)])
                return self._sweep(weights, self.records, torch.from_numpy(where))
            each = [self._sweep(own(i), self.records, torch.from_numpy(lists[i])) for i in mine.tolist()]
            losses, hits = zip(*each) if each else ([np.zeros(0)], [np.zeros(0)])
            return np.concatenate(losses), np.concatenate(hits)

        found = np.zeros((2, len(lists)))
        for place, values in enumerate(self.shard.together(swept)):
            found[place, mine] = _means(values, sizes)
        loss, accuracy = self._added(found)
        return loss, accuracy

    def _added(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Σ over processes; what is not a number stays so."""
        if self.shard.size == 1:
            return values
        total = self.shard.summed(torch.from_numpy(values).to(self.records.y.device))
        return np.asarray(total.cpu().numpy())

    def _sweep(
        self, weights: Tensor, records: Records, where: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # In place: small arrays left between large ones would keep the latter's memory from being used again.
        losses, hits = np.zeros(len(where)), np.zeros(len(where))
        with torch.no_grad():
            for start in range(0, len(where), BATCH):
                part = slice(start, start + BATCH)
                x, y, _ = records.at(where[part].to(records.y.device))
                out = self.engine.predict(weights, x)
                losses[part] = self.loss(out, y).double().cpu().numpy()
                if self.classification:
                    hits[part] = (out.argmax(-1) == y).cpu().numpy()
        return losses, hits
