"""What ten CIFAR-10 runs of the selection network may hold on a GPU: by what the code bounds, counted on a CPU."""

import torch

from sordino import methods, models
from sordino.client import gradients
from sordino.client.recorded import MOST_BYTES
from sordino.client.turn import Work
from sordino.engine import simulate
from sordino.methods import Population, Training
from sordino.privacy.types import Budget

RUNS, CLIENTS, BATCH = 10, 10, 128


def test_ten_runs_of_the_selection_network_stay_below_20_gib():
    model = models.build("tramer-cifar", (3, 32, 32), 10, 0)
    engine = gradients.build(model, "cross-entropy")
    engine.settle(engine.flatten(model), torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    guess, known = 4 * engine.dimension, engine.bytes_per_record
    sizes = torch.full((CLIENTS,), 5000).numpy()
    population = Population(tuple(f"c{i}" for i in range(CLIENTS)), sizes, (Budget(4.0, 1e-5),) * CLIENTS)
    method = methods.get("dp-fedavg")
    plan = methods.make_plan(method, Training(rounds=2, batch=BATCH), population, engine.dimension, 0)
    terms = [client.terms for client in plan.clients] * RUNS
    stacks = list(simulate.chunks(Work(engine, method.clip, method.local, stack=True), terms))
    assert known > guess, "a record holds more than its gradient, which is what is known before the first pass"
    most = max(sum(terms[row].divisor for row in rows) for rows in stacks)
    assert RUNS * CLIENTS * BATCH * known > simulate.STACK_HELD, "all at once would be more: the bound is what cuts"
    assert most * known <= simulate.STACK_HELD
    # A pass, what was recorded with its buffers, and weights of a stack: their sums, updates and what replaces them.
    bound = simulate.STACK_HELD + MOST_BYTES + 4 * simulate.STACK_BYTES
    assert bound < 20 * 2**30
