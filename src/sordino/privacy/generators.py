"""Where randomness comes from. Batches and noise are drawn here and nowhere else.

Two sources with one face. ``Keyed``: simulation; every stream is keyed by (run, client, round, copy, what, step,
sampling | noise), so no two draws collide, draws do not depend on how rows are chunked, and a resumed run repeats them.
``Secret``: a site; noise from the operating system's generator, batches from ChaCha20 keyed by it, never seeded by a
study, never written to disk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import SordinoError
from sordino.privacy import normals
from sordino.privacy.discrete import discrete_normals
from sordino.privacy.envelope import Words
from sordino.privacy.lattice import rounded_normals
from sordino.privacy.threads import side_by_side
from sordino.privacy.types import Sampling, Scheme

Indices = NDArray[np.int64]

EXACT_PIECE = 1 << 13  # exact draws that are made at once, which threads make side by side


@dataclass(frozen=True)
class Batches:
    """Consecutive batches as one flat vector: batch k is ``positions[ends[k-1]:ends[k]]``."""

    positions: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, step: int) -> Indices:
        if not 0 <= step < len(self.ends):
            raise IndexError(step)
        return self.positions[self.ends[step - 1] if step else 0 : self.ends[step]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[step] for step in range(len(self)))

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


Draw = tuple[Turn, str, Sampling, int, int]
"""A turn's batches, as :meth:`Source.batches` is asked for them."""


