"""DP-FedAvg as one would write it on a blackboard: record by record, in float64, no rows, no gate, no tricks."""

import copy
from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from sordino.privacy.generators import Keyed, Turn


def clipped_sum(model, x, y, clip, versions=lambda one: [one]):
    """Σ_j min(1, C/‖g_j‖) g_j, with g_j the mean gradient of the record's versions: of itself, or of copies."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for one, label in zip(x, y):
        model.zero_grad()
        copies = versions(one)
        for each in copies:
            (cross_entropy(model(each[None]), label[None]) / len(copies)).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        factor = min(1.0, clip / norm.item())
        for t, p in zip(total, model.parameters()):
            t += factor * p.grad
    return torch.cat([t.flatten() for t in total])


def dp_fedavg(model, clients, plan, key, rounds, versions=lambda one, number, step: [one]):
    """Weights after ``rounds`` rounds, drawing batches and noise from the same keyed streams."""
    source = Keyed(key)
    model = copy.deepcopy(model).double()
    shares = clients.sizes / clients.sizes.sum()
    for number in range(1, rounds + 1):
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        combined = torch.zeros_like(start)
        for i, one in enumerate(plan.clients):
            local = copy.deepcopy(model)
            turn, terms = Turn(one.name, number), one.terms
            for step, batch in enumerate(source.batches(turn, "gradient", terms.sampling, one.records, terms.count)):
                where = clients.train[i][batch]
                x, y = torch.from_numpy(clients.x[where]).double(), torch.from_numpy(clients.y[where])
                copies = partial(versions, number=number, step=step)
                total = clipped_sum(local, x, y, plan.training.clip, copies)
                noise = source.normal([turn], "gradient/gradient", step, torch.empty(1, len(total)))[0].double()
                gradient = (total + one.noise * plan.training.clip * noise) / (terms.sampling.rate * one.records)
                weights = torch.nn.utils.parameters_to_vector(local.parameters()).detach()
                torch.nn.utils.vector_to_parameters(weights - plan.training.lr * gradient, local.parameters())
            ended = torch.nn.utils.parameters_to_vector(local.parameters()).detach()
            combined += float(shares[i]) * (ended - start)
        torch.nn.utils.vector_to_parameters(start + combined, model.parameters())
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def close(a, b):
    """Relative distance of two weight vectors."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)
