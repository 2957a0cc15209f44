"""Budgets of your own files go by name: renaming a file moves nobody's ε."""

import math
from pathlib import Path

import numpy as np
import pytest

from sordino.data import from_arrays, from_folder, load
from sordino.errors import BadInput
from sordino.study.file import make_study

SCHEMA = {"target": "y", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}
ROWS = "age,y\n" + "30,no\n40,yes\n" * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hospitals"
    place.mkdir()
    for name in ("north", "south"):
        (place / f"{name}.csv").write_text(ROWS)
    return place


def budgets(federation) -> dict[str, float]:
    return {name: budget.epsilon for name, budget in zip(federation.names, federation.budgets)}


def study(folder: Path, **said):
    return make_study({"data": {"name": str(folder), "schema": SCHEMA}, "budgets": said})


def test_a_table_gives_each_client_its_own_whatever_the_order(folder):
    said = {"south": 1.0, "north": 3.0}
    assert budgets(from_folder(folder, SCHEMA).with_budgets(said)) == {"north": 3.0, "south": 1.0}
    assert budgets(study(folder, epsilon=said).federation()) == {"north": 3.0, "south": 1.0}


def test_a_renamed_file_takes_nobody_elses_budget(folder):
    (folder / "north.csv").rename(folder / "zenith.csv")
    with pytest.raises(BadInput, match=r"budgets.epsilon names 'north', which is no client"):
        study(folder, epsilon={"north": 3.0, "south": 1.0}).federation()
    with pytest.raises(BadInput, match=r"budgets.epsilon is a list.*files.*budgets.order"):
        study(folder, epsilon=[3.0, 1.0]).federation()


def test_a_list_needs_an_order_and_follows_it(folder):
    with pytest.raises(BadInput, match=r"budgets.epsilon = \{north = 3, south = 1\}"):
        from_folder(folder, SCHEMA).with_budgets([3.0, 1.0])
    there = from_folder(folder, SCHEMA).with_budgets([1.0, 3.0], order=["south", "north"], delta=[1e-5, 1e-6])
    assert budgets(there) == {"north": 3.0, "south": 1.0}
    assert [b.delta for b in there.budgets] == [1e-6, 1e-5]
    again = study(folder, epsilon=[1.0, 3.0], order=["south", "north"]).federation()
    assert budgets(again) == {"north": 3.0, "south": 1.0}
    whole = load(folder, schema=SCHEMA).partition("natural")
    with pytest.raises(BadInput, match=r"budgets.order"):
        whole.with_budgets([3.0, 1.0])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"epsilon": {"north": 3.0}}, r"budgets.epsilon has no value for client 'south'"),
        ({"epsilon": {"north": 3.0, "south": 1.0, "east": 1.0}}, r"budgets.epsilon names 'east'"),
        ({"epsilon": {"north": 3.0, "sout": 1.0}}, r"did you mean 'south'"),
        ({"epsilon": 1.0, "delta": {"north": 1e-5}}, r"budgets.delta has no value for client 'south'"),
        ({"epsilon": 1.0, "delta": [1e-5, 1e-6]}, r"budgets.delta is a list"),
        ({"epsilon": [1.0, 2.0], "order": ["north", "east"]}, r"budgets.order names 'east'"),
        ({"epsilon": [1.0, 2.0], "order": ["north"]}, r"budgets.order leaves out client 'south'"),
        ({"epsilon": [1.0, 2.0], "order": ["north", "north"]}, r"budgets.order names 'north' twice"),
        ({"epsilon": {"north": "three", "south": 1.0}}, r"budgets.epsilon"),
    ],
)
def test_names_missing_or_unknown_are_refused(folder, said, words):
    with pytest.raises(BadInput, match=words):
        study(folder, **said).federation()


def test_public_clients_need_no_budget(folder):
    there = study(folder, epsilon={"north": 3.0}, public=["south"]).federation()
    assert budgets(there) == {"north": 3.0, "south": math.inf}


def test_a_csv_with_names_is_read_by_name(folder, tmp_path):
    file = tmp_path / "budgets.csv"
    file.write_text("hospital,epsilon\nsouth,1\nnorth,3\n")
    assert budgets(study(folder, csv=str(file)).federation()) == {"north": 3.0, "south": 1.0}
    (folder / "north.csv").rename(folder / "zenith.csv")
    with pytest.raises(BadInput, match="no row for client 'zenith'"):
        study(folder, csv=str(file)).federation()
    file.write_text("epsilon\n1\n3\n")
    with pytest.raises(BadInput, match=r"no column with the names of the clients.*budgets.client"):
        study(folder, csv=str(file)).federation()


def test_lists_stay_for_clients_in_an_order_that_somebody_chose(folder):
    pairs = [(np.ones((4, 1)), [0, 1, 0, 1])] * 2
    named = from_arrays(pairs, names=["b", "a"], classes=2).with_budgets([3.0, 1.0])
    assert budgets(named) == {"b": 3.0, "a": 1.0}
    dealt = load(folder, schema=SCHEMA).partition("iid", clients=2).with_budgets([3.0, 1.0])
    assert budgets(dealt) == {"client-00": 3.0, "client-01": 1.0}
    by_name = load("digits").partition("iid", clients=2).with_budgets({"client-01": 1.0, "client-00": 3.0})
    assert budgets(by_name) == {"client-00": 3.0, "client-01": 1.0}
