"""Triton kernels for convolutions, pooling and sums over stacked rows. Channels last, float32, no patches in memory.

A stack has ``rows`` rows of ``width`` records; ``lengths[row]`` says how many of them count (the rest is padding at the
end, which no kernel computes and nobody may read). Products run on tensor cores, by default as three TF32 products
each, which keeps float32's accuracy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _added(total, left, right, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + left·right. "tf32x3": both are split into what TF32 holds and the rest, and three products are added.

    Left out is the product of the rests, below 2⁻²² of each term. The products' own sum begins at 0, for tensor cores
    round what they add up towards 0, which shows in a long sum. Triton's way to the same also looks for NaN in it every
    time, which takes as long as the products of so few terms; what is not finite is not finite here either.
    """
    if PRECISION == "tf32x3":
        first = ((left.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        second = ((right.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        part = tl.dot(left - first, second, input_precision="tf32")
        part = tl.dot(first, right - second, part, input_precision="tf32")
        return total + tl.dot(first, second, part, input_precision="tf32")
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, bias, out, taken, lengths, width, weight_row, bias_row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BIAS: tl.constexpr, BACK: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[record, p, o] = Σ_{tap, c} x[record, p at tap, c]·weight[row, o, tap, c] (+ bias): an implicit product.

    ``BACK``: the adjoint. x is the output's gradient and "p at tap" the place whose window has p at that tap.
    ``POOL`` > 1: instead of the output, the largest of every POOL × POOL window, rectified, and which it was; with
    ``FIRST`` the largest are written with channels first, as what flattens them wants.
    """
    row = tl.program_id(0)
    positions: tl.constexpr = (OUT_HIGH // POOL) * (OUT_WIDE // POOL) * POOL * POOL
    first = tl.program_id(1) * BLOCK
    limit = tl.load(lengths + row) * positions
    if first < limit:
        place = first + tl.arange(0, BLOCK)
        alive = place < limit
        record = row.to(tl.int64) * width + place // positions
        window, inner = place % positions // (POOL * POOL), place % (POOL * POOL)
        high = window // (OUT_WIDE // POOL) * POOL + inner // POOL
        wide = window % (OUT_WIDE // POOL) * POOL + inner % POOL
        o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
        base = x + record * (HIGH * WIDE * CHANNELS)
        kernels = weight + row.to(tl.int64) * weight_row
        total = tl.zeros((BLOCK, BLOCK_O), dtype=tl.float32)
        if CHANNELS >= 16:
            pieces: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
            for index in range(KH * KW * pieces):  # one loop, so that loads run ahead of products
                tap, c = index // pieces, index % pieces * BLOCK_C + tl.arange(0, BLOCK_C)
                up, left = tap // KW, tap % KW
                if BACK:
                    top, side = high + PH - up * DH, wide + PW - left * DW
                    seen = alive & (top % SH == 0) & (side % SW == 0)
                    top, side = top // SH, side // SW
                else:
                    top, side = high * SH - PH + up * DH, wide * SW - PW + left * DW
                    seen = alive
                seen = seen & (top >= 0) & (top < HIGH) & (side >= 0) & (side < WIDE)
                at = base + (top * WIDE + side) * CHANNELS
                values = tl.load(at[:, None] + c[None, :], mask=seen[:, None] & (c < CHANNELS)[None, :], other=0.0)
                kernel = tl.load(
                    kernels + (o * (KH * KW) + tap)[None, :] * CHANNELS + c[:, None],
                    mask=(o < OUTPUTS)[None, :] & (c < CHANNELS)[:, None],
                    other=0.0,
                )
                total = _added(total, values, kernel, PRECISION)
        elif KH * KW * CHANNELS <= BLOCK_C and not BACK:  # too little to fill a tensor core: plain products
            for k in tl.static_range(KH * KW * CHANNELS):
                tap = k // CHANNELS
                top, side = high * SH - PH + tap // KW * DH, wide * SW - PW + tap % KW * DW
                seen = alive & (top >= 0) & (top < HIGH) & (side >= 0) & (side < WIDE)
                values = tl.load(base + (top * WIDE + side) * CHANNELS + k % CHANNELS, mask=seen, other=0.0)
                kernel = tl.load(kernels + o * (KH * KW * CHANNELS) + k, mask=o < OUTPUTS, other=0.0)
                total += values[:, None] * kernel[None, :]
        else:
            for start in range(0, KH * KW * CHANNELS, BLOCK_C):
                k = start + tl.arange(0, BLOCK_C)
                tap, c = k // CHANNELS, k % CHANNELS
                up, left = tap // KW, tap % KW
                if BACK:
                    top, side = high[:, None] + PH - up[None, :] * DH, wide[:, None] + PW - left[None, :] * DW
                    seen = alive[:, None] & (top % SH == 0) & (side % SW == 0)
                    top, side = top // SH, side // SW
                else:
                    top = high[:, None] * SH - PH + up[None, :] * DH
                    side = wide[:, None] * SW - PW + left[None, :] * DW
                    seen = alive[:, None]
                seen = seen & (top >= 0) & (top < HIGH) & (side >= 0) & (side < WIDE)
                seen = seen & (k < KH * KW * CHANNELS)[None, :]
                values = tl.load(base[:, None] + (top * WIDE + side) * CHANNELS + c[None, :], mask=seen, other=0.0)
                kernel = tl.load(
                    kernels + o[None, :] * (KH * KW * CHANNELS) + k[:, None],
                    mask=(o < OUTPUTS)[None, :] & (k < KH * KW * CHANNELS)[:, None],
                    other=0.0,
                )
                total = _added(total, values, kernel, PRECISION)
        if BIAS:
            shift = tl.load(bias + row.to(tl.int64) * bias_row + o, mask=o < OUTPUTS, other=0.0)
            total += shift[None, :]
        if POOL > 1:
            windows: tl.constexpr = BLOCK // (POOL * POOL)
            each = tl.reshape(total, (windows, POOL * POOL, BLOCK_O))
            broken = tl.max((each != each).to(tl.int32), axis=1) > 0
            best, tap_of = tl.max(tl.where(each != each, 0.0, each), axis=1, return_indices=True)
            positive = best > 0
            best = tl.where(broken, float("nan"), tl.where(positive, best, 0.0))
            tap_of = tl.where(positive, tap_of, 255)
            whole: tl.constexpr = positions // (POOL * POOL)
            at = first // (POOL * POOL) + tl.arange(0, windows)
            where = (row.to(tl.int64) * width * whole + at)[:, None] * OUTPUTS + o[None, :]
            inside = (at * (POOL * POOL) < limit)[:, None] & (o < OUTPUTS)[None, :]
            tl.store(taken + where, tap_of.to(tl.uint8), mask=inside)
            if FIRST:
                record = row.to(tl.int64) * width + at // whole
                where = (record[:, None] * OUTPUTS + o[None, :]) * whole + (at % whole)[:, None]
            tl.store(out + where, best, mask=inside)
        else:
            where = (record * positions + place % positions)[:, None] * OUTPUTS + o[None, :]
            tl.store(out + where, total, mask=alive[:, None] & (o < OUTPUTS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def record_gradients(  # type: ignore[no-untyped-def]
    padded, dy, taken, grads, shifts, squares, lengths, width,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grads[record, o, tap, c] = Σ_p dy[record, p, o]·x[record, p at tap, c], shifts = Σ_p dy, and squared norms.

    ``squares[record, block]`` are the squared norms of each block of gradients, those of a bias with the first.
    ``POOL`` > 1: dy belongs to the largest of every POOL × POOL window, ``taken`` says which that was.
    """
    record = tl.program_id(0).to(tl.int64)
    row = record // width
    if record - row * width < tl.load(lengths + row):
        taps: tl.constexpr = KH * KW
        across: tl.constexpr = OUT_WIDE // POOL
        windows: tl.constexpr = OUT_HIGH // POOL * across
        k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
        offset = (k // CHANNELS // KW * DH * WIDE + k // CHANNELS % KW * DW) * CHANNELS + k % CHANNELS
        inside = k < taps * CHANNELS
        base = padded + record * (HIGH * WIDE * CHANNELS)
        slopes = record * (windows * OUTPUTS)
        total = tl.zeros((BLOCK_O, BLOCK_K), dtype=tl.float32)
        slopes_of = tl.zeros((BLOCK_O, BLOCK), dtype=tl.float32)
        for start in range(0, windows * POOL * POOL, BLOCK):
            p = start + tl.arange(0, BLOCK)  # a window's positions one after the other
            window, inner = p // (POOL * POOL), p % (POOL * POOL)
            real = window < windows
            where = slopes + window[None, :] * OUTPUTS + o[:, None]
            mine = real[None, :] & (o < OUTPUTS)[:, None]
            slope = tl.load(dy + where, mask=mine, other=0.0)
            if POOL > 1:
                chosen = tl.load(taken + where, mask=mine, other=255).to(tl.int32)
                slope = tl.where(chosen == inner[None, :], slope, 0.0)
            slopes_of += slope
            high, wide = window // across * POOL + inner // POOL, window % across * POOL + inner % POOL
            at = (high * SH * WIDE + wide * SW) * CHANNELS
            values = tl.load(base + at[:, None] + offset[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            total = _added(total, slope, values, PRECISION)
        where = record * (OUTPUTS * CHANNELS * taps) + o[:, None] * (CHANNELS * taps) + k[None, :]
        tl.store(grads + where, total, mask=(o < OUTPUTS)[:, None] & inside[None, :])
        square = tl.sum(total * total)
        if BIAS and tl.program_id(1) == 0:
            shift = tl.sum(slopes_of, 1)
            tl.store(shifts + record * OUTPUTS + o, shift, mask=o < OUTPUTS)
            square += tl.sum(shift * shift)
        block = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        tl.store(squares + record * (tl.num_programs(1) * tl.num_programs(2)) + block, square)


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
def pad(  # type: ignore[no-untyped-def]
    x, out, total, HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Images with channels last, between PH rows and PW columns of zeros on every side."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, place = at % CHANNELS, at // CHANNELS
    side, top = place % (WIDE + 2 * PW) - PW, place // (WIDE + 2 * PW) % (HIGH + 2 * PH) - PH
    record = place // ((WIDE + 2 * PW) * (HIGH + 2 * PH))
    inside = (at < total) & (top >= 0) & (top < HIGH) & (side >= 0) & (side < WIDE)
    value = tl.load(x + ((record * HIGH + top) * WIDE + side) * CHANNELS + c, mask=inside, other=0.0)
    tl.store(out + at, value, mask=at < total)


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
        total = _added(total, slope * factor[None, :], values, "tf32x3")
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
