"""Tables by name whose records come with sites, and with people: InstEval's departments, Star's schools."""

import os

import numpy as np
import pyarrow.csv
import pytest

from sordino.data import SOURCES, available, get, load
from sordino.errors import BadInput
from sordino.study.file import read_study

RATINGS = """\
"","s","d","studage","lectage","service","dept","y"
"1","1","1002","2","2","0","2",5
"2","1","1050","2","1","1","6",2
"3","1","1582","2","2","0","2",4
"4","2","1","8","6","1","15",3
"5","3","6","6","1","0","2",1
"""

OTHERS = "".join(
    f'"{k}","{k}","1","8","6","1","{k}",3\n' for k in SOURCES["insteval"].sites["values"] if k not in (2, 6, 15)
)
"""A rating at every other department, each by another student, so that no client is empty."""

PUPILS = """\
"","tmathssk","treadssk","classk","totexpk","sex","freelunk","race","schidkn"
"2",473,447,"small.class",7,"girl","no","white",63
"3",536,450,"regular",21,"girl","no","black",20
"5",626,700,"regular.with.aide",0,"boy","yes","other",63
"""


@pytest.fixture
def folder(tmp_path):
    """The two files in their packages' own form, with a few of their lines."""
    for name, file, text in (("insteval", "InstEval.csv", RATINGS), ("star", "Star.csv", PUPILS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_rating_is_high_or_not_and_belongs_to_a_department(folder):
    data = load("insteval", folder, units=False)
    assert data.x.shape == (5, *SOURCES["insteval"].shape)
    assert data.y.tolist() == [1, 0, 1, 0, 0]
    assert (data.task, data.classes) == ("classification", 2)
    assert [data.names[k] for k in data.owners] == [f"department-{k:02d}" for k in (2, 6, 2, 15, 2)]
    assert data.x[3, :3].tolist() == [1.0, 1.0, 1.0]
    assert data.x[4, :3] == pytest.approx([(6 - 2) / (8 - 2), 0.0, 0.0])
    # A department and a lecturer each: two ones after the three numbers, none of them in an "other" column.
    assert data.x[:, 3:].sum(axis=1).tolist() == [2.0] * 5
    lecturers = SOURCES["insteval"].schema["categorical"]["d"]
    assert [lecturers[k] for k in data.x[:, 3 + 15 :].argmax(axis=1)] == [1002, 1050, 1582, 1, 6]


def test_a_student_is_the_unit_at_every_department(folder):
    """Ratings 1 and 3 are one student's at one department; the second is the same student's at another."""
    (folder / "insteval" / "InstEval.csv").write_text(RATINGS + OTHERS, encoding="utf-8")
    clients = load("insteval", folder).partition("natural", test=0.0)
    assert clients.unit_name == "student"
    assert clients.sizes.tolist() == [2 if name == "department-02" else 1 for name in clients.names]
    second = clients.names.index("department-02")
    assert sorted(sorted(clients.records_of(np.array([k])).tolist()) for k in clients.train[second]) == [[0, 2], [4]]


def test_of_a_student_with_many_ratings_at_a_department_so_many_count_as_is_public(folder):
    cap = SOURCES["insteval"].schema["unit_records"]
    lines = "".join(f'"{k}","7","1","8","{k % 6 + 1}","1","15",{k % 5 + 1}\n' for k in range(6, 6 + cap + 4))
    (folder / "insteval" / "InstEval.csv").write_text(RATINGS + lines, encoding="utf-8")
    assert len(load("insteval", folder)) == 5 + cap
    single = load("insteval", folder, units=False)
    assert len(single) == 5 + cap + 4
    assert single.units is None
    assert single.source == {"units": False}


def test_a_student_stays_whole_where_ratings_are_dealt_anew(folder):
    """Ids are the whole university's: a student of two departments must not become two students of one client."""
    cap = SOURCES["insteval"].schema["unit_records"]
    lines = "".join(f'"{k}","7","1","8","1","1","{(6, 15)[k % 2]}",3\n' for k in range(6, 6 + cap + 4))
    (folder / "insteval" / "InstEval.csv").write_text(RATINGS + lines, encoding="utf-8")
    assert len(load("insteval", folder)) == 5 + cap + 4  # no more than the cap at either department
    clients = load("insteval", folder).partition("iid", clients=2, test=0.0)
    assert clients.sizes.sum() == 4
    assert sorted((clients.units >= 0).sum(1).tolist()) == [1, 1, 3, cap]


def test_only_a_set_with_people_takes_units(folder):
    with pytest.raises(BadInput, match="star has no option 'units'"):
        load("star", folder, units=False)
    with pytest.raises(BadInput, match="insteval units is 'no': it is true"):
        load("insteval", folder, units="no")


def test_a_pupil_has_scores_in_declared_ranges_and_belongs_to_a_school(folder):
    data = load("star", folder)
    assert data.x.shape == (3, *SOURCES["star"].shape)
    assert (data.task, data.classes) == ("regression", None)
    assert data.y == pytest.approx([(score - 300) / 350 for score in (473, 536, 626)])
    assert data.x[:, 0] == pytest.approx([147 / 350, 150 / 350, 1.0])  # 700 is beyond the range and clipped to it
    assert [data.names[k] for k in data.owners] == ["school-63", "school-20", "school-63"]
    assert data.x[2, -3:].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"6","3","6","6","1","0","13",1', "row 6, column 'dept': 13 is none of the 14 departments"),
        ('"6","3","6","6","1","0","2",6', "6 is none of the declared classes"),
        ('"6","3","6","6","often","0","2",1', "'lectage': often is not a number"),
    ],
)
def test_what_does_not_belong_in_the_file_is_refused_with_its_place(folder, line, words):
    (folder / "insteval" / "InstEval.csv").write_text(f"{RATINGS}{line}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=words):
        load("insteval", folder)


@pytest.mark.parametrize("name", ["insteval", "star"])
def test_sites_are_clients_whose_names_are_known_without_reading_a_record(tmp_path, name):
    source = SOURCES[name]
    assert source.clients == len(source.sites["values"]) == len(source.client_names)
    assert {row["name"]: row["clients"] for row in available(tmp_path)}[name] == source.clients
    written = tmp_path / "study.toml"
    written.write_text(f'[data]\nname = "{name}"\n[budgets]\nepsilon = 3.0\n', encoding="utf-8")
    names, sorted_files = read_study(written).data.expected_clients()
    assert names == list(source.client_names)
    assert not sorted_files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["insteval", "star"])
