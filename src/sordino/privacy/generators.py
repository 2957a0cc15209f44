"""Where randomness comes from. Batches and noise are drawn here and nowhere else.

Two sources with one face. ``Keyed``: simulation; every stream is keyed by (run, client, round, copy, what, step,
sampling | noise), so no two draws collide, draws do not depend on how rows are chunked, and a resumed run repeats them.
``Secret``: a site; ChaCha20 keyed by the operating system, never seeded by a study, never written to disk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, NoReturn, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import SordinoError
from sordino.privacy.types import Sampling, Scheme

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Batches(Sequence[Indices]):
    """Consecutive batches as one flat vector: batch k is ``positions[ends[k-1]:ends[k]]``."""

    positions: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, step: int) -> Indices: ...

    @overload
    def __getitem__(self, step: slice) -> list[Indices]: ...

    def __getitem__(self, step: int | slice) -> Indices | list[Indices]:
        if isinstance(step, slice):
            return [self[k] for k in range(*step.indices(len(self)))]
        if not 0 <= step < len(self.ends):
            raise IndexError(step)
        return self.positions[self.ends[step - 1] if step else 0 : self.ends[step]]

    def of(self, records: Indices) -> Batches:
        """The same batches with positions among ``records`` in place of their own."""
        return Batches(records[self.positions], self.ends)


class Turn(NamedTuple):
    """One participation: what a stream is keyed by, and what a charge is booked under.

    ``run`` overrides a keyed source's own run, so that rows of several simulated runs can share one stack.
    """

    client: str
    round: int
    copy: int = 0
    run: str = ""


class Source(Protocol):
    """Where a client's batches and noise come from."""

    simulated: bool

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` independent batches of record positions in [0, records)."""

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor) -> Tensor:
        """Fill ``out[rows, m]`` with standard normals, a stream of its own for every row."""


def draw(generator: np.random.Generator, sampling: Sampling, records: int, count: int) -> Batches:
    """``count`` batches of positions.

    Guarantees: Poisson includes every record by a coin of its own; fixed is uniform among subsets of that size; draws
    are independent of each other and of the records' values.
    """
    if sampling.scheme is Scheme.POISSON:
        return _coins(generator, sampling.rate, records, count)
    if sampling.scheme is Scheme.FIXED:
        size = round(sampling.rate * records)
        drawn = [np.sort(generator.choice(records, size, replace=False, shuffle=False)) for _ in range(count)]
        return Batches(np.concatenate(drawn), size * np.arange(1, count + 1))
    return Batches(np.tile(np.arange(records), count), records * np.arange(1, count + 1))


def _coins(generator: np.random.Generator, rate: float, records: int, count: int) -> Batches:
    """Heads of ``count`` × ``records`` independent coins, found by the geometric gaps between them.

    The gaps of a Bernoulli process are independent geometric variables, so this is the same draw as tossing every
    coin, at the price of the heads only.
    """
    total = count * records
    expected = total * rate
    room = int(expected + 6 * np.sqrt(expected)) + 16
    marks, last = [], -1
    while last < total - 1:
        gaps = np.minimum(generator.geometric(rate, room), total + 1)
        marks.append(last + np.cumsum(gaps))
        last = int(marks[-1][-1])
    heads = np.concatenate(marks)
    heads = heads[: np.searchsorted(heads, total)]
    return Batches(heads % records, np.searchsorted(heads, records * np.arange(1, count + 1)))


def _fill(generator: np.random.Generator, row: Tensor) -> None:
    if row.device.type == "cpu" and row.dtype == torch.float32 and row.is_contiguous():
        generator.standard_normal(out=row.numpy(), dtype=np.float32)
    else:
        row.copy_(torch.from_numpy(generator.standard_normal(row.shape, dtype=np.float32)))


class Keyed:
    """Reproducible streams for simulation. Not secret: whoever knows the run's key can redo every draw."""

    simulated = True

    def __init__(self, run: str) -> None:
        self.run = run
        self._held: tuple[list[Turn], str, Tensor] | None = None

    def _key(self, turn: Turn, what: str, purpose: str, step: int) -> NDArray[np.uint64]:
        parts = (turn.run or self.run, turn.client, str(turn.round), str(turn.copy), what, purpose, str(step))
        text = b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts)
        return np.frombuffer(blake2b(text, digest_size=16).digest(), dtype=np.uint64)

    def _generator(self, turn: Turn, what: str, purpose: str, step: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(turn, what, purpose, step)))

    def _keys_on(self, turns: list[Turn], what: str, device: torch.device) -> Tensor:
        """A key for every turn, on the device; steps are counted there, so that a turn of K steps hashes once."""
        if self._held is None or self._held[0] is not turns or self._held[1] != what:
            keys = np.array([self._key(turn, what, "noise", -1)[0] for turn in turns]).view(np.int64)
            self._held = (turns, what, torch.from_numpy(keys).to(device))
        return self._held[2]

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` batches of one turn: consecutive, non-overlapping parts of the turn's sampling stream."""
        return draw(self._generator(turn, what, "sampling", 0), sampling, records, count)

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor) -> Tensor:
        """Standard normals; on a CUDA device drawn there, in one kernel (Philox, a 64-bit key a row)."""
        if out.device.type == "cuda" and out.dtype == torch.float32 and out.is_contiguous():
            from sordino.privacy import noise_cuda  # needs triton, which comes with CUDA builds of torch only

            return noise_cuda.fill(out, self._keys_on(turns, what, out.device), step)
        for turn, row in zip(turns, out, strict=True):
            _fill(self._generator(turn, what, "noise", step), row)
        return out


class Secret:
    """Cryptographic randomness for a site: one ChaCha20 stream whose key never leaves the process."""

    simulated = False

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        from randomgen import ChaCha

        self._owner = os.getpid()
        self._generator = np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))

    def _own(self) -> np.random.Generator:
        if os.getpid() != self._owner:  # a forked child must not repeat its parent's noise
            self._rekey()
        return self._generator

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` batches that nobody can redo."""
        return draw(self._own(), sampling, records, count)

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor) -> Tensor:
        """Standard normals that nobody can redo."""
        for row in out:
            _fill(self._own(), row)
        return out

    def __reduce__(self) -> NoReturn:
        raise SordinoError("secret randomness is never copied, pickled or checkpointed")
