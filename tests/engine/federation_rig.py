"""A federation in one process: real sites and a real coordinator, joined by a transport that only hands bytes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

import sordino as sd
from sordino.client.rows import Records
from sordino.data import Federation
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.federation.coordinator import Coordinator
from sordino.engine.federation.descriptor import charter_of
from sordino.engine.federation.exchange import agree, enrol
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.limits import Declared, Policy
from sordino.engine.federation.peers import Peers
from sordino.engine.federation.shared_rounds import SharedRounds
from sordino.engine.federation.site import Purse, Site
from sordino.engine.rounds import Course
from sordino.methods import adapt
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.study import run as study_run
from sordino.study.deploy import Served, prepare
from sordino.study.file import make_study
from sordino.study.folder import planned

ROUNDS = 2
MODEL = "logistic"


class Fixture(Keyed):
    """A deterministic generator, injected at a site: the streams that a simulation with this key draws."""

    simulated = False


def five_clients(epsilon: Sequence[float] = (0.8, 1.5, 3.0, 6.0, 12.0)) -> Federation:
    digits = sd.data.load("digits")
    return digits.partition("dirichlet", clients=len(epsilon), beta=2.0, seed=1).with_budgets(list(epsilon), 1e-5)


def table(method: str, clients: Federation, rounds: int = ROUNDS, **training: Any) -> dict[str, Any]:
    """A study of these clients, as a file would say it."""
    return {
        "study": {"rounds": rounds, "seed": 3},
        "model": {"name": MODEL},
        "method": {"name": method},
        "training": training,
        "deployment": {"sites": list(clients.names), "shape": list(clients.shape), "classes": clients.classes},
    }


@dataclass(frozen=True)
class Simulated:
    """What a simulation of a study ended with, the key of its random streams, and the noise it planned."""

    weights: torch.Tensor
    key: str
    noises: Any
    result: Any = None


def simulated(clients: Federation, study: dict[str, Any], folder: Path) -> Simulated:
    """Run a study as a simulation, with the noise and the sums of a site."""
    read = make_study({**study, "training": {**study["training"], "exact_noise": True}})
    arguments = read.arguments()
    done = sd.train(clients, method=read.chosen_method(), out=folder, **arguments)
    model, seed, options, trust = (arguments.pop(key) for key in ("model", "seed", "model_options", "trust"))
    before = planned(folder)
    more = {"trust": trust, "evaluation": arguments.pop("evaluation", None)}
    ready = study_run.prepare(clients, model, read.chosen_method(), seed, options, arguments, before, **more)
    return Simulated(done.weights, ready.key, before.noises, done.result)


def records_of(clients: Federation, place: int) -> Records:
    """A site's records, with null rows where its data have them."""
    mine = clients.train[place]
    if clients.units is not None:
        known = None if clients.valid.all() else torch.from_numpy(clients.valid)
        every = Records(*(torch.from_numpy(np.asarray(one)) for one in (clients.x, clients.y)), known)
        return replace(every, members=torch.from_numpy(clients.units)).only(torch.from_numpy(mine))
    x, y = (torch.from_numpy(np.asarray(one)[mine]) for one in (clients.x, clients.y))
    valid = clients.valid[mine]
    return Records(x, y, None if valid.all() else torch.from_numpy(valid))


def enrolment_key(name: str) -> ec.EllipticCurvePrivateKey:
    """A site's enrolment key, the same in every rig."""
    return ec.derive_private_key(int.from_bytes(sha256(name.encode()).digest()) >> 8, ec.SECP256R1())


@dataclass
class Wires:
    """A transport that hands bytes over, and remembers all of them. ``fault`` may swallow or replace a reply."""

    sites: dict[str, Site]
    heard: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    fault: Callable[[str, bytes, bytes], bytes | None] = lambda name, request, reply: reply

    def names(self) -> set[str]:
        return set(self.sites)

    def exchange(
        self, requests: Sequence[tuple[str, bytes]], seconds: float, arrived: Callable[[int, bytes], None]
    ) -> None:
        for i, (name, data) in enumerate(requests):
            if name not in self.sites:
                continue
            answered = self.sites[name].handle(data)
            reply = self.fault(name, data, answered)
            if reply is not None:
                self.heard.append((name, data, reply))
                arrived(i, reply)


