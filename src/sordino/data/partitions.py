"""Ways of dealing one data set to many clients: pure functions from labels to an index array per client.

All take the labels (or just their number), work on whole arrays, and return ``parts``: one int64 index array per
client, disjoint, every record in exactly one of them. Their randomness, and that of budgets, comes from ``generator``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sordino.errors import BadInput

Index = npt.NDArray[np.int64]
Parts = list[Index]


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The random stream of ``(seed, purpose)``: Philox keyed by SeedSequence([seed, crc32(purpose)]).

    Two purposes never share draws, so that e.g. another budget seed leaves the partition as it was.
    These draws are public randomness (who got which record in a simulation); nothing here protects a record.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise BadInput(f"seed is {seed!r}: it must be a whole number ≥ 0")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([int(seed), zlib.crc32(purpose.encode())])))


def equal_sizes(records: int, clients: int) -> Index:
    """Sizes that differ by at most one and sum to ``records``."""
    sizes = np.full(clients, records // clients, dtype=np.int64)
    sizes[: records % clients] += 1
    return sizes


def unequal_sizes(records: int, clients: int, bounds: Sequence[float], random: np.random.Generator) -> Index:
    """n_k = records · v_k / Σ v, v_k ~ U(a, b), rounded so that the sizes sum to ``records``."""
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise BadInput(f"data.sizes is {bounds!r}: give two numbers (a, b), sizes are then ∝ U(a, b)") from None
    if not 0 <= low <= high < np.inf or high == 0:
        raise BadInput(f"data.sizes is {bounds!r}: need 0 ≤ a ≤ b and b > 0")
    shares = random.uniform(low, high, clients)
    sizes: Index = np.diff(np.rint(np.cumsum(shares) / shares.sum() * records).astype(np.int64), prepend=0)
    return sizes


def similarity(labels: npt.NDArray[np.generic], sizes: Index, percent: float, random: np.random.Generator) -> Parts:
    """``percent`` (s) of each client's records are IID (100: all), the rest runs of the label-sorted remainder.

    Client k gets round(s·n_k/100) records at random; what nobody drew is sorted by label (ties in random order) and
    dealt in contiguous runs of n_k − round(s·n_k/100).
    """
    if not 0 <= percent <= 100:
        raise BadInput(f"data.similarity is {percent!r}: it is a percentage from 0 (sorted) to 100 (iid)")
    order = random.permutation(len(labels))
    mixed = np.rint(sizes * (percent / 100.0)).astype(np.int64)
    drawn, rest = np.split(order, [int(mixed.sum())])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    return [np.concatenate(pair) for pair in zip(_cut(drawn, mixed), _cut(rest, sizes - mixed))]


def dirichlet(
    labels: npt.NDArray[np.int64], clients: int, beta: float, minimum: int, random: np.random.Generator
) -> tuple[Parts, int]:
    """Each class is divided by its own draw from Dirichlet(β, …, β), under the balance rule.

    Balance rule: classes are divided one after another, and a client that already holds its fair share of all records
    (N / clients) or more gets none of the later classes; the others' proportions are rescaled to sum to 1.
    The whole draw is repeated, up to 10 times, while some client has fewer than ``minimum`` records; after that the
    short clients take random records from the currently largest ones. Also returns how many records were so moved.
    """
    if not 0 < beta < np.inf:
        raise BadInput(f"data.beta is {beta!r}: the Dirichlet parameter must be > 0 (small = unlike, large = alike)")
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    owner = np.empty(len(labels), dtype=np.int64)
    for _ in range(10):
        sizes = np.zeros(clients, dtype=np.int64)
        for indices in members:
            wanting = sizes < len(labels) / clients
            shares = np.where(wanting, random.dirichlet(np.full(clients, beta)), 0.0)
            # A tiny β can leave all of the mass on clients that are full: then whoever is not full shares evenly.
            cumulated = np.cumsum(shares if shares.sum() > 0 else wanting)
            ends = np.floor(cumulated / cumulated[-1] * len(indices)).astype(np.int64)
            counts = np.diff(ends, prepend=0)
            owner[random.permutation(indices)] = np.repeat(np.arange(clients), counts)
            sizes += counts
        if sizes.min() >= minimum:
            break
    moved = _top_up(owner, sizes, minimum, random)
    return _cut(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=clients)), moved


def _top_up(owner: Index, sizes: Index, minimum: int, random: np.random.Generator) -> int:
    """Move random records (in place) from the largest clients to those below ``minimum``; how many were moved."""
    short = np.repeat(np.arange(len(sizes)), np.maximum(minimum - sizes, 0))
    if not short.size:
        return 0
    # Level the largest clients down to the greatest common height that frees enough records. At height = minimum there
    # are always enough, because clients · minimum ≤ records.
    low, high = minimum, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        enough = np.maximum(sizes - middle, 0).sum() >= short.size
        low, high = (middle, high) if enough else (low, middle - 1)
    order = random.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = np.flatnonzero(rank >= low)
    owner[random.permutation(spare)[: short.size]] = short
    return int(short.size)


def shards(
    labels: npt.NDArray[np.generic], clients: int, each: int, most: int | None, random: np.random.Generator
) -> Parts:
    """Records sorted by label, cut into ``clients · each`` equal shards, ``each`` shards dealt to every client.

    Equal shards may straddle two classes, so that a client can hold more than ``each`` classes. ``most`` forbids it:
    shards are then swapped at random between clients until nobody holds more than ``most`` classes.
    """
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise BadInput(f"data.shards is {each!r}: the number of shards per client must be a whole number ≥ 1")
    total = clients * each
    if total > len(labels):
        raise BadInput(f"{total} shards of {len(labels)} records: use fewer clients or fewer shards each")
    order = random.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    pieces = _cut(order, equal_sizes(len(labels), total))
    hands = random.permutation(total).reshape(clients, each)
    if most is not None:
        _swap_until(hands, [frozenset(labels[piece].tolist()) for piece in pieces], most, random)
    return [np.concatenate([pieces[k] for k in hand]) for hand in hands]


def _swap_until(hands: Index, held: Sequence[frozenset[object]], most: int, random: np.random.Generator) -> None:
    """Swap shards (in place) while some hand holds more than ``most`` classes; give up with an explanation."""
    clients, each = hands.shape

    def excess(hand: Index) -> int:
        return max(0, len(frozenset().union(*(held[k] for k in hand))) - most)

    over = np.array([excess(hand) for hand in hands])
    for _ in range(200 * clients * each):
        if not over.any():
            return
        first = int(random.choice(np.flatnonzero(over)))
        second = int(random.integers(clients))
        one, two = random.integers(each, size=2)
        before = over[first] + over[second]
        hands[first, one], hands[second, two] = hands[second, two], hands[first, one]
        after = (excess(hands[first]), excess(hands[second]))
        if first != second and sum(after) <= before:
            over[[first, second]] = after
        else:
            hands[first, one], hands[second, two] = hands[second, two], hands[first, one]
    raise BadInput(
        f"no deal of {each} shards each with at most {most} classes a client was found: "
        "shards that straddle two classes make it impossible; use more shards each, or a larger max_classes"
    )


def split(parts: Parts, share: float, random: np.random.Generator) -> tuple[Parts, Parts]:
    """Shuffle each client's records and set aside round(share · n) of them for testing, always leaving one to train."""
    if not 0 <= share < 1:
        raise BadInput(f"data.test is {share!r}: the test share must be at least 0 and below 1")
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    held = np.minimum(np.floor(sizes * share + 0.5).astype(np.int64), sizes - 1)
    records = np.concatenate(parts)
    owner = np.repeat(np.arange(len(parts)), sizes)
    order = random.permutation(len(records))
    order = order[np.argsort(owner[order], kind="stable")]
    pieces = _cut(records[order], np.column_stack([held, sizes - held]).ravel())
    return pieces[1::2], pieces[0::2]


def _cut(order: npt.NDArray[np.integer], sizes: Index) -> Parts:
    """Consecutive runs of ``order`` of the given sizes."""
    return np.split(order.astype(np.int64, copy=False), np.cumsum(sizes)[:-1])
