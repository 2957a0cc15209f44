"""Nothing that arrives over the network runs at a site, whatever kind of run, task or app it is, whoever sent it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import uvicorn
from federation_network import NAMES, Network
from federation_rig import table
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from network_attacker import AGENT_APP, CLIENT_APP, Stranger, evil_app, heard

from sordino.engine.federation import worker as module
from sordino.engine.federation.keyring import Keyring
from sordino.engine.federation.processes import free_port
from sordino.engine.federation.wire import from_records, to_records
from sordino.engine.federation.worker import Lost, Worker, carry_only, start_nothing

LOOKED_AT = {"flwr-serverapp", "flwr-clientapp", "flwr-simulation", "flwr-agentapp", "flwr-model", "flwr-connector"}
"""The kinds of tasks that Flower 1.41 has; each runs as a command of that name."""

TOOLS = {"flwr", "flower-superexec", "flower-superlink", "flower-supernode"}
"""Its commands that are no task."""


def test_flower_has_the_kinds_of_tasks_that_were_looked_at():
    """A new kind, or a new command, means: read how a site would come to run it, then add it here."""
    assert {str(one) for one in TaskType} == LOOKED_AT
    assert {str(one) for one in TASK_TYPE_TO_COMMAND} == set(TASK_TYPE_TO_COMMAND.values()) == LOOKED_AT
    commands = {
        one.name for one in importlib.metadata.distribution("flwr").entry_points if one.group == "console_scripts"
    }
    assert commands == LOOKED_AT | TOOLS


def test_another_flower_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flwr.supercore.version.package_version", "1.42.0")
    with pytest.raises(ValueError, match=r"needs Flower 1\.41\.x, and 1\.42\.0 is installed"):
        Worker(1, b"secret")


def test_a_supernodes_process_can_start_nothing():
    """As an audit hook, which nothing in the process can take back."""
    tries = "subprocess.run(['true'])", "os.system('true')", "os.fork()", "os.execv('/bin/true', ['true'])"
    text = "import os, subprocess, sys\nfrom sordino.engine.federation.worker import start_nothing\n"
    text += "sys.addaudithook(start_nothing)\n"
    for one in (*tries, "os.posix_spawn('/bin/true', ['true'], {})", "os.spawnv(os.P_WAIT, '/bin/true', ['true'])"):
        text += f"try:\n    {one}\nexcept PermissionError:\n    print('refused')\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 6
    start_nothing("open", ())


def test_a_supernodes_loop_fetches_no_app_and_follows_no_server_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    fetched: list[str] = []

    @contextlib.contextmanager
    def connected(**options: object) -> Iterator[tuple[object, ...]]:
        yield (7, "receive", "send", "get_run", fetched.append, "pull_object", "push_object", "confirm")

    flower = SimpleNamespace(_init_connection=connected, _pull_and_store_message=lambda **options: None)
    carry_only(flower)
    with flower._init_connection() as (_, _, _, _, get_fab, *rest):
        assert get_fab("hash", 1).content == b""
    assert rest == ["pull_object", "push_object", "confirm"]
    assert fetched == []
    assert flower.get_fused_config_from_fab(b"a bundle", None) == {}
    with ProtobufClient("https://server") as line:
        assert not line._client.follow_redirects


class Runtime:
    """A SuperNode's own interface for workers, with tasks that a test puts in."""

    def __init__(self) -> None:
        factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
        self.state: NodeState = factory.state()
        self.port = free_port()
        app = create_app(state_factory=factory, superexec_auth_secret=b"shared")
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_config=None))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)

    def put(self, kind: str, content: RecordDict, message_type: str = "train") -> Message:
        """A task of some kind, and its message, as the SuperNode's loop stores them."""
        message = Message(content, 7, message_type)
        self.state.create_task(kind, run_id=1, fab_hash="a bundle")
        loop._insert_message(message, self.state, self.state.object_store)
        return message

    def reply(self) -> Message:
        """What the SuperNode would send."""
        (found,) = self.state.get_messages_legacy(is_reply=True)
        self.state.delete_messages()
        return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.server.should_exit = True
    made.thread.join(5)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch):
    for name in ("_task_id", "_run_id", "_node_id"):  # what Flower knows of the process that makes a message
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(module, "FIRST", 1.0)


def never(packet: bytes) -> bytes:
    raise AssertionError("the site was asked")


