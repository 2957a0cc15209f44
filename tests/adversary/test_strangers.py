"""Strangers at the server, and members who pose as others: the control interface, foreign keys, forged replies."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from federation_network import NAMES, Network
from flwr.app import Message
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.main import create_app
from flwr.superlink.routers.fleet.router import router as fleet
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from network_attacker import Stranger
from typer.testing import CliRunner

from sordino.cli import app as commands
from sordino.engine.federation import grid as grid_module
from sordino.engine.federation import keyring as module
from sordino.engine.federation import wire
from sordino.engine.federation.certificates import Keys, certify, new_site_key
from sordino.engine.federation.front import FLEET, MOST, UNKNOWN, UNNAMED, Front
from sordino.engine.federation.grid import TRIES, GridTransport
from sordino.engine.federation.keyring import Keyring, Member, history, revoke, rotate
from sordino.engine.federation.signing import NotSigned, fingerprint, load_private, seal, unseal
from sordino.engine.federation.wire import from_records, to_records, unpack
from sordino.errors import BadInput

# --- the open port -------------------------------------------------------------------------------------------------


def test_control_does_not_answer_at_the_open_port(network: Network):
    who = Stranger(f"127.0.0.1:{network.link.port}", network.keys.authority)
    for attempt in (who.nodes, lambda: who.start(b"an app"), lambda: who.register(b"a key", "anna")):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            attempt()
        assert refused.value.response.status_code == 403


def test_the_superlink_listens_on_loopback_alone(network: Network):
    rows = [line.split() for one in ("tcp", "tcp6") for line in Path(f"/proc/net/{one}").read_text().splitlines()[1:]]
    listening = {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == network.link.inner
    }
    assert listening == {"0100007F"}


def test_a_foreign_key_registered_as_anna_is_turned_away(network: Network):
    """Even where somebody reached the control interface on the server itself."""
    private = ec.generate_private_key(ec.SECP384R1())
    foreign = Member("anna", private.public_key(), "").node_key
    inside = Stranger(f"127.0.0.1:{network.link.inner}", network.link.home / "loopback" / "ca.crt")
    inside.register(foreign, "anna")
    assert inside.nodes().count("anna") == 2
    key = NodeAuthHttpInterceptor(private, private.public_key())
    address, authority = f"127.0.0.1:{network.link.port}", network.keys.authority.read_bytes()
    line = FleetHttpClient.from_server_address(address, False, authority, [key])
    with line, pytest.raises(httpx.HTTPStatusError) as refused:
        line.ActivateNode(ActivateNodeRequest(public_key=foreign, heartbeat_interval=30))
    assert refused.value.response.status_code == 412
    assert UNKNOWN in refused.value.response.text


@dataclass
class Inner:
    """A SuperLink that says what it was asked, behind a front for one key."""

    calls: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def ask(self, path: str, method: str = "POST", key: bytes = b"enrolled", known: bool = True, **more: Any) -> int:
        """The status of one call to the front."""

        def answer(request: httpx.Request) -> httpx.Response:
            self.calls.append((request.url.path, dict(request.headers), request.content))
            return httpx.Response(200, content=b"taken", headers={"flwr-said": "yes", "set-cookie": "no"})

        async def call() -> httpx.Response:
            front = Front("127.0.0.1", 1, "http://inner", None, (lambda: {b"enrolled"}) if known else None, None)
            front._line = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            headers = {"flwr-public-key": base64.b64encode(key).decode(), "x-forwarded-for": "me"} | more.pop(
                "headers", {}
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://front") as line:
                return await line.request(method, path, headers=headers, content=more.pop("content", b"body"), **more)

        self.came = asyncio.run(call())
        return self.came.status_code


def test_every_route_of_a_superlink_is_refused_but_the_fleets():
    """The list is Flower's own: a route that is new there is refused until somebody adds it here."""
    inner, app = Inner(), create_app()
    routes = {path for route in app.routes for path in _paths(route)}
    theirs = {route.path for route in fleet.routes}
    assert len(routes) > 60
    assert theirs >= FLEET | UNNAMED
    assert theirs - FLEET == UNNAMED | {"/v1/fleet/get-fab"}, "apps are not handed out, keys come from the folder"
    assert {path for path in routes | theirs if inner.ask(path) == 200} == FLEET
    assert {path for path, _, _ in inner.calls} == FLEET


def _paths(route: Any) -> list[str]:
    inside = getattr(getattr(route, "original_router", None), "routes", None) or getattr(route, "routes", None) or []
    return [route.path] if hasattr(route, "path") else [path for one in inside for path in _paths(one)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull%2dmessages",
        "/v1/fleet/pull-messages?to=/v1/control/start-run",
        "/V1/FLEET/PULL-MESSAGES",
        "/",
        "/docs",
    ],
)
def test_a_path_that_only_looks_like_the_fleets_is_refused(path: str):
    inner = Inner()
    assert inner.ask(path) == 403
    assert inner.calls == []


