"""``sordino join SITE.toml --check``: whether a site could take part, found out without taking part.

Every look is one that ``join`` takes too, or one that it would only fail at later. Nothing is written: no folder, no
ledger, no entry in one; nothing is charged, and the server learns no more than that somebody with this key called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sordino.engine.federation.certificates import check_name
from sordino.errors import SordinoError
from sordino.study import site_looks
from sordino.study.site_file import read_site
from sordino.study.site_looks import Fault, Site, Skipped

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """One look: what was looked at, how it went, what was found, and what to do where it failed."""

    check: str
    state: str
    found: str
    remedy: str | None = None


def check_site(path: Path, insecure: bool = False) -> list[Check]:
    """Look at everything that ``join`` needs, each by itself; what fails does not stop the others."""
    try:
        file = read_site(path)
        name, budget = check_name(file.site.name), file.budget
    except SordinoError as error:
        return [Check("site file", FAILED, str(error), f"correct {path}; docs/deploy.md lists its keys")]
    site = Site(file, insecure)
    told = f"{name}: ε {budget.epsilon:g}, δ {budget.delta:g}, {budget.adjacency}"
    return [Check("site file", OK, told), *(_looked(what, *how, site) for what, how in LOOKS.items())]


def passed(checks: list[Check]) -> bool:
    """Whether nothing keeps the site from taking part."""
    return all(one.state != FAILED for one in checks)


def plain(checks: list[Check]) -> dict[str, Any]:
    """The checks as JSON holds them."""
    return {"ok": passed(checks), "checks": [asdict(one) for one in checks]}


def _looked(what: str, look: Callable[[Site], str], remedy: str, site: Site) -> Check:
    try:
        return Check(what, OK, look(site))
    except Skipped as why:
        return Check(what, SKIPPED, str(why))
    except Fault as error:
        return Check(what, FAILED, str(error), error.remedy)
    except SordinoError as error:
        return Check(what, FAILED, str(error), remedy)
    except Exception as error:  # whatever a file does to its reader: the other looks are still worth taking
        return Check(what, FAILED, f"{type(error).__name__}: {error}", remedy)


LOOKS: dict[str, tuple[Callable[[Site], str], str]] = {
    "schema": (site_looks.schema, "correct [data.schema], or the schema.toml beside the file"),
    "data": (site_looks.data, "data.path names one CSV, Parquet or NPZ file that this user may read"),
    "limits": (site_looks.limits, "correct [limits]; `sordino methods` lists the methods"),
    "folder": (site_looks.folder, "site.folder names a folder that this user may write to"),
    "keys": (
        site_looks.keys,
        "get ca.crt and this site's key from whoever made them, and name them in [keys]",
    ),
    "peers": (
        site_looks.peers,
        "put the others' public keys into a folder, as NAME.pub, and name it: [trust] peers",
    ),
    "ledger": (site_looks.ledger, "do not make a new one: what was spent stays spent; docs/ledger.md says what to do"),
    "flower": (site_looks.flower, "pip install 'sordino[flower]'"),
    "server": (
        site_looks.server,
        "get the authority's ca.crt from the server's operator, and name it in [keys]",
    ),
    "enrolled": (site_looks.enrolled, "ask the server's operator"),
}
"""What is looked at, in order: how, and what to do where the error does not say it itself."""