@pytest.mark.parametrize("kind", sorted(LOOKED_AT))
def test_a_task_of_every_kind_is_taken_and_answered_and_no_bundle_is_touched(runtime: Runtime, kind: str, monkeypatch):
    def opened(*args: object) -> None:
        raise AssertionError("somebody asked for the bundle")

    for name in ("get_fab", "get_run", "activate_task"):  # what handing over a task's input begins with
        monkeypatch.setattr(runtime.state, name, opened)
    honest = RecordDict({"packet": to_records(b"packet")["packet"]})
    runtime.put(kind, honest)
    asked: list[bytes] = []
    worker = Worker(runtime.port, b"shared")
    assert worker.serve_one(lambda packet: asked.append(packet) or b"answer", 0.0)
    assert not worker.serve_one(never, 0.0), "the task is done"
    reply = runtime.reply()
    if kind == "flwr-clientapp":
        assert asked == [b"packet"]
        assert not reply.has_error()
    else:
        assert asked == []
        assert "refused: no app runs here" in reply.error.reason


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"agent": ConfigRecord({"text": "import os"})}),
        RecordDict({"packet": ConfigRecord({"bytes": b"packet"})}),
        RecordDict({"packet": ArrayRecord()}),
    ],
    ids=["nothing", "an agent's", "no array", "no bytes"],
)
def test_a_message_without_a_packet_gets_an_error_and_the_next_one_its_answer(runtime: Runtime, content: RecordDict):
    worker = Worker(runtime.port, b"shared")
    runtime.put("flwr-clientapp", content)
    worker.serve_one(never, 0.0)
    assert "holds no packet" in runtime.reply().error.reason
    runtime.put("flwr-clientapp", to_records(b"packet" * 2_000_000), "evaluate")
    worker.serve_one(never, 0.0)
    assert "nothing that this site answers" in runtime.reply().error.reason
    runtime.put("flwr-clientapp", to_records(b"packet" * 2_000_000))
    worker.serve_one(lambda packet: packet[::-1], 0.0)
    (found,) = runtime.state.get_messages_legacy(is_reply=True)
    tree = runtime.state.object_store.get_object_tree(found.metadata.message_id)
    assert len(tree.children) == 1
    runtime.state.delete_messages()


def test_a_message_that_cannot_be_answered_is_said_to_be_lost(runtime: Runtime):
    runtime.state.create_task("flwr-clientapp", run_id=1, fab_hash="a bundle")
    with pytest.raises(Lost, match="without a message"):
        Worker(runtime.port, b"shared").serve_one(never, 0.0)


def test_tasks_go_to_nobody_else_on_the_machine(runtime: Runtime):
    with pytest.raises(Lost, match="gives no tasks"):
        Worker(runtime.port, b"guessed").serve_one(never, 0.0)
    assert not Worker(free_port(), b"shared").serve_one(never, 0.0), "while nobody listens there is no task"


def test_a_packet_survives_its_envelope():
    assert from_records(to_records(b"\x00packet")) == b"\x00packet"


@pytest.mark.parametrize(("kind", "components", "messages"), [("agent", AGENT_APP, 3), ("client", CLIENT_APP, 12)])
def test_a_server_that_sends_an_app_hears_errors_and_runs_nothing(
    network: Network, tmp_path: Path, kind: str, components: str, messages: int
):
    """Whoever has the SuperLink itself: an agent app, and a client app with messages of every kind."""
    server = Stranger(f"127.0.0.1:{network.link.inner}", network.link.home / "loopback" / "ca.crt")
    server.start(evil_app(tmp_path / "evil", components, tmp_path / "said"))
    said = heard(tmp_path / "said")
    assert len(said) == messages
    assert all(str(one["error"]).startswith("refused: ") and one["payload"] is None for one in said)
    assert (network.link.home / "owned").exists(), "the attack did run, at the server"
    for name in NAMES:
        assert not (network.folder / name / "flower" / "owned").exists()
        assert not list((network.folder / name).rglob("*useful*")), "nothing of the app is on the site's disk"


def test_a_sites_supernode_has_started_nothing(network: Network):
    rows = [
        line.split(None, 2)
        for line in subprocess.check_output(["ps", "-ewwo", "pid=,ppid=,args="], text=True).splitlines()
    ]
    sites = {str(one.process.pid) for one in network.sites.values()}
    nodes = {row[0] for row in rows if row[1] in sites}
    assert len(nodes) == len(NAMES)
    assert all("--isolation process" in row[2] for row in rows if row[0] in nodes)
    assert not [row for row in rows if row[1] in nodes]


def test_honest_service_goes_on(network: Network):
    """With everyone who has a key, Cleo's among them, which came late; each name belongs to its key from now on."""
    result, folder = network.run(table("dp-fedavg", network.clients, rounds=1, steps=2, rate=0.2, lr=0.3))
    assert result["rounds"][0]["participants"] == NAMES
    members = Keyring(network.keys).members()
    assert json.loads((folder / "keys.json").read_text()) == {name: members[name].fingerprint for name in NAMES}