def test_what_goes_through_is_written_anew():
    inner = Inner()
    assert inner.ask("/v1/fleet/push-object", content=b"x" * 6_000_000) == 200
    assert inner.came.content == b"taken"
    assert "set-cookie" not in inner.came.headers
    _, headers, body = inner.calls[0]
    assert len(body) == 6_000_000
    assert "x-forwarded-for" not in headers
    assert inner.ask("/v1/fleet/push-object", method="GET") == 403
    assert inner.ask("/v1/fleet/push-object", key=b"somebody's") == 412
    assert inner.ask("/v1/fleet/push-object", headers={"flwr-public-key": "no base64!"}) == 412
    assert inner.ask("/v1/fleet/push-object", headers={"content-length": str(MOST + 1)}) == 413
    assert inner.ask("/v1/fleet/register-node") == 403
    assert len(inner.calls) == 1
    assert inner.ask("/v1/fleet/register-node", known=False) == 200, "in a trial without keys nodes register themselves"


# --- signatures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return certify(tmp_path_factory.mktemp("keys"), ["north", "south"])


def test_a_signature_holds_for_one_site_one_request_and_one_reply(keys: Keys):
    north, south = (load_private(keys.private(name)) for name in ("north", "south"))
    sealed = seal(north, "north", b"round 3", b"reply")
    assert unseal(north.public_key(), "north", b"round 3", sealed) == b"reply"
    for public, name, request, bytes_ in (
        (south.public_key(), "north", b"round 3", sealed),
        (north.public_key(), "south", b"round 3", sealed),
        (north.public_key(), "north", b"round 4", sealed),
        (north.public_key(), "north", b"round 3", sealed + b"!"),
        (north.public_key(), "north", b"round 3", sealed[:-1]),
        (north.public_key(), "north", b"round 3", seal(south, "north", b"round 3", b"reply")),
        (north.public_key(), "north", b"round 3", b"reply"),
        (north.public_key(), "north", b"round 3", b""),
        (north.public_key(), "north", b"round 3", sealed[:30]),
    ):
        with pytest.raises(NotSigned):
            unseal(public, name, request, bytes_)


@dataclass
class Forger:
    """A SuperLink on which somebody answers in north's place, ``times`` times, before north does."""

    keys: Keys
    forged: bytes
    times: int
    asked: int = 0
    replies: dict[str, Any] = field(default_factory=dict)

    def get_nodes(self) -> list[SimpleNamespace]:
        key = Keyring(self.keys).members()["north"].node_key
        foreign = SimpleNamespace(node_id=9, name="north", last_activated_at="now", public_key=b"another")
        return [SimpleNamespace(node_id=1, name="anything", last_activated_at="t", public_key=key), foreign]

    def push_messages(self, messages: list[Message]) -> list[str]:
        (message,) = messages
        assert message.metadata.dst_node_id == 1, "only the node that has the key is asked"
        self.asked += 1
        request, private = from_records(message.content), load_private(self.keys.private("north"))
        reply = self.forged if self.asked <= self.times else seal(private, "north", request, b"north's own")
        about = SimpleNamespace(reply_to_message_id=str(self.asked))
        self.replies[str(self.asked)] = SimpleNamespace(
            has_error=lambda: False, content=to_records(reply), metadata=about
        )
        return [str(self.asked)]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return [self.replies.pop(one) for one in list(ids) if one in self.replies]


@pytest.mark.parametrize("which", ["unsigned", "another's key", "another request"])
@pytest.mark.parametrize("times", [1, TRIES])
def test_a_forged_reply_does_not_count_and_the_site_is_asked_again(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, times: int
):
    for name, value in {"POLL": 0.01, "LOOK": 0.02}.items():
        monkeypatch.setattr(grid_module, name, value)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    north, south = (load_private(keys.private(name)) for name in ("north", "south"))
    forged = {
        "unsigned": wire.unavailable(),
        "another's key": seal(south, "north", b"request", b"forged"),
        "another request": seal(north, "north", b"an earlier request", b"replayed"),
    }[which]
    grid, ring, found = Forger(keys, forged, times), Keyring(keys, tmp_path / "keys.json"), []
    GridTransport(grid, ring).exchange([("north", b"request")], 5.0, lambda i, reply: found.append(reply))
    assert grid.asked == min(times + 1, TRIES)
    if times < TRIES:
        assert found == [b"north's own"]
        assert (tmp_path / "keys.json").exists()
    else:
        assert unpack(found[0]).facts["reason"].startswith("its reply is not signed")
        assert not (tmp_path / "keys.json").exists()


# --- whose key is whose --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(module, "FRESH", 0.0)
    return certify(tmp_path / "keys", ["north", "south"])


def known(keys: Keys, pins: Path) -> dict[str, str]:
    return {name: one.fingerprint for name, one in Keyring(keys, pins).members().items()}


