"""What keeps a site from taking part: one look each at schema, records, limits, keys, ledger and the way to the server.

A look returns what it found; it raises an error where something is wrong, ``Fault`` where it knows a remedy of its own,
``Skipped`` where there is nothing to look at. None of them writes anything.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from cryptography import x509

from sordino import methods, models
from sordino.client.rows import Records
from sordino.engine.federation.certificates import check_in_force
from sordino.engine.federation.held import commit_to
from sordino.engine.federation.limits import Declared
from sordino.engine.federation.node import Address
from sordino.engine.federation.processes import command
from sordino.engine.federation.reach import Away, certificate_of, knows
from sordino.engine.federation.signing import fingerprint, load_private, load_public
from sordino.engine.federation.worker import check_flower
from sordino.errors import SordinoError
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger_format import check_path
from sordino.study.heartbeat import LATE, Life
from sordino.study.site_file import SiteFile

NEARLY = 0.01
"""The share of a budget below which nothing worth a turn is left."""


class Fault(SordinoError):
    """Something that would keep a site from taking part, with a remedy of its own."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.remedy = remedy


class Skipped(Exception):
    """A look that makes no sense here; its text says why."""


@dataclass
class Site:
    """A site as its file describes it; records are read once."""

    file: SiteFile
    insecure: bool

    @cached_property
    def records(self) -> tuple[Records, Declared]:
        """The records, and what the site says about them."""
        return self.file.records()

    @cached_property
    def address(self) -> Address:
        """Where the server is, with the keys to get there."""
        return self.file.address(self.insecure)


def _readable(read: Callable[[], object]) -> bool:
    """Whether something can be read; where it cannot, the look at it says why."""
    try:
        read()
    except Exception:
        return False
    return True


def schema(site: Site) -> str:
    """What is learnt from the records, and who is protected."""
    found = site.file._schema
    if found is None:
        return "none yet: this site can be surveyed, and not trained on"
    kind = "regression" if found.classes is None else f"{len(found.classes)} classes"
    whom = "every record is protected" if found.unit is None else f"every {found.unit_name} ({found.unit}) is protected"
    return f"{kind}; {whom}"


def data(site: Site) -> str:
    """How many records there are, and how many of them fit the schema."""
    if not _readable(lambda: site.file._schema):
        raise Skipped("its schema cannot be read")
    records, declared = site.records
    rows = len(records.y)
    null = 0 if records.valid is None else int((~records.valid).sum())
    if rows == 0 or null == rows:
        raise Fault(
            f"all {rows} records are null rows: none fits the schema",
            "compare [data.schema] with the file: names of columns, the label's classes, ranges",
        )
    whose = "" if records.members is None else f" of {declared.records:,} {site.file.unit}s"
    parts = [f"{rows:,} records{whose}, {null:,} null rows, shape {list(declared.shape)}"]
    parts += [f"schema {declared.schema[:12]}, to compare with the others'"] if declared.schema else []
    return "; ".join(parts)


def limits(site: Site) -> str:
    """That what is allowed exists here: methods, models, modules, somebody to share noise with."""
    allowed, policy = site.file.limits, site.file.policy
    for module in allowed.modules:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            raise Fault(f"limits.modules: {module!r} is not installed here", "install it, or take it off the list")
    for name in allowed.methods or ():
        methods.get(name, modules=policy.modules)
    for name in allowed.models or ():
        own = name.partition(":")[0] if ":" in name else ""
        if (own and importlib.util.find_spec(own.split(".")[0]) is None) or not (own or name in models.names()):
            raise Fault(f"limits.models: {name!r} is not known here", f"install it; known: {', '.join(models.names())}")
    if allowed.colluders is not None and site.file.trust is None:
        raise Fault(
            "limits.colluders allows shared noise, and [trust] names nobody to share it with",
            'put the other sites\' public keys into a folder and name it: [trust] peers = "keys/peers"',
        )
    cost = site.file.budget.epsilon if allowed.run_epsilon is None else allowed.run_epsilon
    return f"at most ε {cost:g} and {allowed.rounds} rounds a run, noise at least {allowed.least_noise:g}"


