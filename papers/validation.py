"""What values are chosen by: records that no table reports, held out of the clients' training records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sordino.data import Federation
from sordino.data.partitions import generator

REPORTED = tuple(range(5))
"""The seeds that tables report, at most."""

HELD = 0.1
"""The share of a client's training records that choose."""


def validated(clients: Federation, reported: Sequence[Federation], seed: int) -> Federation:
    """The clients, judged by a tenth of their training records that are test records of no reported seed.

    Parameters
    ----------
    clients: as the tuning seed deals the records.
    reported: the same records as the seeds of the tables deal them.

    Guarantees
    ----------
    No record that judges here is a test record of ``reported``, nor of the server's own test set, and none is trained
    on. Where a record is a unit, as many of a client's own test records take their place, as far as there are: n_i then
    stays what it is in the table's runs.
    """
    tested = np.zeros(len(clients.x), dtype=bool)
    for other in reported:
        for part in other.test:
            tested[part] = True
    train, test = [], []
    for place, own in enumerate(clients.train):
        table = own[:, None] if clients.units is None else clients.units[own]
        free = own[~(tested[table] & (table >= 0)).any(axis=1)]
        held = generator(seed, f"validation {place}").permutation(free)[: max(1, round(HELD * len(own)))]
        instead = clients.test[place][: len(held) if clients.units is None else 0]
        train.append(np.sort(np.concatenate([np.setdiff1d(own, held), instead])))
        records = clients.records_of(held)
        test.append(np.sort(records[clients.valid[records]]))
    pooled = np.concatenate(test)
    central = None if clients.central is None else (clients.x[pooled], clients.y[pooled])
    told = {**clients.description, "validation": HELD}
    return replace(clients, train=train, test=test, central=central, description=told)
