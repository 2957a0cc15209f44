"""Triton kernels for pooling, losses, norms and sums over stacked rows. Float32, images with channels last.

A stack has ``rows`` rows of ``width`` records; ``lengths[row]`` says how many of them count (the rest is padding at the
end, which no kernel computes and nobody may read). Convolutions are in :mod:`convolving`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sordino.client.gradients.convolving import added


@triton.jit  # type: ignore[untyped-decorator]
def weighted_sum(  # type: ignore[no-untyped-def]
    factors, values, out, width, size, out_row,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, RECORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, p] = Σ_j factors[row, j]·values[row, j, p]; a record with factor 0 is not even read.

    Values come as ``[…, TAPS, CHANNELS]`` and leave as ``[…, CHANNELS, TAPS]``.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((RECORDS, BLOCK), dtype=tl.float32)
    for start in range(0, width, RECORDS):
        j = start + tl.arange(0, RECORDS)
        factor = tl.load(factors + row * width + j, mask=j < width, other=0.0)
        read = (factor != 0.0)[:, None] & (p < size)[None, :]
        at = (row * width + j)[:, None] * size + p[None, :]
        total += factor[:, None] * tl.load(values + at, mask=read, other=0.0)
    inner = p % (TAPS * CHANNELS)
    turned = p - inner + inner % CHANNELS * TAPS + inner // CHANNELS
    tl.store(out + row * out_row + turned, tl.sum(total, 0), mask=p < size)


@triton.jit  # type: ignore[untyped-decorator]
def outer_squares(  # type: ignore[no-untyped-def]
    x, dy, squares, WIDE: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """squares[record] = ‖dy ⊗ x‖² = ‖x‖²·‖dy‖², plus ‖dy‖² where there is a bias; in float64: none vanishes."""
    record = tl.program_id(0).to(tl.int64)
    seen = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, WIDE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + record * WIDE + at, mask=at < WIDE, other=0.0).to(tl.float64)
        seen += value * value
    slope = tl.zeros((BLOCK_O,), dtype=tl.float64)
    for start in range(0, OUTPUTS, BLOCK_O):
        at = start + tl.arange(0, BLOCK_O)
        value = tl.load(dy + record * OUTPUTS + at, mask=at < OUTPUTS, other=0.0).to(tl.float64)
        slope += value * value
    tl.store(squares + record, (tl.sum(seen) + BIAS) * tl.sum(slope))


@triton.jit  # type: ignore[untyped-decorator]
def cross_entropy(  # type: ignore[no-untyped-def]
    outputs, y, losses, slopes, total, CLASSES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """losses[record] = −log softmax(outputs)[y]; slopes are softmax(outputs), less 1 at the label."""
    record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    inside = (record < total)[:, None] & (c < CLASSES)[None, :]
    at = record[:, None] * CLASSES + c[None, :]
    value = tl.where((c < CLASSES)[None, :], tl.load(outputs + at, mask=inside, other=0.0), float("-inf"))
    label = tl.load(y + record, mask=record < total, other=0)
    # What is not a number is no maximum here, and shows in the sum.
    largest = tl.max(tl.where(value == value, value, float("-inf")), 1)
    value -= tl.where(tl.abs(largest) < float("inf"), largest, 0.0)[:, None]
    power = tl.exp(value)
    whole = tl.sum(power, 1)
    own = tl.sum(tl.where(c[None, :] == label[:, None], value, 0.0), 1)
    tl.store(losses + record, tl.log(whole) - own, mask=record < total)
    slope = power / whole[:, None] - tl.where(c[None, :] == label[:, None], 1.0, 0.0)
    tl.store(slopes + at, slope, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pool_rectified(  # type: ignore[no-untyped-def]
    x, out, taken, total,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = max(0, largest x of the window), and the tap it came from (255 where that is not positive)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = at % CHANNELS
    place = at // CHANNELS
    wide, high = place % OUT_WIDE, place // OUT_WIDE % OUT_HIGH
    record = place // (OUT_WIDE * OUT_HIGH)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    tap_of = tl.full((BLOCK,), 255, dtype=tl.int32)
    for tap in tl.static_range(KH * KW):
        top, side = high * SH - PH + tap // KW * DH, wide * SW - PW + tap % KW * DW
        inside = (at < total) & (top >= 0) & (top < HIGH) & (side >= 0) & (side < WIDE)
        value = tl.load(x + ((record * HIGH + top) * WIDE + side) * CHANNELS + c, mask=inside, other=float("-inf"))
        larger = (value > best) | (value != value)
        best = tl.where(larger, value, best)
        tap_of = tl.where(larger, tap, tap_of)
    positive = (best > 0) | (best != best)
    tl.store(out + at, tl.where(positive, best, 0.0), mask=at < total)
    tl.store(taken + at, tl.where(positive, tap_of, 255).to(tl.uint8), mask=at < total)


@triton.jit  # type: ignore[untyped-decorator]
def pool_rectified_back(  # type: ignore[no-untyped-def]
    dy, taken, dx, total,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = Σ of dy over the windows that took their value here; ``FIRST``: dy has channels first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = at % CHANNELS
    place = at // CHANNELS
    wide, high = place % WIDE, place // WIDE % HIGH
    record = place // (WIDE * HIGH)
    slope = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(KH * KW):
        top, side = high + PH - tap // KW * DH, wide + PW - tap % KW * DW
        inside = (at < total) & (top >= 0) & (side >= 0) & (top % SH == 0) & (side % SW == 0)
        top, side = top // SH, side // SW
        inside = inside & (top < OUT_HIGH) & (side < OUT_WIDE)
        source = ((record * OUT_HIGH + top) * OUT_WIDE + side) * CHANNELS + c
        mine = inside & (tl.load(taken + source, mask=inside, other=255).to(tl.int32) == tap)
        if FIRST:
            source = ((record * CHANNELS + c) * OUT_HIGH + top) * OUT_WIDE + side
        slope += tl.load(dy + source, mask=mine, other=0.0)
    tl.store(dx + at, slope, mask=at < total)


@triton.jit  # type: ignore[untyped-decorator]
def weighted_outer(  # type: ignore[no-untyped-def]
    factors, dy, x, out, width, out_row,
    WIDE: tl.constexpr, OUTPUTS: tl.constexpr, RECORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ_j factors[row, j]·dy[row, j] ⊗ x[row, j]; a record with factor 0 is not even read."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((BLOCK_O, BLOCK), dtype=tl.float32)
    for start in range(0, width, RECORDS):
        j = start + tl.arange(0, RECORDS)
        factor = tl.load(factors + row * width + j, mask=j < width, other=0.0)
        record = row * width + j
        read = (factor != 0.0)[None, :] & (o < OUTPUTS)[:, None]
        slope = tl.load(dy + record[None, :] * OUTPUTS + o[:, None], mask=read, other=0.0)
        read = (factor != 0.0)[:, None] & (i < WIDE)[None, :]
        values = tl.load(x + record[:, None] * WIDE + i[None, :], mask=read, other=0.0)
        total = added(total, slope * factor[None, :], values)
    where = out + row * out_row + o[:, None] * WIDE + i[None, :]
    tl.store(where, total, mask=(o < OUTPUTS)[:, None] & (i < WIDE)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def lengths_of(  # type: ignore[no-untyped-def]
    loss, mask, excess, first, second, third, fourth, losses, norms, limits, usable, total, more, floor,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
    MASKED: tl.constexpr, EXCEEDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From squared norms in up to four groups of so many parts each: what ``types.Graded`` says of every record.

    ``more`` and ``floor`` are what rounding may add to a norm, a share of it and a constant.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    square = tl.zeros((BLOCK,), dtype=tl.float64)
    for part in range(FIRST):
        square += tl.load(first + at * FIRST + part, mask=inside, other=0.0).to(tl.float64)
    for part in range(SECOND):
        square += tl.load(second + at * SECOND + part, mask=inside, other=0.0).to(tl.float64)
    for part in range(THIRD):
        square += tl.load(third + at * THIRD + part, mask=inside, other=0.0).to(tl.float64)
    for part in range(FOURTH):
        square += tl.load(fourth + at * FOURTH + part, mask=inside, other=0.0).to(tl.float64)
    each = tl.load(loss + at, mask=inside, other=0.0)
    finite = tl.abs(each.to(tl.float64) + square) < float("inf")
    real = inside
    if MASKED:
        real = tl.load(mask + at, mask=inside, other=0).to(tl.int32) != 0
    norm = tl.sqrt(square)
    limit = norm * tl.load(more) + tl.load(floor)
    if EXCEEDS:
        limit += tl.load(excess + at, mask=inside, other=0.0)
    tl.store(losses + at, tl.where(real, each, 0.0), mask=inside)
    tl.store(norms + at, tl.where(real, tl.where(finite, norm, float("inf")), 0.0).to(tl.float32), mask=inside)
    tl.store(limits + at, tl.where(real, tl.where(finite, limit, float("inf")), 0.0), mask=inside)
    tl.store(usable + at, (finite & real).to(tl.uint8), mask=inside)
