"""Living data in SITE.toml: what is refused, how a ledger begins to know ids, and the example."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest

from sordino.errors import BadInput
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.types import Event, Sampling
from sordino.study import site_file
from sordino.study.site_file import read_site

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "north.csv"
{data}
[data.schema]
target = "ill"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 110]
[budget]
epsilon = 2.0
delta = 1e-5
"""
LIVING = 'id = "patient"\nliving = true\n'
EVENT = Event("gradient", Sampling.poisson(0.5), 5.0)


class Folder:
    """One site's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def people(self, *names: str) -> None:
        rows = [f"{name},{20 + k},{'yes' if k % 2 else 'no'}" for k, name in enumerate(names)]
        (self.path / "north.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")

    def site(self, data: str):
        (self.path / "SITE.toml").write_text(SITE.format(data=data))
        return read_site(self.path / "SITE.toml")

    def spend(self, data: str, run: str = "one") -> None:
        with self.site(data).open() as site:
            party, _ = site.agree([LedgerPlan(site.account, run, (EVENT,), 1)])
            charges = [Charge(site.account + one, run, "round 1", "gradient", 1, "asked") for one in party.payers]
            site.ledger.charge(charges)
            site.ledger.close_run(run)

    def cohorts(self, data: str = LIVING) -> list[int]:
        with self.site(data).open() as site:
            return site.attendance.parts[0].roll.cohorts.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.people("ada", "ben", "cleo")
    return made


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ("living = true", "name it as data.id, or data.unit"),
        ('id = "patient"\nwithdrawn = "out.txt"', r"say data.living = true"),
        (LIVING + 'withdrawn = "out.txt"', r"out\.txt cannot be read, and who withdrew must be known"),
        ('id = "nobody"\nliving = true', "has no column 'nobody'"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(folder: Folder, data: str, word: str):
    with pytest.raises(BadInput, match=word), folder.site(data).open():
        pass


def test_levels_of_consent_and_living_data_do_not_go_together(folder: Folder):
    said = SITE.format(data=LIVING).replace("epsilon = 2.0", 'column = "ill"\nlevels = {no = 1.0, yes = 2.0}')
    (folder.path / "SITE.toml").write_text(said)
    with pytest.raises(BadInput, match="do not go together yet"), read_site(folder.path / "SITE.toml").open():
        pass
    assert not (folder.path / "ledger.db").exists()


def test_a_ledger_with_charges_begins_with_the_very_records_it_was_kept_for(folder: Folder):
    folder.spend('id = "patient"')
    folder.people("ada", "ben", "cleo", "dora")
    with pytest.raises(BadInput, match="not those that"), folder.site(LIVING).open():
        pass
    folder.people("ada", "ben", "cleo")
    assert folder.cohorts() == [1, 1, 1]
    folder.people("ada", "ben", "cleo", "dora")
    assert folder.cohorts() == [1, 1, 1, 2]


def test_a_ledger_that_was_bound_anew_after_charges_cannot_begin(folder: Folder):
    folder.spend('id = "patient"')
    folder.people("ben", "cleo")
    folder.site('id = "patient"').rebind("ada moved", "Dr. Weiss")
    with pytest.raises(BadInput, match="who was among the earlier records is not known"), folder.site(LIVING).open():
        pass


def test_what_lives_goes_on_living(folder: Folder):
    assert folder.cohorts() == [1, 1, 1]
    with pytest.raises(BadInput, match=r"say data\.living = true again"), folder.site('id = "patient"').open():
        pass
    with pytest.raises(BadInput, match="by the column 'patient', not by 'age'"):
        folder.cohorts(LIVING.replace("patient", "age"))


def test_a_living_ledger_may_move_to_another_name_with_its_cohorts(folder: Folder):
    folder.spend(LIVING)
    folder.people("ada", "ben", "dora")
    assert folder.cohorts() == [1, 1, 2]
    path = folder.path / "SITE.toml"
    path.write_text(path.read_text().replace('name = "north"', 'name = "south"'))
    with pytest.raises(BadInput, match="belongs to site 'north'"), read_site(path).open():
        pass
    assert read_site(path).rebind("a new name", "Dr. Weiss") == "north"
    with read_site(path).open() as site:
        assert site.attendance.accounts == [["north", "north (since 2)"]]
        assert site.ledger.epsilon()["north"] > 0


def test_ids_that_were_parted_as_they_are_spelt_stay_parted_so(folder: Folder):
    held = 'id = "patient"\nheld_out = 0.5\n'
    folder.people(*"Abcdefghij")
    with folder.site(held).open():
        pass
    with pytest.raises(BadInput, match="from training to held-out or back"), folder.site(held + "living = true").open():
        pass


def test_another_spelling_does_not_move_a_record_to_the_other_part(folder: Folder):
    data, names = LIVING + "held_out = 0.5\n", [f"patient {k}" for k in range(40)]
    folder.people(*names)
    with folder.site(data).open() as site:
        before = folder.site(data).held(site.ledger, 40)
    folder.people(*(one.upper() + " " for one in names))
    with folder.site(data).open() as site:
        assert (folder.site(data).held(site.ledger, 40) == before).all()
        assert len(site.ledger.accounts()) == 2


def test_a_file_that_changes_while_it_is_read_is_refused_before_anything_is_noted(folder: Folder, monkeypatch):
    read = site_file.load_folder

    def slow(*given: object) -> object:
        found = read(*given)
        folder.people("ada", "ben", "dora")
        return found

    monkeypatch.setattr(site_file, "load_folder", slow)
    with pytest.raises(BadInput, match="was changed while it was read"):
        folder.cohorts()
    with Ledger(folder.path / "ledger.db") as ledger:
        assert ledger.life() is None


def test_two_starts_at_once_see_one_roll(folder: Folder):
    with folder.site(LIVING).open() as one, folder.site(LIVING).open() as other:
        assert one.ledger.life().changes == other.ledger.life().changes
        assert len(one.ledger.life().changes) == 1


def test_records_without_an_id_are_one_persons(folder: Folder):
    folder.people("ada", "", "")
    folder.spend(LIVING)
    folder.people("ada", "", "", "")
    assert folder.cohorts() == [1, 1, 1, 1]


def test_ids_that_fit_no_record_are_counted_and_not_named(folder: Folder, caplog):
    caplog.set_level(logging.WARNING)
    (folder.path / "out.txt").write_text("BEN\nzoe\n")
    assert folder.cohorts(LIVING + 'withdrawn = "out.txt"') == [1, 0, 1]
    assert "1 of 2 ids" in caplog.text
    assert "zoe" not in caplog.text


def test_the_example_says_what_it_promises(tmp_path: Path, capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "living.py"))
    example["main"](tmp_path)
    told = capsys.readouterr().out
    assert "the next run has 3 records" in told
    assert "client north (since 2)" in told
    assert "1 withdrawn, when epsilon" in told
