"""A server that wants more of held-out records than a study declares, or wants other records, against a real site."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sordino as sd
from sordino.engine.federation import wire
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.held import HELD

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from federation_rig import Rig, table


class Server:
    """Whatever a server could ask of the first site of a rig about its held-out records."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.plan = rig.ready.plan(rig.coordinator_facts())
        self.site = rig.wires.sites[rig.clients.names[0]]

    def terms(self, noise: float | None = None, **changed: Any) -> dict[str, Any]:
        plain = wire.terms_to_plain(self.plan.judging.terms[0])
        parts = plain["parts"] if noise is None else [[name, noise] for name, _ in plain["parts"]]
        return {**plain, "parts": parts, **changed}

    def say(self, **changed: Any) -> Packet:
        brief = {**self.rig.ready.brief, **changed.pop("brief", {})}
        facts = {"brief": brief, "terms": changed.pop("terms", None) or self.terms(), "round": 2, "since": 0}
        tensors = {"weights": changed.pop("weights", self.rig.ready.shown), **changed.pop("tensors", {})}
        return unpack(self.site.handle(pack(Packet(wire.SCORES, facts | changed, tensors))))

    def untouched(self) -> bool:
        return not any(self.site.ledger.spent(one) for one in (self.site.account, self.site.account + HELD))


WRONG = {
    "training records": ({"of": "training"}, "on all held-out records, and on no others"),
    "some records": ({"where": [0, 1, 2]}, "on all held-out records, and on no others"),
    "more tensors": ({"tensors": {"public/lr": torch.zeros(1)}}, "tensors that nothing asks for"),
    "another model": ({"weights": torch.zeros(3)}, "not a float32 vector"),
    "another precision": ({"weights": torch.zeros(650, dtype=torch.float64)}, "not a float32 vector"),
    "no evaluation": ({"brief": {"evaluation": None}}, r"the study has no \[evaluation\]"),
    "another round": ({"round": 3}, "round 3 is none of the 2"),
    "no such round": ({"round": 6}, "round 6 is none of the 2"),
    "round zero": ({"round": 0}, "round 0 is none of the 2"),
    "half a round": ({"round": 2.0}, "a whole number was expected"),
    "the future": ({"since": 3}, "round 3 cannot have counted"),
    "odd bins": ({"brief": {"evaluation": {"bins": 3}}}, "an even number"),
    "too many rounds": ({"brief": {"rounds": 100_000}}, "too many for this site"),
}
"""What a server may ask for that no site does, and what the site says to it."""


@pytest.fixture(scope="module")
def clients():
    digits = sd.data.load("digits", records=300).partition("iid", clients=3, seed=1)
    return digits.with_budgets([2.0, 4.0, 8.0], 1e-5)


def study(clients: Any) -> dict[str, Any]:
    found = table("dp-fedavg", clients, rounds=4, steps=2, rate=0.2, lr=0.5)
    return found | {"evaluation": {"every": 2, "share": 0.3}}


@pytest.fixture
def server(clients: Any, tmp_path: Path):
    with Rig(tmp_path, clients, study(clients)) as rig:
        yield Server(rig)


@pytest.fixture(scope="module")
def calm(clients: Any, tmp_path_factory: pytest.TempPathFactory):
    """A site that nothing is ever released from."""
    with Rig(tmp_path_factory.mktemp("calm"), clients, study(clients)) as rig:
        yield Server(rig)


def refusal(packet: Packet) -> str:
    assert packet.kind == wire.REFUSED, packet
    return str(packet.facts["reason"])


@pytest.mark.parametrize("what", WRONG)
def test_what_a_site_does_not_do(calm: Server, what: str):
    changed, words = WRONG[what]
    assert re.search(words, refusal(calm.say(**changed)))
    assert calm.untouched()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"noise": 0.05}, "would have noise 0.05: this site adds at least 0.1"),
        ({"noise": 0.0}, "would have noise 0: this site adds"),
        ({"parts": [["scores", 9.0], ["correct", 0.01]]}, "'correct' would have noise 0.01"),
        ({"parts": [["scores", 9.0]]}, "releases scores and correct"),
        ({"parts": [["scores", 9.0], ["correct", 9.0], ["gradient", 9.0]]}, "releases scores and correct"),
        ({"parts": [["gradient", 9.0], ["correct", 9.0]]}, "releases scores and correct"),
        ({"sampling": ["poisson", 0.1]}, "counts all held-out records, once"),
        ({"count": 3}, "counts all held-out records, once"),
        ({"divisor": 0.5}, "counts all held-out records, once"),
        ({"adjacency": "replace-one"}, "accounts under replace-one"),
    ],
)
def test_terms_that_a_site_does_not_release_under(calm: Server, changed: dict, words: str):
    assert words in refusal(calm.say(terms=calm.terms(**changed)))
    assert calm.untouched()


def test_a_model_is_not_judged_more_often_than_declared(server: Server):
    assert server.say().kind == wire.COUNTS
    replies = []
    for change, number in enumerate((4, 2, 4, 2), 1):
        replies.append(server.say(round=number, weights=server.rig.ready.shown + change))
        server.site.handle(pack(Packet(wire.BYE, {"run": "run1"})))  # nor after it was said to be over
    assert [one.kind for one in replies] == [wire.COUNTS, *[wire.REFUSED] * 3]
    assert "was released 2 times in this run" in refusal(replies[-1])
    assert server.site.ledger.spent(server.site.account) == []
    name = server.site.account + HELD
    assert server.site.ledger.epsilon([name])[name] <= server.rig.clients.budgets[0].epsilon
    # Nor under another run's name: what is left of the budget is what the first run did not use.
    more = [server.say(brief={"run": f"another{n}"}) for n in range(30)]
    assert server.site.ledger.epsilon([name])[name] <= server.rig.clients.budgets[0].epsilon
    assert sum(one.kind == wire.COUNTS for one in more) < 10
    assert more[-1].facts["budget"]


def test_the_same_request_is_answered_with_the_same_bytes_and_charged_once(server: Server):
    first, second = server.say(), server.say()
    assert torch.equal(first.tensors["scores"], second.tensors["scores"])
    assert torch.equal(first.tensors["correct"], second.tensors["correct"])
    assert server.site.ledger.charges(server.site.account + HELD, "run1", "scores+correct") == 1


def test_a_site_without_held_out_records_judges_nothing(clients: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(Rig, "held", lambda self, place: None if place == 0 else HELD_OF(self, place))
    with Rig(tmp_path, clients, study(clients)) as rig:
        state = rig.train()
        server = Server(rig)
        server.plan = replace_terms(server.plan)
        before = server.site.ledger.spent(server.site.account)
        assert "holds out no records" in refusal(server.say())
        assert server.site.ledger.spent(server.site.account) == before
    assert state.history[-1]["judged"] == list(clients.names[1:])


HELD_OF = Rig.held


def replace_terms(plan: Any) -> Any:
    """The second site's terms for the first, which has none of its own worth asking under."""
    return replace(plan, judging=replace(plan.judging, terms=(plan.judging.terms[1], *plan.judging.terms[1:])))


def test_nobody_holds_anything_out(clients: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(Rig, "held", lambda self, place: None)
    with Rig(tmp_path, clients, study(clients)) as rig, pytest.raises(Exception, match="no site has any"):
        rig.coordinator()
