"""Whose a record is: caps, partitions and splits that leave persons whole, and the files that say it."""

import numpy as np
import pytest

import sordino as sd
from sordino.data import units
from sordino.errors import BadInput


def visits(people=60, most=9, seed=0):
    """Records of two clients, and whose each is: ids are used at both."""
    random = np.random.default_rng(seed)
    clients, whose = [], []
    for _ in range(2):
        ids = np.repeat(np.arange(people), random.integers(1, most + 1, people))
        random.shuffle(ids)
        clients.append((random.normal(size=(len(ids), 3)).astype(np.float32), random.integers(0, 2, len(ids))))
        whose.append(ids)
    return clients, whose


def test_the_cap_keeps_so_many_records_of_everybody_whatever_they_say_and_in_whichever_order():
    ids = ["ann"] * 50 + ["bob"] * 3 + ["cy"]
    numbers = units.numbered(ids)
    keep = units.kept(numbers, ids, 8)
    assert np.bincount(numbers[keep]).tolist() == [8, 3, 1]
    kept = np.flatnonzero(keep[:50])
    assert kept.tolist() != list(range(8)), "not the first ones"
    apart = units.kept(np.zeros(50, dtype=np.int64), ["ann"] * 50, 8)
    assert np.array_equal(np.flatnonzero(apart), kept), "nobody else has a say in it"
    shuffled = np.random.default_rng(0).permutation(len(ids))
    again = units.kept(units.numbered([ids[k] for k in shuffled]), [ids[k] for k in shuffled], 8)
    assert np.bincount(numbers[shuffled][again]).tolist() == [8, 3, 1]


def test_members_list_every_record_of_a_unit_once():
    table = units.members(np.array([2, 0, 2, 1, 2]))
    assert table.tolist() == [[1, -1, -1], [3, -1, -1], [0, 2, 4]]
    assert units.flat(table).tolist() == [1, 3, 0, 2, 4]
    assert units.members(np.array([0, 1]), 4).shape == (2, 4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("natural", {}),
        ("iid", {"clients": 5}),
        ("dirichlet", {"clients": 5, "beta": 0.5}),
        ("shards", {"clients": 5}),
        ("similarity", {"clients": 5, "similarity": 30}),
    ],
)
def test_every_partition_and_split_leaves_persons_whole(kind, options):
    clients, whose = visits()
    x, y = (np.concatenate(part) for part in zip(*clients))
    owners = np.repeat([0, 1], [len(one) for one in whose])
    valid = np.ones(len(y), dtype=bool)
    data = sd.data.Dataset("visits", x, y, "classification", 2, valid, owners=owners, names=("north", "south"))
    data = data.by_unit(np.concatenate(whose), 4, "patient")
    federation = data.partition(kind, seed=1, central=0.1, **options)
    # A person at two clients is a unit of each; where records are dealt anew, one unit of one client.
    clients_too = owners if kind == "natural" else np.zeros_like(owners)
    ids = {tuple(row): (int(o), int(p)) for row, o, p in zip(x.tolist(), clients_too, np.concatenate(whose))}
    persons = 120 if kind == "natural" else 60
    places = {}
    for name, train, test in zip(federation.names, federation.train, federation.test):
        for part, where in (("train", federation.records_of(train)), ("test", test)):
            for row in data.x[where].tolist():
                places.setdefault(ids[tuple(row)], set()).add((name, part))
    for row in federation.central[0].tolist():
        places.setdefault(ids[tuple(row)], set()).add("central")
    assert len(places) == persons
    assert all(len(found) == 1 for found in places.values())
    counts = (federation.units >= 0).sum(1)
    assert counts.max() == 4
    assert federation.sizes.sum() + len({p for p, f in places.items() if ("train" not in str(f))}) == persons
    without, held = federation.held_out(0.3, 0)
    assert all(not np.intersect1d(a, b).size for a, b in zip(without.train, held))


