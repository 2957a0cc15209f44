"""A site whose records come and go: two starts, one newcomer, one who withdraws, and what the ledger says of them.

python examples/living.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sordino.privacy.ledger import Charge, LedgerPlan
from sordino.privacy.statement import statement, statement_text
from sordino.privacy.types import Event, Sampling
from sordino.study.site_file import read_site

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "north.csv"
id = "patient"
living = true
withdrawn = "withdrawn.txt"
[data.schema]
target = "ill"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 110]
[budget]
epsilon = 2.0
delta = 1e-5
[limits]
run_epsilon = 0.5
"""


def main(folder: Path) -> None:
    """Start the site twice; a run of one release is charged by hand, as a server's request would be."""
    (folder / "SITE.toml").write_text(SITE)
    (folder / "north.csv").write_text("patient,age,ill\nAda,36,no\nBen,51,yes\nCleo,40,no\n")
    (folder / "withdrawn.txt").write_text("")
    with read_site(folder / "SITE.toml").open() as site:
        plan = LedgerPlan(site.account, "first", (Event("gradient", Sampling.poisson(0.5), 5.0),), 1)
        site.agree([plan])
        site.ledger.charge([Charge(site.account, "first", "round 1", "gradient", 1, "a request")])
        site.ledger.close_run("first")
    (folder / "north.csv").write_text("patient,age,ill\nben ,52,yes\nAda,36,no\nCleo,40,no\nDora,29,no\n")
    (folder / "withdrawn.txt").write_text("Cleo\n")
    with read_site(folder / "SITE.toml").open() as site:
        print(f"the next run has {site.declared_in('second').records} records\n")
        for account in site.ledger.accounts():
            print(statement_text(statement(site.ledger, account.client)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