@dataclass
class Rig:
    """Sites with ledgers in a folder, and a coordinator that has enrolled them."""

    folder: Path
    clients: Federation
    study: dict[str, Any]
    key: str | None = None
    noises: Any = None
    policies: dict[str, Policy] = field(default_factory=dict)
    everywhere: Policy = field(default_factory=lambda: Policy(not_private=True, colluders=0))
    stack: ExitStack = field(default_factory=ExitStack)
    pinned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By site: the public keys that it pinned, where these are not all the others'."""

    def __enter__(self) -> Rig:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ready: Served = prepare(make_study(self.study), "run1")
        names = self.clients.names if "trust" in self.study else []
        self.keys = {name: enrolment_key(name) for name in names}
        self.wires = Wires({name: self.site(name) for name in self.clients.names})
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def site(self, name: str) -> Site:
        """A site as it starts, with the ledger that is on its disk."""
        place = self.clients.names.index(name)
        ledger = self.stack.enter_context(Ledger(self.folder / f"{name}.db"))
        count, shape = len(self.clients.train[place]), self.clients.shape
        consent = None if self.clients.consent is None else self.clients.consent.of(self.clients.train[place])
        schema = self.ready.brief["schema"] or ""
        more = {"unit_records": self.clients.unit_records, "tokens": self.clients.tokens}
        declared = Declared(count, shape, self.clients.classes, schema, **more)
        return Site(
            name,
            records_of(self.clients, place),
            declared,
            Purse(self.clients.budgets[place], ledger, consent=consent),
            self.folder / name,
            self.policies.get(name, self.everywhere),
            None if self.key is None else Fixture(self.key),
            self.peers(name),
            self.held(place),
        )

    def held(self, place: int) -> np.ndarray | None:
        """Which of a site's records are held out: those that a simulation of the study holds out."""
        if "evaluation" not in self.study:
            return None
        share, seed = self.study["evaluation"].get("share", 0.2), self.study["study"]["seed"]
        return np.isin(self.clients.train[place], self.clients.held_out(share, seed)[1][place])

    def peers(self, name: str) -> Peers | None:
        """The site's enrolment key and the others that it pinned, where the study shares noise."""
        if name not in self.keys:
            return None
        others = {who: key.public_key() for who, key in self.keys.items() if who != name}
        return Peers(name, self.keys[name], self.pinned.get(name, others))

    def coordinator(self, least: int = 1) -> Coordinator:
        """Enrol, plan and agree, as the server does before the first round."""
        self.coordinator_facts()
        plan = self.ready.plan(self.facts, self.noises)
        charter = None
        if plan.sharing is not None:
            charter = charter_of(plan, self.ready.brief, {name: one["key"] for name, one in self.facts.items()})
        self.charter = charter
        agreed = agree(self.wires, self.ready.brief, plan, 5.0, charter)
        self.payable, self.refused, self.evaluations = agreed.payable, agreed.refused, agreed.evaluations
        plan = adapt(plan, self.payable, len(self.ready.start), self.ready.study.study.seed)
        inbox = Inbox(self.folder / "inbox")
        parts = (Course(plan, self.ready.layout), self.ready.brief, self.wires, inbox, self.payable, 0.5, least)
        more = {"evaluations": self.evaluations}
        return Coordinator(*parts, **more) if charter is None else SharedRounds(*parts, **more, charter=charter)

    def coordinator_facts(self) -> dict[str, dict[str, Any]]:
        """What the sites say about themselves."""
        self.facts, refused, odd = enrol(self.wires, self.ready.brief, list(self.clients.names), 5.0)
        self.turned_away = refused | odd
        return self.facts

    def first(self) -> Checkpoint:
        return Checkpoint(0, self.ready.start.clone(), self.ready.shown.clone())

    def train(self, least: int = 1) -> Checkpoint:
        state = self.first()
        for _ in self.coordinator(least).run(state):
            pass
        return state
