"""AdaptDP-FedAvg as one would write it on a blackboard: record by record, in float64, no rows, no gate, no tricks."""

import copy
import math

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sordino.privacy.generators import Keyed, Turn


def record_gradients(model, x, y):
    found = []
    for one, label in zip(x, y):
        model.zero_grad()
        cross_entropy(model(one[None]), label[None]).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
    return found


def records_of(clients, i, batch):
    where = clients.train[i][batch]
    return torch.from_numpy(clients.x[where]).double(), torch.from_numpy(clients.y[where])


def adaptdp(model, clients, plan, key, rounds, *, tau, floor, ball, reach=None, chance=0.01):
    """x_R, x^(out) and the radii of Algorithm 1, drawing batches and noise from the same keyed streams."""
    source, model = Keyed(key), copy.deepcopy(model).double()
    shares = clients.sizes / clients.sizes.sum()
    ceiling, lr = plan.training.clip, plan.training.lr
    radii, outs, count = [], [], len(plan.clients)
    for number in range(1, rounds + 1):
        start = parameters_to_vector(model.parameters()).detach().clone()
        mean = variance = 0.0
        asked = ceiling if reach is None or not radii else min(ceiling, reach * radii[-1])
        for i, one in enumerate(plan.clients):
            turn, terms = Turn(one.name, number), one.asks[0]
            (batch,) = source.batches(turn, "squared-norm", terms.sampling, one.records, 1)
            expected = terms.sampling.rate * one.records
            total = sum(
                min(float(g.norm()) ** 2, asked**2) for g in record_gradients(model, *records_of(clients, i, batch))
            )
            sigma = terms.noise("squared-norm") * one.budget.adjacency.sensitivity / expected
            noise = float(source.normal([turn], "squared-norm/squared-norm", 0, torch.empty(1, 1)))
            mean += (total / expected + sigma * asked**2 * noise) / count
            variance += sigma**2 / count
        nu = math.sqrt(2 * variance / count) * asked**2 * math.sqrt(math.log(2 * count * rounds / chance))
        radius = max(floor * ceiling, min(ceiling, math.sqrt(max(0.0, 2 * tau * (mean + nu)))))
        radii.append(radius)
        ended, out = torch.zeros_like(start), torch.zeros_like(start)
        for i, one in enumerate(plan.clients):
            local, turn, terms = copy.deepcopy(model), Turn(one.name, number), one.terms
            iterates = []
            for step, batch in enumerate(source.batches(turn, "gradient", terms.sampling, one.records, terms.count)):
                here = parameters_to_vector(local.parameters()).detach()
                iterates.append(here.clone())
                total = torch.zeros_like(start)
                for g in record_gradients(local, *records_of(clients, i, batch)):
                    total += min(1.0, radius / float(g.norm())) * g
                noise = source.normal([turn], "gradient/gradient", step, torch.empty(1, len(total)))[0].double()
                total += one.noise * one.budget.adjacency.sensitivity * radius * noise
                vector_to_parameters(here - lr * total / (terms.sampling.rate * one.records), local.parameters())
            ended += float(shares[i]) * parameters_to_vector(local.parameters()).detach()
            out += float(shares[i]) * torch.stack(iterates).mean(0)
        outs.append(out)
        vector_to_parameters(ended * min(1.0, ball / float(ended.norm())), model.parameters())
    return parameters_to_vector(model.parameters()).detach(), torch.stack(outs).mean(0), radii
