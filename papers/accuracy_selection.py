"""``auto`` on the selection paper's federations: 100 clients, ε ~ U(0, 1), nothing searched, beside what it prints."""

from __future__ import annotations

from papers import selection
from papers.accuracy_published import AUTO, SHARED, default_cell, says, with_shared_noise
from papers.experiment import CENTRAL, Cell, Experiment, Place, Quick

BLOCKS = {"mnist": "ε ~ U(0, 1) on MNIST (Table III)", "fashion-mnist": "ε ~ U(0, 1) on Fashion-MNIST (Table IV)"}
PRINTED = {"mnist": selection.TABLE_3, "fashion-mnist": selection.TABLE_4}


def cells() -> tuple[Cell, ...]:
    """Runs of ``auto`` at its defaults for every column of both tables, for both kinds of trust."""
    alone = tuple(
        default_cell(
            (block, AUTO, f"s = {s}"),
            {"name": data, **selection.DRAWN, "similarity": s},
            {"delta": 1e-5, **selection.UNIFORM},
        )
        for data, block in BLOCKS.items()
        for s in selection.SIMILARITIES
    )
    return (*alone, *map(with_shared_noise, alone))


def printed() -> dict[Place, tuple[float | None, ...]]:
    """The best that the paper prints for a federation."""
    return {
        (block, row, f"s = {s}"): (max(values[k] for values in PRINTED[data].values()),)
        for data, block in BLOCKS.items()
        for row in (AUTO, SHARED)
        for k, s in enumerate(selection.SIMILARITIES)
    }


EXPERIMENTS = (
    Experiment(
        name="accuracy/selection",
        title="auto, with nothing searched, on the selection paper's federations, beside the best printed",
        cost="80 runs of a linear head on scattering features, 24,020 parameters, 100 clients; an hour on one core",
        measures=(CENTRAL,),
        published=printed(),
        differs=(
            "Not a table of the paper: its federations and budgets, with the method and the model that sordino takes "
            "by default, every release counted by the tight accountant. All clients take part in every round, where "
            "the paper draws ten. The network is ours, a linear head on fixed scattering features; what is printed "
            "beside it is the best of the paper's rules in that column, with its network and its noise.",
            "Noise per site holds against the server and all other sites together. Shared noise holds against the "
            "server and any half of all sites: the server sees the sum of all messages alone. The same budgets, "
            "another trust; the paper's numbers are with noise per site.",
            "Nothing is searched: rounds, batches and steps follow from sizes, budgets and the model (docs/tuning.md).",
        ),
        cells=cells,
        seeds=5,
        features=True,
        quick=Quick(
            columns=("s = 30",),
            data={"options": {"records": 2000}, "clients": 10},
            training={"rounds": 10, "evaluate": 10},
        ),
        conclude=says,
        axes=("method", "similarity"),
    ),
)
