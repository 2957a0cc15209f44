"""``sordino.Classifier`` and ``sordino.Regressor``: a study of one's own arrays behind scikit-learn's interface.

``fit`` deals rows to clients, trains under their budgets as ``sd.train`` does, in simulation, and keeps the run.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import nn

from sordino import methods
from sordino.data.dataset import Dataset
from sordino.data.encode import encode_arrays
from sordino.data.federation import plain
from sordino.data.schema import Schema, known_schema, word
from sordino.data.tokens import with_word_lists
from sordino.data.unlabelled import read_unlabelled
from sordino.errors import BadInput
from sordino.methods import Method
from sordino.study.predict import Predictions
from sordino.study.run import train

log = logging.getLogger("sordino")

EVERYBODY = "everybody"
"""What the only client is called where rows belong to nobody in particular."""


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both have in common."""

    task: str

    def __init__(
        self,
        epsilon: float | Mapping[str, float] | None = None,
        delta: float | Mapping[str, float] = 1e-5,
        *,
        model: str | nn.Module = "auto",
        method: str | Method = "auto",
        schema: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.epsilon, self.delta = epsilon, delta
        self.model, self.method = model, method
        self.schema, self.training = schema, training
        self.ledger, self.random_state = ledger, random_state

    def _fit(self, X: Any, y: Any, clients: Any, schema: Mapping[str, Any]) -> Self:
        """Train on rows of X, encoded by a complete schema table."""
        private = methods.get(self.method).private
        if private and self.epsilon is None:
            raise BadInput(
                "epsilon is missing: say what every client may spend, epsilon=1.0, or by name {'north': 3, 'south': 1}"
            )
        table: dict[str, Any] = plain(with_word_lists(schema, Path()))
        known = known_schema(table)
        found = read_unlabelled(X, known, () if self._declares_columns else np.shape(X)[1:], known.unit)
        _check_whole(found.reasons, "cannot be encoded", "correct it, or declare a fill for its column")
        x, targets, valid = encode_arrays("the records", found.x, y, replace(known, values=None))
        names, owners = _dealt(clients, len(x))
        dataset = Dataset(
            type(self).__name__, x, targets, self.task, None if known.classes is None else len(known.classes), valid,
            owners=owners, names=names, source={"clients": "arrays"}, ranged=known.ranged, tokens=known.tokens,
            schema=table,
        )  # fmt: skip
        if known.unit is not None:
            dataset = dataset.by_unit(_units(found.ids or (), known), known.unit_records, known.unit_name)
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(np.iinfo(np.int32).max)
        federation = dataset.partition("natural", seed=int(seed), test=0.0)
        if self.epsilon is not None:
            federation = federation.with_budgets(self.epsilon, delta=self.delta, seed=int(seed))
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model  # training changes it
        settings = {**(self.training or {}), "seed": int(seed), "ledger": self.ledger}
        self.run_ = train(federation, model, self.method, **settings)
        self.clients_ = np.array(names)
        return self

    def _checked(self, X: Any, y: Any = None, reset: bool = True) -> Any:
        """Rows as scikit-learn wants them checked, where no schema says what their columns mean."""
        if self._declares_columns:
            return X
        if y is None and not reset:
            return validate_data(self, X, reset=False, allow_nd=True)
        return validate_data(self, X, y, reset=reset, allow_nd=True)[0]

    @property
    def _declares_columns(self) -> bool:
        return bool({"numeric", "categorical", "text"} & set(self.schema or {}))

    def _predicted(self, X: Any) -> Predictions:
        check_is_fitted(self, "run_")
        found = self.run_.predict(self._checked(X, reset=False))
        _check_whole(found.reasons, "has no prediction", "correct it, or use run_.predict, which leaves it empty")
        return found

    @property
    def privacy_(self) -> list[dict[str, Any]]:
        """What every client budgeted and spent."""
        check_is_fitted(self, "run_")
        return self.run_.privacy


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classification over clients that each set their own privacy, with scikit-learn's interface.

    Parameters
    ----------
    epsilon: what every client may spend: one number, or by client's name. There is no default.
    delta: the δ of these promises, well below 1/records.
    model, method: as in ``sd.train``.
    schema: public constants that make numbers of records, as a study's ``[data.schema]``. With ``numeric``,
        ``categorical`` or ``text``, X is a data frame or a dict of columns and may have missing cells; without, X is an
        array of numbers, which are taken as they are, or clipped to ``values = [low, high]`` and scaled. ``classes``
        declares the labels; without it they are read off y, which no promise covers.
    training: further keywords of ``sd.train``, such as ``{"rounds": 30, "lr": 0.2}``.
    ledger: a file that all fits pay from. It holds the budget: what a search or a cross-validation may spend in all.
        Without one, each fit spends ``epsilon``, and several of them add up.
    random_state: seeds first weights, batches and noise.

    Attributes
    ----------
    run_: the finished run (``sd.Run``): its result, what was spent, ``save``, ``export``, ``report``.
    classes_, clients_: labels in the order of ``predict_proba``; the clients' names.

    Guarantees
    ----------
    Those of ``sd.train`` for a simulation: no client's spent ε exceeds its budget, whatever the ledger held before. A
    simulation's noise follows from ``random_state``, so it is a rehearsal and keeps no secrets (docs/privacy.md).
    """

    task = "classification"

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; ``clients`` has the name of every row's client, by default they are all of one."""
        X, y = self._checked(X, y), column_or_1d(y, warn=True)
        check_classification_targets(y)
        declared = (self.schema or {}).get("classes")
        if declared is None:
            log.warning("the labels were read off y: declare schema={'classes': […]}, for no promise covers that")
            labels = np.unique(y)
        else:
            labels = np.arange(declared) if isinstance(declared, int) else np.asarray(declared)
        if len(labels) < 2:
            raise BadInput(f"y has one class only, {labels.tolist()!r}: there is nothing to tell apart")
        self.classes_ = labels
        return self._fit(X, y, clients, {**(self.schema or {}), "task": self.task, "classes": labels.tolist()})

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """P of every class, ``[rows, classes]``."""
        probabilities = self._predicted(X).probabilities
        assert probabilities is not None
        return probabilities

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The likeliest class of every row."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[likeliest]
        return found


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Regression over clients that each set their own privacy; parameters and guarantees are those of ``Classifier``.

    ``schema = {"range": [low, high]}`` declares the target's range: it is clipped and scaled for training, and
    predictions are in its own unit. Without it targets are taken as they are, and should be of size 1.
    """

    task = "regression"

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; ``clients`` has the name of every row's client, by default they are all of one."""
        X, y = self._checked(X, y), column_or_1d(y, warn=True)
        return self._fit(X, y, clients, {**(self.schema or {}), "task": self.task})

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """A number for every row, in the target's unit."""
        found: npt.NDArray[np.float64] = self._predicted(X).prediction
        return found


def _dealt(clients: Any, rows: int) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The clients' names, sorted, and whose every row is."""
    if clients is None:
        return (EVERYBODY,), np.zeros(rows, dtype=np.int64)
    named = np.asarray(clients).astype(str)
    if named.shape != (rows,):
        raise BadInput(f"clients has shape {named.shape}: give one name for each of the {rows} rows")
    names, owners = np.unique(named, return_inverse=True)
    return tuple(names.tolist()), owners.astype(np.int64)


def _units(ids: tuple[str, ...], schema: Schema) -> list[str]:
    """Whose every row is; a row of nobody's could not be protected with the rest."""
    units = [word(one) for one in ids]
    for row, one in enumerate(units):
        if one in schema.missing:
            raise BadInput(f"row {row} has no {schema.unit!r}: nobody knows whose it is; correct it or leave it out")
    return units


def _check_whole(reasons: tuple[str | None, ...], what: str, remedy: str) -> None:
    """Refuse the first row that has a reason not to be used."""
    for row, reason in enumerate(reasons):
        if reason is not None:
            raise BadInput(f"row {row} {what}: {reason}; {remedy}")