def test_the_real_files_come_from_their_package_and_every_record_is_at_its_site(tmp_path, name):
    named = os.environ.get("SORDINO_DATA")
    place = get(name, named or tmp_path)  # what is there and right is not fetched again
    data, source = load(name, place.parent, **({"units": False} if name == "insteval" else {})), SOURCES[name]
    assert data.x.shape == (source.records, *source.shape)
    assert data.valid.all()
    (file,) = source.files
    raw = pyarrow.csv.read_csv(place / file)
    at = raw[source.sites["column"]].to_numpy()
    for k, value in enumerate(source.sites["values"]):
        assert np.array_equal(np.flatnonzero(data.owners == k), np.flatnonzero(at == value))
        assert (data.owners == k).any()
    # No cell lies outside what is declared: nothing is clipped, and no record is "other".
    for column, (low, high) in source.schema["numeric"].items():
        assert low <= raw[column].to_numpy().min() <= raw[column].to_numpy().max() <= high
    if name == "insteval":
        at_departments = set(zip(raw["s"].to_pylist(), raw["dept"].to_pylist()))
        people = load(name, place.parent)
        assert len(np.unique(people.units)) == 2_972
        assert people.partition("natural", test=0.0).sizes.sum() == len(at_departments) == 16_246
        assert people.partition("iid", clients=10, test=0.0).sizes.sum() == 2_972
    for column in ("dept", "d") if name == "insteval" else ():
        assert set(raw[column].to_pylist()) == set(source.schema["categorical"][column])