def folder(site: Site) -> str:
    """That there is, or can be, a folder for the site's own files."""
    where = site.file.at(site.file.site.folder)
    there = next(one for one in (where, *where.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Fault(f"{there} cannot be written to", "site.folder names a folder that this user may write to")
    life = Life.read(where)
    busy = life is not None and life.ended is None and life.age < LATE
    return f"{where}" + ("; a `sordino join` works there now" if busy else "")


def keys(site: Site) -> str:
    """That both keys can be read, by nobody else where that matters, and belong together."""
    if site.insecure:
        raise Skipped("--insecure: no keys are used")
    address = site.address
    assert address.authority is not None
    assert address.private is not None
    check_in_force(address.authority)
    key, mode = load_private(address.private), address.private.stat().st_mode & 0o777
    if mode & 0o077:
        raise Fault(f"others may read {address.private} (mode {mode:o})", f"chmod 600 {address.private}")
    beside = address.private.with_suffix(".pub")
    if beside.exists() and fingerprint(load_public(beside.read_bytes(), str(beside))) != fingerprint(key.public_key()):
        raise Fault(f"{beside} is not the public half of {address.private}", "give the server the right public key")
    until = x509.load_pem_x509_certificate(address.authority.read_bytes()).not_valid_after_utc
    return f"key {fingerprint(key.public_key())[:16]}…; the authority is in force until {until:%Y-%m-%d}"


def peers(site: Site) -> str:
    """Whom the site knows by keys of its own, and that they are enough."""
    if site.file.trust is None:
        raise Skipped("no [trust] peers: this site shares no noise")
    found, colluders = site.file.peers(), site.file.limits.colluders
    if found is None:
        raise Fault("[trust] peers needs a key to sign with", "name keys.private")
    known, names = found.distinct(found.pinned), ", ".join(found.pinned) or "nobody"
    if colluders is not None and known <= colluders:
        raise Fault(
            f"{known} other sites are pinned ({names}), and limits.colluders = {colluders} of them may conspire: no "
            "noise can be shared",
            "put more sites' public keys into trust.peers, as NAME.pub, or lower limits.colluders",
        )
    return f"{known} different keys pinned: {names}"


def ledger(site: Site) -> str:
    """That the ledger is sound, this site's and these records', with something left; or that there can be one."""
    file, path = site.file, site.file.at(site.file.budget.ledger)
    own = file.at(file.site.folder)
    if not path.exists() and path.parent == own and not own.exists():
        return f"none yet: the first `sordino join` makes {own} and the ledger in it"
    check_path(path, readonly=False)
    if not path.exists():
        return f"none yet: the first `sordino join` makes {path}"
    with Ledger(path, readonly=True) as book:
        sealed = book.verify()
        if not _readable(lambda: site.records):
            raise Skipped("it is sound; whether it was kept for these records cannot be told, for they cannot be read")
        (records, declared), account = site.records, file.site.name
        if book.parted() is not None:
            file.held(book, declared.records)  # refuses another share, or another file
        if book.bindings():
            by_file = book.parted() is not None
            account = book.bind(file.site.name, commit_to(book, file.at(file.data.path), records, by_file))
        budget = replace(file.budget.promised(), unit=file.unit)
        known = [one.client for one in book.accounts() if one.client in (account, account + HELD)]
        for one in known:
            book.check_account(one, budget, file.budget.composition)
        if book.parted() is None and file.data.held_out is not None and any(book.spent(one) for one in known):
            raise Fault("all records were trained on, so that none can be held out any more", "leave out data.held_out")
        told = "sound" if sealed else "sound, and not sealed (somebody has it open, or was killed)"
        return f"{told}; " + (_left(book, known) if known else "nothing was ever spent from it")


def _left(ledger: Ledger, accounts: list[str]) -> str:
    """What is left of the accounts' budgets; an error where that is nothing worth a turn."""
    spent, parts = ledger.epsilon(accounts), []
    for one in accounts:
        whole = ledger.account(one).budget.epsilon
        left, whose = whole - spent[one], "held-out records" if one.endswith(HELD) else "training"
        if math.isinf(whole):
            return "a public site: nothing is limited"
        if left <= NEARLY * whole:
            raise Fault(
                f"ε {spent[one]:.4g} of {whole:g} is spent ({whose}): nothing is left",
                "its officer may raise the budget, on record: sordino ledger top-up",
            )
        open_plans = sum(standing.open for standing in ledger.standings(one))
        more = f", of which {open_plans} declared run(s) may still use a part" if open_plans else ""
        parts.append(f"{whose}: ε {left:.4g} of {whole:g} is left{more}")
    return "; ".join(parts)


def flower(site: Site) -> str:
    """That Flower is there, in a version that a site works with."""
    command("flower-supernode")
    check_flower()
    return "installed, in the version that this sordino knows"


def server(site: Site) -> str:
    """That the server answers, and is the one that the authority signed for."""
    try:
        shown = certificate_of(site.address)
    except Away as error:
        raise Fault(
            f"nobody answers at {site.address}: {error}",
            "start `sordino serve`, or correct site.server; sites may also join before their server is up",
        ) from None
    if not shown:
        return f"{site.address} answers, without TLS"
    until = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), datetime.UTC)
    days = (until - datetime.datetime.now(datetime.UTC)).days
    return f"{site.address} answers; its certificate is trusted, and in force until {until:%Y-%m-%d} ({days} days)"


def enrolled(site: Site) -> str:
    """That the server knows this site's key."""
    if site.insecure:
        raise Skipped("--insecure: no keys are used")
    try:
        assert site.address.private is not None
        key = load_private(site.address.private).public_key()
        certificate_of(site.address)
    except SordinoError:
        raise Skipped("the server cannot be asked") from None
    if not knows(site.address, key):
        raise Fault(
            f"the server at {site.address} does not know this site's key",
            f"give its operator the public half, to be put into its keys' folder as sites/{site.file.site.name}.pub",
        )
    return f"the server at {site.address} knows this site's key"