def test_sizes_budgets_and_words_are_those_of_units():
    clients, whose = visits()
    federation = sd.data.from_arrays(clients, classes=2, units=whose, unit_records=3, unit_name="patient", test=0.0)
    assert federation.sizes.tolist() == [60, 60]
    assert federation.unit_records == 3
    assert "120 units (patient)" in repr(federation)
    assert federation.with_budgets(1.0).budgets[0].unit == "patient"
    assert federation.description["source"]["unit"] == {"name": "patient", "records": 3}
    assert sd.data.from_arrays(clients, classes=2).with_budgets(1.0).budgets[0].unit == "record"


SCHEMA = {
    "target": "ill",
    "classes": ["no", "yes"],
    "numeric": {"age": [0, 100]},
    "unit": "patient",
    "unit_records": 2,
    "unit_name": "patient",
}


def test_files_say_whose_a_record_is(tmp_path):
    (tmp_path / "north.csv").write_text("patient,age,ill\np1,10,no\n p1 ,20,yes\n7,30,no\n7.0,40,no\np1,50,no\n")
    np.savez(tmp_path / "south.npz", x=np.ones((3, 1)), y=["no", "yes", "no"], patient=["a", "b", "a"])
    both = sd.data.from_folder(tmp_path, SCHEMA, test=0.0)
    assert both.sizes.tolist() == [2, 2], "spaces and the spelling of whole numbers do not make another person"
    assert (both.units >= 0).sum(1).tolist() == [2, 2, 2, 1]


def test_records_that_are_nobodys_are_refused_or_left_out(tmp_path):
    (tmp_path / "north.csv").write_text("patient,age,ill\np1,10,no\n,20,yes\nNA,5,no\n")
    with pytest.raises(BadInput, match=r"2 of 3 records in north.csv have no 'patient' \(row 2 is the first\)"):
        sd.data.from_folder(tmp_path, SCHEMA, test=0.0)
    assert sd.data.from_folder(tmp_path, SCHEMA, test=0.0, invalid="null").sizes.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unit": 3}, "data.schema.unit is 3"),
        ({"unit": "ill"}, "which is the target"),
        ({"unit_records": 0}, "data.schema.unit_records is 0"),
        ({"unit_records": 10_000}, "data.schema.unit_records is 10000"),
        ({"unit_name": ""}, "data.schema.unit_name is ''"),
        ({"unit": None}, "is given without data.schema.unit"),
    ],
)
def test_wrong_words_about_units(change, said, tmp_path):
    (tmp_path / "north.csv").write_text("patient,age,ill\np1,10,no\n")
    with pytest.raises(BadInput, match=said):
        sd.data.from_folder(tmp_path, {**SCHEMA, **change})


def test_a_column_that_is_not_there_is_named(tmp_path):
    (tmp_path / "north.csv").write_text("age,ill\n10,no\n")
    with pytest.raises(BadInput, match="no column 'patient'"):
        sd.data.from_folder(tmp_path, SCHEMA)
    clients, whose = visits()
    with pytest.raises(BadInput, match="entries in units: give one each"):
        sd.data.from_arrays(clients, classes=2, units=[whose[0], whose[1][:-1]])


def test_the_same_records_one_by_one_and_one_client_by_itself():
    clients, whose = visits()
    persons = sd.data.from_arrays(clients, classes=2, units=whose, unit_records=3, unit_name="patient")
    records = persons.by_record()
    assert (records.units, records.unit_name, records.budgets) == (None, "record", None)
    for one, other in zip(persons.train, records.train):
        assert np.array_equal(np.sort(persons.records_of(one)), other)
    assert all(np.array_equal(*pair) for pair in zip(persons.test, records.test))
    words = np.random.default_rng(0).choice(["strict", "generous"], len(persons.x)).tolist()
    for federation in (persons, records):
        levels = federation.with_levels({"strict": 0.5, "generous": 4.0}, words, delta=1e-3)
        alone = levels.only(1)
        assert alone.names == [levels.names[1]]
        assert [(one.name, one.records) for one in alone.levels[0]] == [
            (one.name, one.records) for one in levels.levels[1]
        ]
        assert np.array_equal(alone.x[alone.records_of(alone.train[0])], levels.x[levels.records_of(levels.train[1])])
        assert np.array_equal(alone.x[alone.test[0]], levels.x[levels.test[1]])
