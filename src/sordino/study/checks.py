"""What can be wrong with a study, found before the first record is read: by key, with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sordino import models
from sordino.data.budgets import warn_of
from sordino.data.dataset import check_options, client_names
from sordino.data.own import client_files, stem_of
from sordino.data.schema import parse_schema
from sordino.data.sources import SOURCES
from sordino.errors import BadInput
from sordino.methods.training import Training
from sordino.privacy.types import Adjacency, Scheme, check_pair

if TYPE_CHECKING:
    from sordino.study.file import Study

_DEALT = ("clients", "records", "beta", "shards", "max_classes", "similarity", "sizes")
"""Keys of ``[data]`` that deal records to clients, and mean nothing where files are clients already."""


def check_study(study: Study) -> None:
    """Refuse what cannot work and warn of what promises little. Looks at names of files, never into them."""
    _check_data(study)
    names, files = expected_clients(study)
    _check_methods(study, names)
    _check_budgets(study, names, files)
    models.check_spec(study.model.name, study.model.options)
    study.arguments()


def expected_clients(study: Study) -> tuple[list[str] | None, bool]:
    """The clients' names, as far as they follow without reading records, and whether they are files in their order."""
    d = study.data
    if d.table_schema is None and (d.name in SOURCES or d.partition not in (None, "natural")):
        return (None if d.clients is None else client_names(d.clients)), False
    path = Path((d.folder or d.name) if d.table_schema is not None else d.name)
    return [stem_of(file) for file in client_files(path)], True


def _check_data(study: Study) -> None:
    d = study.data
    given = {key: value for key in _DEALT if (value := getattr(d, key)) is not None}
    if d.table_schema is not None:
        parse_schema(d.table_schema)
        if d.partition not in (None, "natural"):
            raise BadInput(f"data.partition = {d.partition!r} does not go with data.schema: your files are the clients")
        clients = given.pop("clients", None)
        names = expected_clients(study)[0] or []
        if clients is not None and clients != len(names):
            raise BadInput(f"data.clients = {clients}, but there are {len(names)} files, one a client: leave it out")
        given |= {"options": d.options} if d.options else {}
        given |= {"minimum": d.minimum} if d.minimum > 1 else {}
        if given:
            key, value = next(iter(given.items()))
            raise BadInput(f"data.{key} = {value!r} does not go with data.schema (files are clients): leave it out")
        return
    source = SOURCES.get(d.name)
    if source is None:
        if d.name and not Path(d.name).exists():
            raise BadInput(
                f"data.name = {d.name!r} is unknown: use one of {', '.join(SOURCES)}, or a path to your own folder"
            )
        return
    if d.invalid != "refuse":
        raise BadInput(f"data.invalid = {d.invalid!r} is for files of your own, which {d.name} is not: leave it out")
    kind = d.partition or "iid"
    if kind == "natural":
        raise BadInput(f"data.partition = 'natural': {d.name} comes without clients, use iid, dirichlet, shards, …")
    if d.clients is None:
        raise BadInput("data.clients is missing: say how many clients the records are dealt to")
    check_options(kind, {key: value for key, value in given.items() if key not in ("clients", "records")})
    for needed in {"dirichlet": ("beta",), "similarity": ("similarity",)}.get(kind, ()):
        if needed not in given:
            raise BadInput(f"data.{needed} is missing: data.partition = {kind!r} needs it")
    if d.records is not None and d.name != "least-squares" and d.records > source.records:
        raise BadInput(f"data.records = {d.records}: {d.name} has {source.records} records to choose from")
    there = d.records or d.options.get("records") or source.records
    if isinstance(there, int) and d.clients * d.minimum > there:
        raise BadInput(
            f"data.clients = {d.clients} with at least data.minimum = {d.minimum} records each: there are "
            f"{there}, so use fewer clients or a smaller minimum"
        )


def _check_methods(study: Study, names: Sequence[str] | None) -> None:
    """Every method that the study names, and the settings of training, which they share."""
    training = study.training.model_dump(exclude_none=True)
    settings = Training(rounds=study.study.rounds, **training)
    for name in [study.method.name, *study.compare.methods]:
        method = study.chosen_method(name)
        if settings.select is not None and method.select.name == "everyone":
            raise BadInput(
                f"training.select does not go with method {name!r}, which asks everyone: drop it, or choose a method "
                "that draws clients, such as 'unbiased' or 'privacy-aware'"
            )
    if names is None:
        return
    if settings.select is not None and settings.select > len(names):
        raise BadInput(f"training.select = {settings.select} of {len(names)} clients: use at most {len(names)} a round")
    for key in ("batch", "rate"):
        listed = training.get(key)
        if isinstance(listed, list) and len(listed) != len(names):
            raise BadInput(
                f"training.{key} lists {len(listed)} values for {len(names)} clients: give one each, or a single one"
            )


def _check_budgets(study: Study, names: Sequence[str] | None, files: bool) -> None:
    b = study.budgets
    for key in ("column", "client"):
        if getattr(b, key) is not None and b.csv is None:
            raise BadInput(f"budgets.{key} names a column of budgets.csv, which is missing: name the file there")
    scheme = Scheme.parse(study.training.sampling or "poisson")
    check_pair(scheme, Adjacency.parse(b.adjacency))
    terms = study.terms()
    if terms is None or names is None:
        return
    warn_of(names, terms.of(names, files)[0])
