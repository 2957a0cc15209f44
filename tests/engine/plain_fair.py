"""The fairness methods as one would write them on a blackboard: client by client, record by record, in float64."""

import copy
import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sordino.privacy.generators import Keyed, Turn


class Plain:
    """A federation, a plan and its random streams; what every method below is written with."""

    def __init__(self, ready):
        self.clients, self.plan, self.source = ready.clients, ready.plan, Keyed(ready.key)
        self.model = copy.deepcopy(ready.template).double()
        self.private = ready.plan.method.private
        self.lr, self.clip = ready.plan.training.lr, ready.plan.training.clip
        self.rounds = ready.plan.training.rounds
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()
        self.shares = [n / sum(self.clients.sizes.tolist()) for n in self.clients.sizes.tolist()]
        self.everyone = range(len(self.plan.clients))

    def turn(self, i, number):
        return Turn(self.plan.clients[i].name, number)

    def batches(self, i, number, terms, count=None):
        one = self.plan.clients[i]
        drawn = self.source.batches(self.turn(i, number), terms.what, terms.sampling, one.records, count or terms.count)
        return [self.clients.train[i][b] for b in drawn]

    def losses_and_gradients(self, w, where):
        found = []
        vector_to_parameters(w, self.model.parameters())
        for j in where:
            self.model.zero_grad()
            x = torch.from_numpy(self.clients.x[j : j + 1]).double()
            loss = cross_entropy(self.model(x), torch.from_numpy(self.clients.y[j : j + 1]))
            loss.backward()
            found.append((loss.item(), torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone()))
        return found

    def gradient(self, w, i, number, step, where, terms, factor=lambda loss: 1.0):
        """(Σ f_j min(1, C/(f_j‖g_j‖)) g_j + z C N(0, I)) / (q n)."""
        total = torch.zeros_like(w)
        for loss, g in self.losses_and_gradients(w, where):
            f = factor(loss)
            size = f * g.norm().item()
            if self.private and size > self.clip:
                f *= self.clip / size
            total += f * g
        if self.private:
            key = f"{terms.what}/gradient"
            noise = self.source.normal([self.turn(i, number)], key, step, torch.empty(1, len(w)))[0].double()
            total += terms.noise("gradient") * self.clip * noise
        return total / terms.divisor

    def loss(self, w, i, number, step, where, terms, bound):
        """(Σ min(max(0, F_j), C_l) + z_l C_l N(0, 1)) / (q n)."""
        total = sum(min(max(0.0, loss), bound) for loss, _ in self.losses_and_gradients(w, where))
        if self.private:
            total += (
                terms.noise("loss")
                * bound
                * self.source.normal([self.turn(i, number)], f"{terms.what}/loss", step, torch.empty(1, 1)).item()
            )
        return total / terms.divisor

    def ask(self, w, number, bound):
        """Everyone's loss at w, from batches of their own."""
        terms = [self.plan.clients[i].asks[0] for i in self.everyone]
        drawn = [self.batches(i, number, terms[i])[0] for i in self.everyone]
        return [self.loss(w, i, number, 0, drawn[i], terms[i], bound) for i in self.everyone]


def next_bound(mean):
    return min(10.0, max(0.1, 2.5 * mean))


def fedavg(p, correct=lambda w, start, i: 0.0):
    """FedAvg with a term added to every gradient."""
    w = p.start.clone()
    for number in range(1, p.rounds + 1):
        moved = torch.zeros_like(w)
        for i in p.everyone:
            terms, local = p.plan.clients[i].terms, w.clone()
            for step, where in enumerate(p.batches(i, number, terms)):
                local = local - p.lr * (p.gradient(local, i, number, step, where, terms) + correct(local, w, i))
            moved += p.shares[i] * (local - w)
        w = w + moved
    return w


def fedprox(p, mu=0.1):
    return fedavg(p, lambda w, start, i: mu * (w - start))


def fedfdp(p, weight=0.1):
    """With losses from batches of their own: F is that of this round's weights."""
    w, bound = p.start.clone(), 2.5
    for number in range(1, p.rounds + 1):
        mean = sum(s * f for s, f in zip(p.shares, p.ask(w, number, bound)))
        bound = next_bound(mean)
        moved = torch.zeros_like(w)
        for i in p.everyone:
            terms, local = p.plan.clients[i].terms, w.clone()
            for step, where in enumerate(p.batches(i, number, terms)):
                factor = lambda loss: max(0.0, 1 + weight * (loss - mean))  # noqa: B023, E731
                local = local - p.lr * p.gradient(local, i, number, step, where, terms, factor)
            moved += p.shares[i] * (local - w)
        w = w + moved
    return w


def fedfdp_same_batch(p, weight=0.1):
    """With losses from the gradients' batches: F is what was heard in the round before."""
    w, bound, mean = p.start.clone(), 2.5, None
    for number in range(1, p.rounds + 1):
        moved, heard = torch.zeros_like(w), 0.0
        for i in p.everyone:
            terms, local, told = p.plan.clients[i].terms, w.clone(), []
            for step, where in enumerate(p.batches(i, number, terms)):
                told.append(p.loss(local, i, number, step, where, terms, bound))
                factor = lambda loss: 1.0 if mean is None else max(0.0, 1 + weight * (loss - mean))  # noqa: B023, E731
                local = local - p.lr * p.gradient(local, i, number, step, where, terms, factor)
            moved += p.shares[i] * (local - w)
            heard += p.shares[i] * sum(told) / len(told)
        w, mean, bound = w + moved, heard, next_bound(heard)
    return w


