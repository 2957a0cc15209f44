"""``sordino join --check``: everything that joining needs is looked at, and nothing is written, charged or asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.engine.federation.certificates import certify
from sordino.engine.federation.front import Front
from sordino.engine.federation.keyring import Keyring
from sordino.engine.federation.processes import free_port
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.types import Event, Sampling, Scheme
from sordino.study.site_check import FAILED, OK, SKIPPED, check_site, passed
from sordino.study.site_file import read_site

ALL = ["site file", "schema", "data", "limits", "folder", "keys", "peers", "ledger", "flower", "server", "enrolled"]

SITE = """\
[site]
name = "north"
server = "127.0.0.1:{port}"
folder = "north"
[data]
path = "north.npz"
[data.schema]
classes = [0, 1, 2]
[budget]
epsilon = 2.0
delta = 1e-5
ledger = "north.db"
[limits]
rounds = 50
[keys]
authority = "keys/ca.crt"
private = "keys/sites/north.key"
"""


class Laid:
    """A site's files in a folder, and what can be changed about them."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.file = folder, folder / "SITE.toml"
        self.file.write_text(SITE.format(port=port))
        self.keys = certify(folder / "keys", ["north", "south"])
        rng = np.random.default_rng(0)
        x = rng.normal(size=(40, 4)).astype(np.float32)
        x[3] = np.nan
        np.savez(folder / "north.npz", x=x, y=rng.integers(0, 3, 40))

    def change(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def check(self, insecure: bool = False) -> dict:
        return {one.check: one for one in check_site(self.file, insecure)}

    def only(self, what: str, insecure: bool = False):
        """The one look that failed."""
        found = self.check(insecure)
        assert [name for name, one in found.items() if one.state == FAILED] == [what], found
        assert found[what].remedy
        return found[what]

    def everything(self) -> dict[str, tuple[int, bytes]]:
        files = [one for one in sorted(self.folder.rglob("*")) if one.is_file()]
        return {str(one): (one.stat().st_mtime_ns, one.read_bytes()) for one in files}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(port: int, tmp_path_factory: pytest.TempPathFactory):
    """A front that lets two sites in; their keys are the ones of every test."""
    folder = tmp_path_factory.mktemp("server")
    keys = certify(folder / "keys", ["north", "south"])
    front = Front("127.0.0.1", port, "http://127.0.0.1:1", None, Keyring(keys).names, keys.server)
    front.start()
    yield keys
    front.stop()


@pytest.fixture
def site(tmp_path: Path, port: int, server) -> Laid:
    laid = Laid(tmp_path, port)
    for name in ("ca.crt", "sites/north.key", "sites/north.pub", "sites/south.pub"):
        (tmp_path / "keys" / name).write_bytes((server.folder / name).read_bytes())
    return laid


def use(site: Laid) -> str:
    """Open the site's ledger as ``join`` does; the account in it."""
    with read_site(site.file).open() as opened:
        return opened.account


def spend(site: Laid, turns: int, of: int = 10) -> None:
    """Pay some turns of a plan that costs the whole budget."""
    from sordino.privacy import calibrate

    account = use(site)
    noise = calibrate(2.0, 1e-5, 0.5, of)
    event = Event("gradient", Sampling(Scheme.POISSON, 0.5), noise, 1)
    with Ledger(site.folder / "north.db") as book:
        book.declare([LedgerPlan(account, "run", (event,), of)])
        for turn in range(turns):
            book.charge([Charge(account, "run", f"turn {turn}", "gradient", 1, "request")])


def test_a_site_that_could_join(site: Laid):
    found = site.check()
    assert list(found) == ALL
    assert {name for name, one in found.items() if one.state != OK} == {"peers"}
    assert found["peers"].state == SKIPPED
    assert "40 records, 1 null rows, shape [4]" in found["data"].found
    assert found["ledger"].found.startswith("none yet: the first `sordino join` makes ")
    assert "knows this site's key" in found["enrolled"].found
    assert passed(list(found.values()))


def test_the_command_prints_a_list_and_exits_0_or_2(site: Laid):
    run = CliRunner().invoke(app, ["join", str(site.file), "--check"])
    assert run.exit_code == 0, run.output
    assert run.output.count("ok ") >= 9
    site.change("epsilon = 2.0", "epsilon = -2.0")
    run = CliRunner().invoke(app, ["join", str(site.file), "--check", "--json"])
    assert run.exit_code == 2
    said = json.loads(run.output)
    assert said["ok"] is False
    assert said["checks"][0]["state"] == FAILED
    assert "budget.epsilon" in said["checks"][0]["found"]
    run = CliRunner().invoke(app, ["join", str(site.file), "--json"])
    assert "--json goes with --check" in str(run.exception)


@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_written(site: Laid, used: bool):
    if used:
        spend(site, 2)
    before = site.everything()
    assert passed(check_site(site.file))
    assert site.everything() == before
    assert (site.folder / "north.db").exists() is used
    assert (site.folder / "north").exists() is used


def test_a_used_ledger_says_what_is_left(site: Laid):
    use(site)
    assert "training: ε 2 of 2 is left" in site.check()["ledger"].found
    spend(site, 3)
    found = site.check()["ledger"]
    assert found.state == OK
    left = float(found.found.split("ε ")[1].split(" of")[0])
    with Ledger(site.folder / "north.db", readonly=True) as book:
        assert left == pytest.approx(2.0 - book.epsilon(["north"])["north"], abs=1e-3)
    assert 0.2 < left < 1.8
    assert "1 declared run(s)" in found.found


def test_nothing_left_to_spend(site: Laid):
    spend(site, 10)
    assert "nothing is left" in site.only("ledger").found


def test_a_missing_file_and_a_misspelt_key(tmp_path: Path, site: Laid):
    (found,) = check_site(tmp_path / "none.toml")
    assert (found.check, found.state) == ("site file", FAILED)
    site.change("rounds = 50", "round = 50")
    (found,) = check_site(site.file)
    assert "did you mean 'rounds'" in found.found


def test_no_data(site: Laid):
    (site.folder / "north.npz").unlink()
    assert site.only("data").remedy.startswith("data.path names one")
    (site.folder / "north.npz").write_bytes(b"PK\x03\x04 and then nothing")
    assert site.check()["data"].state == FAILED


def test_no_record_fits_the_schema(site: Laid):
    np.savez(site.folder / "north.npz", x=np.full((5, 4), np.nan, dtype=np.float32), y=np.zeros(5, dtype=np.int64))
    assert "all 5 records are null rows" in site.only("data").found


def test_a_schema_that_says_nothing(site: Laid):
    site.change("classes = [0, 1, 2]", "classes = [0]\nfoo = 1")
    assert "data.schema.foo is unknown" in site.only("schema").found
    assert site.check()["data"].state == SKIPPED


def test_persons_are_counted(site: Laid):
    lines = ["patient,age,y", *(f"p{k // 3},{k},{k % 2}" for k in range(30))]
    (site.folder / "north.csv").write_text("\n".join(lines))
    site.change('"north.npz"', '"north.csv"')
    site.change(
        "classes = [0, 1, 2]",
        'target = "y"\nclasses = [0, 1]\nunit = "patient"\nunit_records = 3\nunit_name = "patient"\n'
        "[data.schema.numeric]\nage = [0, 100]",
    )
    found = site.check()
    assert "30 records of 10 patients" in found["data"].found, found
    assert "every patient (patient) is protected" in found["schema"].found


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ('methods = ["dp-fedavgg"]', "dp-fedavgg"),
        ('models = ["logistik"]', "logistik"),
        ('models = ["nowhere_to_be_found:net"]', "nowhere_to_be_found"),
        ('modules = ["nowhere_to_be_found"]', "is not installed here"),
        ("colluders = 1", "names nobody to share it with"),
    ],
)
def test_limits_that_cannot_be_kept(site: Laid, said: str, wrong: str):
    site.change("rounds = 50", said)
    assert wrong in site.only("limits").found


