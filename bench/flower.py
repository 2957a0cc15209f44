"""Flower with Opacus at the clients: a round of messages through Flower's own simulation (Ray, one process a core).

Flower owns the process it runs in, so the peer lives in a child that does one round for every line it is sent. Its
start (Ray, the workers, their copy of the data) falls into the warm-up pass, which is not counted.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from bench import workloads
from bench.workloads import Task
from sordino.errors import BadInput, SordinoError

DONE = "sordino bench: round done"


def flower(task: Task) -> Callable[[], None]:
    """One round of Flower + Opacus; needs ``flwr`` and ``ray`` beside sordino (``make bench`` has them)."""
    for needed in ("flwr", "ray", "opacus"):
        if importlib.util.find_spec(needed) is None:
            raise BadInput(f"peer 'flower' needs {needed}, which is not installed: use `make bench`")
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the child runs
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}
    child = subprocess.Popen(
        [sys.executable, "-c", f"from bench.flower import serve; serve({task.work.name!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **quiet},
    )
    atexit.register(_stop, child)

    def run() -> None:
        if child.stdin is None or child.stdout is None:
            raise SordinoError("the flower peer has no pipes")
        child.stdin.write("go\n")
        child.stdin.flush()
        for line in child.stdout:
            if DONE in line:
                return
        errors.seek(0)
        raise SordinoError(f"the flower peer ended: {errors.read()[-1500:]}")

    run.stop = lambda: _stop(child)  # type: ignore[attr-defined]
    return run


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None and child.stdin is not None:
        child.stdin.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()


@lru_cache(maxsize=1)
def _at_client(name: str) -> tuple[Task, Any]:
    """A worker process's own copy of the data, and its wrapped model."""
    from opacus import GradSampleModule

    task = workloads.prepare(workloads.find(name))
    return task, GradSampleModule(task.model)


def _train(name: str, client: int, arrays: Any) -> Any:
    """One client's turn with Opacus, from the weights of the message to those of the reply."""
    from flwr.app import ArrayRecord
    from opacus.optimizers import DPOptimizer

    task, local = _at_client(name)
    local._module.load_state_dict(arrays.to_torch_state_dict())
    optimizer = DPOptimizer(
        torch.optim.SGD(local.parameters(), lr=0.05),
        noise_multiplier=task.plan.clients[client].noise,
        max_grad_norm=1.0,
        expected_batch_size=task.work.batch,
    )
    own = task.own(client)
    for batch in task.batches[client]:
        where = torch.from_numpy(own[batch])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(local(task.x[where]), task.y[where]).backward()
        optimizer.step()
    return ArrayRecord(local._module.state_dict())


def serve(name: str) -> None:
    """Run Flower's simulation; a line on standard input is a round."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    task = workloads.prepare(workloads.find(name))
    server, client = ServerApp(), ClientApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        found = _train(name, int(context.node_config["partition-id"]), message.content["weights"])
        return Message(RecordDict({"weights": found}), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        weights = task.model.state_dict()
        for _ in sys.stdin:
            while len(nodes := list(grid.get_node_ids())) < task.work.clients:
                time.sleep(0.05)
            content = RecordDict({"weights": ArrayRecord(weights)})
            asked = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
            replies = list(grid.send_and_receive(asked))
            failed = [str(one.error) for one in replies if one.has_error()]
            if failed or len(replies) != task.work.clients:
                raise SordinoError(f"{len(replies)} of {task.work.clients} clients answered; errors: {failed[:1]}")
            answers = [one.content["weights"].to_torch_state_dict() for one in replies]
            {key: torch.stack([one[key] for one in answers]).mean(0) for key in weights}
            print(DONE, flush=True)

    run_simulation(server, client, task.work.clients, backend_config={"client_resources": {"num_cpus": 1}})