def fedfair(p, weight=0.1, most=None):
    w, mean = p.start.clone(), None
    for number in range(1, p.rounds + 1):
        moved, heard = torch.zeros_like(w), 0.0
        for i in p.everyone:
            terms, local, told = p.plan.clients[i].terms, w.clone(), []
            for step, where in enumerate(p.batches(i, number, terms)):
                told.append(p.loss(local, i, number, step, where, terms, math.inf))
                factor = 1.0 if mean is None else 1 + weight * (told[-1] - mean)
                length = p.lr * (factor if most is None else min(most, max(0.0, factor)))
                local = local - length * p.gradient(local, i, number, step, where, terms)
            moved += p.shares[i] * (local - w)
            heard += p.shares[i] * sum(told) / len(told)
        w, mean = w + moved, heard
    return w


def scaffold(p):
    """c_i ← the mean of the turn's own gradients; c ← Σ p_i c_i."""
    w, control = p.start.clone(), torch.zeros_like(p.start)
    own = [torch.zeros_like(w) for _ in p.everyone]
    for number in range(1, p.rounds + 1):
        moved = torch.zeros_like(w)
        for i in p.everyone:
            terms, local, seen = p.plan.clients[i].terms, w.clone(), []
            for step, where in enumerate(p.batches(i, number, terms)):
                seen.append(p.gradient(local, i, number, step, where, terms))
                local = local - p.lr * (seen[-1] - own[i] + control)
            own[i] = sum(seen) / len(seen)
            moved += p.shares[i] * (local - w)
        control = sum(s * c for s, c in zip(p.shares, own))
        w = w + moved
    return w


def feddyn(p, alpha=0.1):
    """As published, with data shares in place of 1/m: h ← h − αΣp(w_i − w), w ← Σp w_i − h/α."""
    w, h = p.start.clone(), torch.zeros_like(p.start)
    duals = [torch.zeros_like(w) for _ in p.everyone]
    for number in range(1, p.rounds + 1):
        ended = []
        for i in p.everyone:
            terms, local = p.plan.clients[i].terms, w.clone()
            for step, where in enumerate(p.batches(i, number, terms)):
                gradient = p.gradient(local, i, number, step, where, terms)
                local = local - p.lr * (gradient - duals[i] + alpha * (local - w))
            duals[i] = duals[i] - alpha * (local - w)
            ended.append(local)
        mean = sum(s * one for s, one in zip(p.shares, ended))
        h = h - alpha * (mean - w)
        w = mean - h / alpha
    return w


def q_ffl(p, q=0.1):
    w, bound = p.start.clone(), 2.5 if p.private else math.inf
    for number in range(1, p.rounds + 1):
        losses = p.ask(w, number, bound)
        if p.private:
            bound = next_bound(sum(s * f for s, f in zip(p.shares, losses)))
        above, below = torch.zeros_like(w), 0.0
        for i in p.everyone:
            terms, local = p.plan.clients[i].terms, w.clone()
            for step, where in enumerate(p.batches(i, number, terms)):
                local = local - p.lr * p.gradient(local, i, number, step, where, terms)
            f, gradient = max(0.01, losses[i]), (w - local) / p.lr
            above += f**q * gradient
            below += q * f ** (q - 1) * gradient.square().sum().item() + f**q / p.lr
        w = w - above / below
    return w


def ali_dpfl(p):
    """The pace from the updates of the rounds before; returns the weights and the paces taken."""
    w, pace, paces = p.start.clone(), None, []
    total = p.plan.clients[0].turns * p.plan.clients[0].terms.count
    left, spreads, product, square, before = total, [], 1.0, 1.0, None
    for number in range(1, p.rounds + 1):
        count = min(pace or p.plan.clients[0].terms.count, left)
        if count == 0:
            break
        paces.append(count)
        left -= count
        ended = []
        for i in p.everyone:
            terms, local = p.plan.clients[i].terms, w.clone()
            for step, where in enumerate(p.batches(i, number, terms, count)):
                local = local - p.lr * p.gradient(local, i, number, step, where, terms)
            ended.append(local)
        gradients = [(w - one) / (count * p.lr) for one in ended]
        noise = [(c.noise * p.clip / c.terms.divisor) ** 2 / count for c in p.plan.clients]
        mean = sum(s * g for s, g in zip(p.shares, gradients))
        spread = sum(s * (g - mean).square().sum().item() for s, g in zip(p.shares, gradients))
        spreads.append(spread - len(w) * sum((s - s * s) * v for s, v in zip(p.shares, noise)))
        if before is not None:
            step, old, excess = before
            error = 2 * sum(s * s * v for s, v in zip(p.shares, noise)) + 1e-12
            product += (((mean - old) * step).sum().item() - excess) / error
            square += step.square().sum().item() / error
        step = sum(s * one for s, one in zip(p.shares, ended)) - w
        excess = len(w) * sum(s * s * count * p.lr * v for s, v in zip(p.shares, noise))
        before, w = (step, mean, excess), w + step
        mu = min(10.0, max(0.1, product / square))
        smallest = min(c.terms.divisor for c in p.plan.clients)
        power = sum(s * (c.noise * p.clip) ** 2 for s, c in zip(p.shares, p.plan.clients)) * len(w) / smallest**2
        tilt = max(0.0, np.mean(spreads)) / 2
        above = 4 / mu**2 + 3 * p.clip**2 + tilt * total + power
        best = math.sqrt(1 + above / ((2 + 2 / total) * (p.clip**2 + power)))
        pace = 1 if p.rounds - number >= left else min(100, max(1, round(best)))
    return w, paces