def test_a_folder_that_cannot_be_written(site: Laid):
    (site.folder / "north").write_text("a file")
    assert "cannot be written to" in site.only("folder").found


def test_keys_that_others_may_read(site: Laid):
    key = site.folder / "keys/sites/north.key"
    key.chmod(0o644)
    found = site.only("keys")
    assert "mode 644" in found.found
    assert found.remedy == f"chmod 600 {key}"


def test_keys_that_are_missing_or_none_or_somebody_elses(site: Laid):
    key = site.folder / "keys/sites/north.key"
    text = key.read_bytes()
    key.write_text("no key")
    assert site.check()["keys"].state == FAILED
    key.unlink()
    assert "does not exist" in site.check()["keys"].found
    key.write_bytes(text)
    key.chmod(0o600)
    (site.folder / "keys/sites/north.pub").write_bytes((site.folder / "keys/sites/south.pub").read_bytes())
    assert "is not the public half" in site.only("keys").found


def test_an_authority_that_is_none_or_over(site: Laid, tmp_path: Path):
    (site.folder / "keys/ca.crt").write_text("no certificate")
    assert "is no certificate" in site.check()["keys"].found
    old = certify(tmp_path / "old", ["north"], days=-1)
    (site.folder / "keys/ca.crt").write_bytes(old.server[0].read_bytes())
    assert "and not now" in site.check()["keys"].found


