"""SITE.toml: every mistake is an error that names the key and the remedy; null rows; another schema is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino.engine.federation.certificates import certify
from sordino.engine.federation.limits import Policy
from sordino.errors import BadInput
from sordino.study.deploy import declared_records
from sordino.study.file import make_study
from sordino.study.site_file import read_site

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "north.csv"
[data.schema]
target = "sick"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 100]
weight = [0, 200]
[budget]
epsilon = 2.0
delta = 1e-5
[keys]
authority = "ca.crt"
private = "north.key"
"""

ROWS = "age,weight,sick\n30,70,no\n40,x,yes\n50,90,maybe\n60,100,yes\n"


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "north.csv").write_text(ROWS)

    def made(old: str = "", new: str = "") -> Path:
        assert old in SITE
        path = tmp_path / "SITE.toml"
        path.write_text(SITE.replace(old, new) if old else SITE)
        return path

    return made


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('name = "north"\n', "", "site.name"),
        ("epsilon = 2.0", "epsilon = -1.0", "budget.epsilon = -1.0"),
        ("epsilon = 2.0", "epsilom = 2.0", "did you mean 'epsilon'"),
        ("delta = 1e-5", "delta = 2.0", "budget.delta = 2.0"),
        ("[budget]", "[limits]\nmethod = ['fedfdp']\n[budget]", "did you mean 'methods'"),
    ],
)
def test_a_mistake_is_named_by_its_key(write, old: str, new: str, word: str):
    with pytest.raises(BadInput, match=word):
        read_site(write(old, new))


def test_a_clip_range_the_wrong_way_round(write):
    with pytest.raises(BadInput, match=r"limits.clip"):
        _ = read_site(write("[budget]", "[limits]\nclip = [2.0, 1.0]\n[budget]")).policy


def test_a_site_names_the_modules_whose_methods_it_allows(write):
    assert read_site(write()).policy == Policy()
    listed = read_site(write("[budget]", '[limits]\nmodules = ["my_methods"]\nrounds = 7\n[budget]')).policy
    assert listed == Policy(modules=("my_methods",), rounds=7)
    with pytest.raises(BadInput, match=r"limits\.modules"):
        read_site(write("[budget]", '[limits]\nmodules = "my_methods"\n[budget]'))


def test_a_site_pins_its_peers_and_says_how_many_may_conspire(write, tmp_path: Path):
    assert read_site(write()).policy.colluders is None
    assert read_site(write()).peers() is None, "there is no key to sign with"
    keys = certify(tmp_path / "keys", ["north", "south"])
    (tmp_path / "north.key").write_bytes(keys.private("north").read_bytes())
    assert read_site(write()).peers().pinned == {}
    said = '[limits]\ncolluders = 2\n[trust]\npeers = "keys/sites"\n[budget]'
    site = read_site(write("[budget]", said))
    assert site.policy == Policy(colluders=2)
    assert list(site.peers().pinned) == ["south"]
    with site.open() as opened:
        assert opened.peers.distinct(["north", "south", "west"]) == 2
    with pytest.raises(BadInput, match=r"trust\.peers.*NAME\.pub"):
        read_site(write("[budget]", '[trust]\npeers = "nowhere"\n[budget]')).peers()
    with pytest.raises(BadInput, match=r"limits\.colluders"):
        read_site(write("[budget]", "[limits]\ncolluders = -1\n[budget]"))


def test_keys_are_needed_unless_somebody_says_insecure(write, tmp_path: Path):
    with pytest.raises(BadInput, match="sordino certify"):
        read_site(write()).address(insecure=False)
    assert read_site(write()).address(insecure=True).authority is None
    with pytest.raises(BadInput, match="host:port"):
        read_site(write("127.0.0.1:9092", "somewhere")).address(insecure=True)


def test_records_that_do_not_fit_are_null_rows_and_n_stays_n(write):
    with read_site(write()).open() as site:
        assert site.declared.records == 4
        assert site.records.valid.tolist() == [True, False, False, True]
        assert site.declared.shape == (2,)
        assert site.declared.classes == 2
        assert site.ledger.path.name == "ledger.db"


def test_a_study_and_a_site_compare_their_schemas(write):
    """The study's own schema gives the shape, and the same hash as a site's only if the columns mean the same."""
    schema = {"target": "sick", "classes": ["no", "yes"], "numeric": {"age": [0, 100], "weight": [0, 200]}}
    table = {"data": {"schema": schema}, "deployment": {"sites": ["north"]}}
    shape, classes, same = declared_records(make_study(table))
    with read_site(write()).open() as site:
        assert (shape, classes, same) == ((2,), 2, site.declared.schema)
    other = read_site(write("age = [0, 100]", "age = [0, 120]"))
    with pytest.raises(BadInput, match=r"not those that .* was kept for"), other.open():
        pass
    assert other.rebind("ages up to 120 are declared now", "Dr. Weiss") == "north"
    with other.open() as site:
        assert site.declared.schema != same


def test_add_remove_cannot_be_promised_while_the_number_of_records_is_public(write):
    with pytest.raises(BadInput, match="use adjacency 'zero-out', which needs the same noise"):
        read_site(write("delta = 1e-5", 'delta = 1e-5\nadjacency = "add-remove"'))


def test_the_composition_of_the_account_is_the_sites_choice(write):
    with read_site(write("delta = 1e-5", 'delta = 1e-5\ncomposition = "filter"')).open() as site:
        assert site.ledger.account("north").composition == "filter"
    with read_site(write()).open() as site:  # a file that says nothing takes it as it is
        assert site.ledger.account("north").composition == "filter"
    other = read_site(write("delta = 1e-5", 'delta = 1e-5\ncomposition = "declared"'))
    with pytest.raises(BadInput, match="fixed when the account is opened"), other.open():
        pass
