"""Recurrent networks with their products as layers of their own: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` taken apart.

    gates_t = W_x x_t + b_x,  W_h h_{t−1} + b_h
    LSTM: c_t = σ(f) c_{t−1} + σ(i) tanh(g),  h_t = σ(o) tanh(c_t)         GRU: h_t = (1 − z) n + z h_{t−1}

A record's gradient of W_h is a sum over time of outer products, as that of any layer over positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import BadInput
from sordino.models.attention import linear_of
from sordino.models.isolation import isolated

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]
"""From the two products' outputs and the state before to the state after, whose first tensor is put out."""


def _lstm(inner: Tensor, outer: Tensor, state: State) -> State:
    i, f, g, o = (inner + outer).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(inner: Tensor, outer: Tensor, state: State) -> State:
    (r, z, n), (hr, hz, hn) = outer.chunk(3, 1), inner.chunk(3, 1)
    n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (torch.lerp(n, state[0], torch.sigmoid(z + hz)),)


def _rnn(inner: Tensor, outer: Tensor, state: State) -> State:
    return (torch.tanh(inner + outer),)


def _rnn_relu(inner: Tensor, outer: Tensor, state: State) -> State:
    return (torch.relu(inner + outer),)


def _step(module: nn.RNNBase) -> Step:
    if isinstance(module, nn.RNN):
        return _rnn_relu if module.nonlinearity == "relu" else _rnn
    return _lstm if isinstance(module, nn.LSTM) else _gru


@isolated
class Cell(nn.Module):
    """One layer in one direction: a product for the inputs of all times at once, and one for the state at each."""

    def __init__(self, inputs: nn.Linear, hidden: nn.Linear) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden

    def run(self, x: Tensor, state: State, step: Step, backwards: bool) -> tuple[Tensor, State]:
        """States' first tensors at all times, ``[n, t, hidden]``, and the last state."""
        outer = list(self.inputs(x).unbind(1))
        found = []
        for one in reversed(outer) if backwards else outer:
            state = step(self.hidden(state[0]), one, state)
            found.append(state[0])
        return torch.stack(found[::-1] if backwards else found, 1), state


@isolated
class Recurrent(nn.Module):
    """A recurrent network, called and answering as torch's own with ``batch_first=True``."""

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        self.kind, self.size, self.layers = type(module).__name__, module.hidden_size, module.num_layers
        self.ways, self.dropout, self._step = 2 if module.bidirectional else 1, module.dropout, _step(module)
        self.cells = nn.ModuleList(_cell(module, suffix) for suffix in suffixes(module))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Outputs ``[n, t, hidden]`` and the last state ``[layers, n, hidden]`` (two of them for an LSTM)."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise BadInput(f"layer {self.kind} needs [records, length, width], all of one length, not packed sequences")
        count = 2 if self.kind == "LSTM" else 1
        if state is None:
            begin = [(x.new_zeros(len(x), self.size),) * count] * len(self.cells)
        else:
            begin = list(zip(*(one.unbind(0) for one in (state if count == 2 else (state,)))))
        ends: list[State] = []
        for layer in range(self.layers):
            if layer and self.dropout:
                x = functional.dropout(x, self.dropout, self.training)
            outs = []
            for way in range(self.ways):
                place = layer * self.ways + way
                cell = self.cells[place]
                assert isinstance(cell, Cell)
                out, end = cell.run(x, begin[place], self._step, backwards=way == 1)
                outs.append(out)
                ends.append(end)
            x = outs[0] if self.ways == 1 else torch.cat(outs, 2)
        last = tuple(torch.stack(each) for each in zip(*ends))
        return x, last if count == 2 else last[0]


def suffixes(module: nn.RNNBase) -> list[str]:
    """How torch ends the names of every cell's weights, in the order of :attr:`Recurrent.cells`."""
    ways = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{way}" for layer in range(module.num_layers) for way in ways]


def _cell(module: nn.RNNBase, suffix: str) -> Cell:
    def part(own: str) -> nn.Linear:
        bias = getattr(module, f"bias_{own}_{suffix}").detach() if module.bias else None
        return linear_of(getattr(module, f"weight_{own}_{suffix}").detach(), bias)

    return Cell(part("ih"), part("hh"))


def why_kept(module: nn.RNNBase) -> str | None:
    """Why a recurrent network cannot be taken apart, in words; None where it can."""
    if not module.batch_first:
        return "has the records on its second axis; make it with batch_first=True"
    if module.proj_size:
        return "projects its states (proj_size)"
    return None


def unroll(model: nn.Module) -> Iterator[tuple[str, nn.RNNBase]]:
    """Put :class:`Recurrent` in the place of torch's wherever that can be; the names and modules that were replaced."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RNNBase) and type(module) in RECURRENT and why_kept(module) is None and name:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Recurrent(module).train(module.training))
            yield name, module