class Source(Protocol):
    """Where a client's batches and noise come from."""

    simulated: bool

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` independent batches of record positions in [0, records)."""

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor, scale: Tensor | None = None) -> Tensor:
        """Fill ``out[rows, m]`` with standard normals, streams of its own for every row.

        With ``scale[rows]``: add scale·N(0, 1) to what ``out`` holds, in place, without a second matrix.
        """

    def rounded(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """``width`` exact draws of ⌊deviation·N(0, 1)⌉, float64 that holds integers (see ``privacy.lattice``)."""

    def discrete(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """``width`` exact draws of the discrete Gaussian, int64: sums of them stay private (``privacy.discrete``)."""


def draw(generator: np.random.Generator, sampling: Sampling, records: int, count: int) -> Batches:
    """``count`` batches of positions.

    Guarantees: Poisson includes every record by a coin of its own; fixed is uniform among subsets of that size, and
    never larger than its rate says; draws are independent of each other and of the records' values.
    """
    if sampling.scheme is Scheme.POISSON:
        return _coins(generator, sampling.rate, records, count)
    if sampling.scheme is Scheme.FIXED:
        size = sampling.size(records)
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


def _pour(out: Tensor, keys: Sequence[normals.Keys], scale: Tensor | None) -> Tensor:
    """Normals of every row from its key, wherever the row lies: drawn on a CPU."""
    if out.device.type != "cpu" or out.dtype != torch.float32 or not out.is_contiguous():
        drawn = _pour(torch.empty(out.shape), keys, None).to(out.device, out.dtype)
        return out.copy_(drawn) if scale is None else out.addcmul_(drawn, scale.to(out)[:, None])
    scales = None if scale is None else np.ascontiguousarray(scale.detach().cpu().float().numpy())
    normals.fill(out.detach().numpy(), np.array(keys, dtype=np.uint64).reshape(-1, 2), scales)
    return out


Exact = Callable[[Words, float, int], NDArray[np.float64] | NDArray[np.int64]]
"""A sampler of exact noise: words, deviation, count."""


def _pour_exact(sampler: Exact, width: int, deviation: float, words: Callable[[int], Words]) -> Tensor:
    """Exact draws, every block of them from words of its own, on all threads."""
    parts = side_by_side(
        lambda start: sampler(words(start // EXACT_PIECE), deviation, min(EXACT_PIECE, width - start)),
        range(0, width, EXACT_PIECE),
    )
    return torch.from_numpy(np.concatenate(parts))


def system_words(count: int) -> NDArray[np.uint64]:
    """Words from the operating system's own generator."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


@lru_cache(1 << 14)
def _framed(part: str) -> bytes:
    """Text behind its length: no two lists of parts are the same bytes end to end."""
    text = part.encode()
    return len(text).to_bytes(4, "big") + text


class Keyed:
    """Reproducible streams for simulation. Not secret: whoever knows the run's key can redo every draw."""

    simulated = True

    def __init__(self, run: str) -> None:
        self.run = run
        self._held: tuple[list[Turn], str, Tensor] | None = None
        self._ahead: dict[Draw, Batches] = {}

    def _key(self, turn: Turn, what: str, purpose: str, step: int) -> NDArray[np.uint64]:
        parts = (turn.run or self.run, turn.client, str(turn.round), str(turn.copy), what, purpose, str(step))
        text = b"".join(map(_framed, parts))
        return np.frombuffer(blake2b(text, digest_size=16).digest(), dtype=np.uint64)

    def keys_on(self, turns: list[Turn], what: str, device: torch.device) -> Tensor:
        """A key for every turn, on the device; steps are counted there, so that a turn of K steps hashes once."""
        if self._held is None or self._held[0] is not turns or self._held[1] != what:
            keys = np.array([self._key(turn, what, "noise", -1)[0] for turn in turns]).view(np.int64)
            self._held = (turns, what, torch.from_numpy(keys).to(device))
        return self._held[2]

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` batches of one turn: consecutive, non-overlapping parts of the turn's sampling stream."""
        known = self._ahead.pop((turn, what, sampling, records, count), None)
        if known is not None:
            return known
        key = self._key(turn, what, "sampling", 0)
        return draw(np.random.Generator(np.random.Philox(key=key)), sampling, records, count)

    def expect(self, draws: Sequence[Draw]) -> None:
        """Draw batches that will be asked for soon, while a GPU is busy; those expected before are forgotten."""
        self._ahead = {}
        self._ahead = {one: self.batches(*one) for one in draws}

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor, scale: Tensor | None = None) -> Tensor:
        """Standard normals (``normals.fill``); on a CUDA device drawn there, in one kernel (a 64-bit key a row).

        Guarantees: a draw depends on its row's key and its column alone.
        """
        if out.device.type == "cuda" and out.dtype == torch.float32 and out.is_contiguous():
            from sordino.privacy import noise_cuda  # needs triton, which comes with CUDA builds of torch only

            keys = self.keys_on(turns, what, out.device)
            return noise_cuda.fill(out, keys, step, None if scale is None else scale.to(out))
        return _pour(out, [self._key(turn, what, "noise", step) for turn in turns], scale)

    def normal_by(self, keys: Tensor, step: Tensor, out: Tensor, scale: Tensor) -> Tensor:
        """Add scale·N(0, 1), on a CUDA device, from streams whose keys and step lie there: the draws of ``normal``."""
        from sordino.privacy import noise_cuda  # needs triton, which comes with CUDA builds of torch only

        return noise_cuda.fill(out, keys, step, scale)

    def _words(self, turn: Turn, what: str, purpose: str, step: int) -> Callable[[int], Words]:
        """Words of every block: Philox with the key of that purpose and a counter from block·2¹²⁸."""
        key = self._key(turn, what, purpose, step)

        def words(block: int) -> Words:
            stream = np.random.Generator(np.random.Philox(key=key, counter=block << 128))
            return lambda count: stream.integers(0, 1 << 64, count, dtype=np.uint64)

        return words

    def rounded(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """The site's exact noise, from keyed streams."""
        return _pour_exact(rounded_normals, width, deviation, self._words(turn, what, "rounded noise", step))

    def discrete(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """The site's share of noise that is added up, from keyed streams of its own."""
        return _pour_exact(discrete_normals, width, deviation, self._words(turn, what, "discrete noise", step))


class Secret:
    """Cryptographic randomness for a site, which nobody can redo."""

    simulated = False

    def __init__(self) -> None:
        self._owner = -1
        self._stream()

    def _stream(self) -> np.random.Generator:
        """A ChaCha20 stream with 256 fresh bits of the operating system as its key; a forked child has its own."""
        if os.getpid() != self._owner:  # a child must not repeat its parent's draws
            from randomgen import ChaCha

            self._generator = np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))
            self._owner = os.getpid()
        return self._generator

    def batches(self, turn: Turn, what: str, sampling: Sampling, records: int, count: int) -> Batches:
        """``count`` batches that nobody can redo."""
        return draw(self._stream(), sampling, records, count)

    def normal(self, turns: list[Turn], what: str, step: int, out: Tensor, scale: Tensor | None = None) -> NoReturn:
        """Always refuses: floating-point noise lies on a grid that shows through a sum."""
        raise SordinoError("a site's noise is exact: its records are taken one by one, and its sums lie on a lattice")

    def rounded(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """Exact noise straight from the operating system's generator."""
        return _pour_exact(rounded_normals, width, deviation, lambda block: system_words)

    def discrete(self, turn: Turn, what: str, step: int, width: int, deviation: float) -> Tensor:
        """Exact shares of noise straight from the operating system's generator."""
        return _pour_exact(discrete_normals, width, deviation, lambda block: system_words)

    def __reduce__(self) -> NoReturn:
        raise SordinoError("secret randomness is never copied, pickled or checkpointed")
