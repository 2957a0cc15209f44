"""Rounds with shared noise as one would write them on a blackboard: record by record, in float64.

What a site adds is z·S·C/√h, what it counts for is b/z over everybody's, both worked out here from n, c and D.
"""

import math

import torch
from plain_fair import Plain, next_bound


class PlainShared(Plain):
    """A run whose sites share noise: so many may conspire with the server, and so many get lost."""

    def __init__(self, ready, colluders, dropouts=0):
        super().__init__(ready)
        private = [not c.budget.is_public for c in self.plan.clients]
        asked = [set(row[row >= 0].tolist()) for row in self.plan.schedule.asked]
        self.fewest = min(sum(private[i] for i in row) for row in asked)
        self.share = 1 / math.sqrt(max(1, self.fewest - colluders - dropouts))
        self.private_sites = private
        self.asked = asked

    def weights(self, terms, shares):
        """Public sites count for their shares; the others share the rest in proportion to b/z."""
        rest = sum(s for s, own in zip(shares, self.private_sites) if own)
        reach = [t.divisor / t.parts[0][1] if own else 0.0 for t, own in zip(terms, self.private_sites)]
        return [rest * a / sum(reach) if own else s for a, s, own in zip(reach, shares, self.private_sites)]

    def drawn(self, i, number, what, part, width):
        return self.source.normal([self.turn(i, number)], f"{what}/{part}", 0, torch.empty(1, width))[0].double()

    def mean_gradient(self, w, i, number, clip, factor=lambda loss: 1.0, noise=True):
        """(Σ_j clipped + z S C/√h N(0, I))/b of the one step, and of the same batch how many records lie under C."""
        terms = self.plan.clients[i].terms
        (where,) = self.batches(i, number, terms)
        total, under = torch.zeros_like(w), 0.0
        for loss, g in self.losses_and_gradients(w, where):
            f = factor(loss)
            size = f * g.norm().item()
            total += (f * min(1.0, clip / size) if size else f) * g
            under += (1.0 if g.norm().item() <= clip else 0.0) - 0.5
        if noise:
            own = terms.noise("gradient") * terms.adjacency.sensitivity * self.share
            total += own * clip * self.drawn(i, number, terms.what, "gradient", len(w))
        return total / terms.divisor, under, terms

    def answer(self, w, i, number, bound, what, of):
        """(Σ_j min(value_j, bound) + z S bound/√h N(0, 1))/b from a batch of its own."""
        terms = self.plan.clients[i].asks[0]
        (where,) = self.batches(i, number, terms)
        total = sum(min(max(0.0, of(loss, g)), bound) for loss, g in self.losses_and_gradients(w, where))
        own = terms.noise(what) * terms.adjacency.sensitivity * self.share
        return (total + own * bound * self.drawn(i, number, terms.what, what, 1).item()) / terms.divisor

    def step(self, w, number, shares, gradients):
        """w − η Σ w_i ḡ_i/Σ w_i over those who were asked."""
        weights = self.weights([c.terms for c in self.plan.clients], shares)
        whole = sum(weights[i] for i in gradients)
        return w - self.lr * sum(weights[i] / whole * g for i, g in gradients.items())


def plain_descent(p, shares):
    w = p.start.clone()
    for number in range(1, p.rounds + 1):
        w = p.step(w, number, shares, {i: p.mean_gradient(w, i, number, p.clip)[0] for i in p.asked[number - 1]})
    return w


def plain_quantile(p, shares, target=0.5, rate=0.2):
    """The radius moves by the weighted mean of shares under it, with the weights of the sum."""
    w, radius = p.start.clone(), p.clip
    weights = p.weights([c.terms for c in p.plan.clients], shares)
    for number in range(1, p.rounds + 1):
        gradients, mean, whole = {}, 0.0, sum(weights[i] for i in p.asked[number - 1])
        for i in p.asked[number - 1]:
            gradients[i], under, terms = p.mean_gradient(w, i, number, radius)
            own = terms.noise("under-radius") * terms.adjacency.sensitivity * p.share
            under += own * 0.5 * p.drawn(i, number, terms.what, "under-radius", 1).item()
            mean += weights[i] / whole * under / terms.divisor
        w = p.step(w, number, shares, gradients)
        radius *= math.exp(-rate * (min(1.0, max(0.0, 0.5 + mean)) - target))
    return w


def plain_fedfdp(p, shares, weight):
    """Everybody's loss as a sum of its own, with weights of its own."""
    w, bound = p.start.clone(), 2.5
    counts = p.weights([c.asks[0] for c in p.plan.clients], shares)
    for number in range(1, p.rounds + 1):
        heard = [p.answer(w, i, number, bound, "loss", lambda loss, g: loss) for i in p.everyone]
        mean = sum(c * one for c, one in zip(counts, heard))
        bound = next_bound(mean)
        factor = lambda loss: max(0.0, 1 + weight * (loss - mean))  # noqa: B023, E731
        w = p.step(w, number, shares, {i: p.mean_gradient(w, i, number, p.clip, factor)[0] for i in p.everyone})
    return w


def plain_adaptdp(p, shares, tau=1.0, floor=1e-3, chance=0.01):
    """The radius from the weighted mean of squared norms, and a margin for the noise of that mean."""
    w, ceiling = p.start.clone(), p.clip
    asks = [c.asks[0] for c in p.plan.clients]
    counts = p.weights(asks, shares)
    for number in range(1, p.rounds + 1):
        heard = [
            p.answer(w, i, number, ceiling**2, "squared-norm", lambda _, g: g.norm().item() ** 2) for i in p.everyone
        ]
        mean = sum(c * one for c, one in zip(counts, heard))
        own = [t.noise("squared-norm") * t.adjacency.sensitivity * p.share / t.divisor for t in asks]
        spread = math.sqrt(sum((c * o) ** 2 for c, o in zip(counts, own)))
        margin = math.sqrt(2 * math.log(2 * p.rounds / chance)) * spread * ceiling**2  # one answer a round is heard
        radius = max(floor * ceiling, min(ceiling, math.sqrt(max(0.0, 2 * tau * (mean + margin)))))
        assert floor * ceiling < radius < ceiling, "the radius is what the answers make of it"
        w = p.step(w, number, shares, {i: p.mean_gradient(w, i, number, radius)[0] for i in p.everyone})
    return w