def test_peers(site: Laid):
    site.change("rounds = 50", "colluders = 0")
    site.change("[keys]", '[trust]\npeers = "keys/sites"\n[keys]')
    assert site.check()["peers"].found == "1 different keys pinned: south"
    site.change("colluders = 0", "colluders = 1")
    assert "no noise can be shared" in site.only("peers").found
    site.change('"keys/sites"\n', '"keys/none"\n')
    assert "is no folder" in site.only("peers").found


def test_another_sites_ledger_other_records_and_another_budget(site: Laid):
    use(site)
    site.change("epsilon = 2.0", "epsilon = 3.0")
    assert "has the budget" in site.only("ledger").found
    site.change("epsilon = 3.0", "epsilon = 2.0")
    np.savez(site.folder / "north.npz", x=np.zeros((5, 4), dtype=np.float32), y=np.zeros(5, dtype=np.int64))
    assert "are not those that" in site.only("ledger").found
    site.change('name = "north"', 'name = "south"')
    assert "belongs to site 'north'" in site.only("ledger").found


def test_a_damaged_ledger_and_one_that_is_gone(site: Laid):
    use(site)
    book = site.folder / "north.db"
    whole = book.read_bytes()
    book.write_bytes(whole[: len(whole) // 2])
    assert site.only("ledger").remedy.startswith("do not make a new one")
    book.unlink()
    assert "says that it held charges" in site.only("ledger").found


def test_held_out_records_of_another_share(site: Laid):
    site.change("[data.schema]", "held_out = 0.25\n[data.schema]")
    use(site)
    found = site.check()["ledger"].found
    assert "training: ε 2 of 2 is left; held-out records: ε 2 of 2 is left" in found
    site.change("held_out = 0.25", "held_out = 0.5")
    assert "has parted these records before" in site.only("ledger").found


def test_records_that_were_trained_on_cannot_be_held_out(site: Laid):
    spend(site, 1)
    site.change("[data.schema]", "held_out = 0.25\n[data.schema]")
    assert "none can be held out any more" in site.only("ledger").found


def test_nobody_answers_and_somebody_who_is_not_trusted(site: Laid, port: int, tmp_path: Path):
    site.change(f":{port}", f":{free_port()}")
    found = site.only("server")
    assert "connection refused" in found.found
    assert site.check()["enrolled"].state == SKIPPED
    site.file.write_text(SITE.format(port=port))
    other = certify(tmp_path / "other", ["north"])
    (site.folder / "keys/ca.crt").write_bytes(other.authority.read_bytes())
    assert "is not trusted" in site.only("server").found


def test_a_key_that_the_server_does_not_know(site: Laid, tmp_path: Path):
    other = certify(tmp_path / "other", ["north"])
    for half in (other.private("north"), other.public("north")):
        (site.folder / "keys/sites" / half.name).write_bytes(half.read_bytes())
    found = site.only("enrolled")
    assert "does not know this site's key" in found.found
    assert "sites/north.pub" in str(found.remedy)


def test_without_tls(site: Laid, port: int):
    found = site.check(insecure=True)
    assert (found["keys"].state, found["enrolled"].state) == (SKIPPED, SKIPPED)
    assert "without TLS" in found["server"].found


def test_another_flower_is_refused(site: Laid, monkeypatch):
    monkeypatch.setattr("flwr.supercore.version.package_version", "9.9.9")
    assert "9.9.9 is installed" in site.only("flower").found
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "is not installed" in site.only("flower").found
