"""Data: sources by name, your own files, partitions into clients, budget distributions.

``load(name)`` gives a ``Dataset``; ``Dataset.partition(kind, …)`` deals it to clients and gives a ``Federation``;
``Federation.with_budgets(spec, …)`` gives every client its (ε, δ). ``from_folder``, ``from_arrays`` and
``from_datasets`` make a ``Federation`` of data that already belongs to clients.
"""

from sordino.data.budgets import DISTRIBUTIONS
from sordino.data.dataset import OPTIONS as PARTITIONS
from sordino.data.dataset import Dataset
from sordino.data.draft import draft_schema
from sordino.data.federation import Federation
from sordino.data.fetch import available, get
from sordino.data.own import from_arrays, from_datasets, from_folder
from sordino.data.sources import SOURCES, load

__all__ = [
    "DISTRIBUTIONS",
    "PARTITIONS",
    "SOURCES",
    "Dataset",
    "Federation",
    "available",
    "draft_schema",
    "from_arrays",
    "from_datasets",
    "from_folder",
    "get",
    "load",
]