def test_a_key_that_is_replaced_by_hand_is_not_taken_in_a_run_that_knows_the_name(fresh: Keys, tmp_path: Path):
    pins = tmp_path / "pins.json"
    Keyring(fresh, pins).pin("north")
    fresh.write_site("north", *new_site_key())
    fresh.write_site("south", *new_site_key())
    assert set(known(fresh, pins)) == {"south"}, "south was not heard yet"
    assert set(known(fresh, tmp_path / "another run.json")) == {"north", "south"}


def test_a_rotated_key_is_taken_and_the_old_one_opens_nothing(fresh: Keys, tmp_path: Path):
    pins, ring = tmp_path / "pins.json", Keyring(fresh, tmp_path / "pins.json")
    ring.pin("north")
    old = fresh.private("north").read_bytes(), fresh.public("north").read_bytes()
    first, second = rotate(fresh, "north"), rotate(fresh, "north", new_site_key()[1])
    assert known(fresh, pins)["north"] == second
    ring.pin("north")
    assert [one["new"] for one in history(fresh)] == [first, second]
    assert not fresh.private("north").exists(), "a site that made its own key keeps it"
    for name in ("north", "east"):
        fresh.write_site(name, *old)
        assert name not in known(fresh, tmp_path / "any run.json"), "under no name"
    with pytest.raises(BadInput, match="used before"):
        rotate(fresh, "south", old[1])


def test_a_revoked_key_never_comes_back(fresh: Keys, tmp_path: Path):
    pins, ring = tmp_path / "pins.json", Keyring(fresh, tmp_path / "pins.json")
    ring.pin("north")
    old = fresh.private("north").read_bytes(), fresh.public("north").read_bytes()
    revoke(fresh, "north")
    assert set(ring.members()) == {"south"}
    fresh.write_site("north", *old)
    assert set(ring.members()) == {"south"}
    fresh.write_site("north", *new_site_key())
    assert set(known(fresh, pins)) == {"south"}, "to this run north is its old key"
    assert set(known(fresh, tmp_path / "next.json")) == {"north", "south"}


def test_one_key_for_two_names_speaks_for_neither(fresh: Keys, tmp_path: Path):
    pins = tmp_path / "pins.json"
    Keyring(fresh, pins).pin("north")
    fresh.public("east").write_bytes(fresh.public("north").read_bytes())
    assert set(known(fresh, tmp_path / "new.json")) == {"south"}
    assert set(known(fresh, pins)) == {"north", "south"}, "a name that is known keeps its key"


def test_a_file_that_is_no_key_is_nobody(fresh: Keys, tmp_path: Path):
    fresh.public("north").write_text("ssh-ed25519 AAAA")
    fresh.public("-odd name").write_bytes(fresh.public("south").read_bytes())
    assert set(known(fresh, tmp_path / "pins.json")) == {"south"}


def test_keys_are_rotated_and_revoked_from_the_command_line(fresh: Keys, tmp_path: Path):
    run = CliRunner().invoke
    before = known(fresh, tmp_path / "pins.json")
    done = run(commands, ["certify", str(fresh.folder), "--rotate", "north"])
    assert "rotated: north" in done.output
    (tmp_path / "own.pub").write_bytes(new_site_key()[1])
    done = run(commands, ["certify", str(fresh.folder), "--rotate", "south", "--public", str(tmp_path / "own.pub")])
    assert "to south only" not in done.output
    after = known(fresh, tmp_path / "pins.json")
    assert not set(before.values()) & set(after.values())
    assert fingerprint(load_private(fresh.private("north")).public_key()) == after["north"]
    assert "revoked: north" in run(commands, ["certify", str(fresh.folder), "--revoke", "north"]).output
    assert set(known(fresh, tmp_path / "pins.json")) == {"south"}
    for wrong in (["--revoke", "nobody"], ["--rotate", "../north"], ["--public", "x"], []):
        assert isinstance(run(commands, ["certify", str(fresh.folder), *wrong]).exception, BadInput)


def test_a_revoked_site_is_turned_away_at_its_next_call(network: Network):
    """Not by asking the SuperLink: the front looks at the keys' folder itself."""
    extra = certify(network.keys.folder, ["dora"])
    key = load_private(extra.private("dora"))
    member, address = Member("dora", key.public_key(), ""), f"127.0.0.1:{network.link.port}"
    time.sleep(module.FRESH + 0.1)
    network.link.refresh()
    shown = NodeAuthHttpInterceptor(key, key.public_key())
    with FleetHttpClient.from_server_address(address, False, network.keys.authority.read_bytes(), [shown]) as line:
        request = ActivateNodeRequest(public_key=member.node_key, heartbeat_interval=30)
        assert line.ActivateNode(request).node_id
        revoke(network.keys, "dora")
        time.sleep(module.FRESH + 0.1)
        with pytest.raises(httpx.HTTPStatusError, match="412"):
            line.ActivateNode(request)
    assert {"dora", *NAMES} - {"dora"} == set(Keyring(network.keys).members())
