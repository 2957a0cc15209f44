"""Triton kernels for convolutions, pooling and sums over stacked rows. Channels last, float32, no patches in memory.

A stack has ``rows`` rows of ``width`` records; ``lengths[row]`` says how many of them count (the rest is padding at the
end, which no kernel computes and nobody may read). Products run on tensor cores, by default as three TF32 products
each, which keeps float32's accuracy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _held(x):  # type: ignore[no-untyped-def]
    """What TF32 holds of x: rounded to ten binary digits behind the first."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def _added(total, left, right):  # type: ignore[no-untyped-def]
    """total + left·right: both are split into what TF32 holds and the rest, and three products are added.

    Left out is the product of the rests, below 2⁻²² of each term. The products' own sum begins at 0, for tensor cores
    round what they add up towards 0, which shows in a long sum. Triton's way to the same also looks for NaN in it every
    time, which takes as long as the products of so few terms; what is not finite is not finite here either.
    """
    first, second = _held(left), _held(right)
    part = tl.dot(left - first, second, input_precision="tf32")
    part = tl.dot(first, right - second, part, input_precision="tf32")
    return total + tl.dot(first, second, part, input_precision="tf32")


@triton.jit  # type: ignore[untyped-decorator]
def arrange(  # type: ignore[no-untyped-def]
    weight, first, rest, weight_row,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BACK: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernels ``weight[row, o, c, tap]`` as ``first[row, o, tap, c]``, as ``convolve`` wants them.

    ``BACK``: as ``first[row, c, tap, o]`` with taps in reverse, for the way back. ``SPLIT``: first is what TF32 holds
    of them, and rest is the rest.
    """
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = OUTPUTS * CHANNELS * TAPS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if BACK:
        o, tap, c = at % OUTPUTS, TAPS - 1 - at // OUTPUTS % TAPS, at // (OUTPUTS * TAPS)
    else:
        o, tap, c = at // (CHANNELS * TAPS), at // CHANNELS % TAPS, at % CHANNELS
    value = tl.load(weight + row * weight_row + (o * CHANNELS + c) * TAPS + tap, mask=at < size, other=0.0)
    if SPLIT:
        held = _held(value)
        tl.store(rest + row * size + at, value - held, mask=at < size)
        value = held
    tl.store(first + row * size + at, value, mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def frame(  # type: ignore[no-untyped-def]
    x, taken, out, lengths, width, record_step, channel_step, row_step, column_step,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, POOL: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Images in a frame of zeros, channels last: out[record, top + SH·i, left + SW·j, c] = x[record, c, i, j].

    ``POOL`` > 1: x[…, i // POOL, j // POOL] where ``taken`` says that it was the largest of its window there, else 0.
    """
    record = tl.program_id(0).to(tl.int64)
    row = record // width
    if record - row * width < tl.load(lengths + row):
        size: tl.constexpr = TALL * BROAD * CHANNELS
        base = x + record * record_step
        picks = taken + record * ((HIGH // POOL) * (WIDE // POOL) * CHANNELS)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            c, place = at % CHANNELS, at // CHANNELS
            high, wide = place // BROAD - TOP, place % BROAD - LEFT
            inside = (at < size) & (high >= 0) & (wide >= 0)
            if SH > 1 or SW > 1:
                inside = inside & (high % SH == 0) & (wide % SW == 0)
                high, wide = high // SH, wide // SW
            top, side = high // POOL, wide // POOL
            inside = inside & (top < HIGH // POOL) & (side < WIDE // POOL)
            if POOL > 1:
                chosen = tl.load(picks + (top * (WIDE // POOL) + side) * CHANNELS + c, mask=inside, other=255)
                inside = inside & (chosen.to(tl.int32) == high % POOL * POOL + wide % POOL)
            source = base + (c * channel_step + top * row_step + side * column_step)
            tl.store(out + record * size + at, tl.load(source, mask=inside, other=0.0), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, rest, bias, out, taken, lengths, width, bias_row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BIAS: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[record, p, o] = Σ_{tap, c} x[record, p at tap, c]·weight[row, o, tap, c] (+ bias): an implicit product.

    x comes in its frame of zeros, so that a kernel never leaves it, and weights as ``arrange`` left them.
    ``POOL`` > 1: instead of the output, the largest of every POOL × POOL window, rectified, and which it was; with
    ``FIRST`` the largest are written with channels first, as what flattens them wants.
    """
    row = tl.program_id(0)
    positions: tl.constexpr = (OUT_HIGH // POOL) * (OUT_WIDE // POOL) * POOL * POOL
    depth: tl.constexpr = KH * KW * CHANNELS
    first = tl.program_id(1) * BLOCK
    limit = tl.load(lengths + row) * positions
    if first < limit:
        place = first + tl.arange(0, BLOCK)
        spot = tl.minimum(place, limit - 1)  # those behind the last read what it reads, and are not written
        window, inner = spot % positions // (POOL * POOL), spot % (POOL * POOL)
        high = window // (OUT_WIDE // POOL) * POOL + inner // POOL
        wide = window % (OUT_WIDE // POOL) * POOL + inner % POOL
        corner = (spot // positions * (HIGH * WIDE) + high * (SH * WIDE) + wide * SW) * CHANNELS
        o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
        base = x + row.to(tl.int64) * width * (HIGH * WIDE * CHANNELS)
        kernels = row.to(tl.int64) * (OUTPUTS * depth)
        total = tl.zeros((BLOCK, BLOCK_O), dtype=tl.float32)
        for start in range(0, depth, BLOCK_C):
            k = start + tl.arange(0, BLOCK_C)
            offset = (k // CHANNELS // KW * (DH * WIDE) + k // CHANNELS % KW * DW) * CHANNELS + k % CHANNELS
            at, real = kernels + (o[None, :] * depth + k[:, None]), (o < OUTPUTS)[None, :]
            if depth % BLOCK_C == 0:
                values = tl.load(base + (corner[:, None] + offset[None, :]))
            else:
                values = tl.load(base + (corner[:, None] + offset[None, :]), mask=(k < depth)[None, :], other=0.0)
                real = real & (k < depth)[:, None]
            kernel = tl.load(weight + at, mask=real, other=0.0)
            if SPLIT:  # as ``_added`` does, with one side split before
                less = tl.load(rest + at, mask=real, other=0.0)
                held = _held(values)
                part = tl.dot(values - held, kernel, input_precision="tf32")
                part = tl.dot(held, less, part, input_precision="tf32")
                total += tl.dot(held, kernel, part, input_precision="tf32")
            else:
                total = tl.dot(values, kernel, total, input_precision="tf32")
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
            where = (row.to(tl.int64) * width * positions + place)[:, None] * OUTPUTS + o[None, :]
            tl.store(out + where, total, mask=(place < limit)[:, None] & (o < OUTPUTS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def convolve_few(  # type: ignore[no-untyped-def]
    x, weight, bias, out, taken, lengths, width, bias_row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BIAS: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """``convolve`` where a kernel has too few numbers to fill a tensor core: plain products of ``weight[row, k, o]``.

    All positions of a window are one program's, and what they see in common is read once.
    """
    row = tl.program_id(0)
    across: tl.constexpr = OUT_WIDE // POOL
    windows: tl.constexpr = (OUT_HIGH // POOL) * across
    depth: tl.constexpr = KH * KW * CHANNELS
    first = tl.program_id(1) * BLOCK
    limit = tl.load(lengths + row) * windows
    if first < limit:
        place = first + tl.arange(0, BLOCK)
        spot = tl.minimum(place, limit - 1)
        high, wide = spot % windows // across * POOL, spot % windows % across * POOL
        corner = (spot // windows * (HIGH * WIDE) + high * (SH * WIDE) + wide * SW) * CHANNELS
        base = x + row.to(tl.int64) * width * (HIGH * WIDE * CHANNELS)
        o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
        kernels = weight + row.to(tl.int64) * (OUTPUTS * depth) + o
        shift = tl.zeros((BLOCK_O,), dtype=tl.float32)
        if BIAS:
            shift = tl.load(bias + row.to(tl.int64) * bias_row + o, mask=o < OUTPUTS, other=0.0)
        best = tl.zeros((BLOCK, BLOCK_O), dtype=tl.float32)
        tap_of = tl.full((BLOCK, BLOCK_O), 255, dtype=tl.int32)
        for inner in tl.static_range(POOL * POOL):
            total = tl.zeros((BLOCK, BLOCK_O), dtype=tl.float32) + shift[None, :]
            for k in tl.static_range(depth):
                top, side = inner // POOL * SH + k // CHANNELS // KW * DH, inner % POOL * SW + k // CHANNELS % KW * DW
                values = tl.load(base + corner + ((top * WIDE + side) * CHANNELS + k % CHANNELS))
                kernel = tl.load(kernels + k * OUTPUTS, mask=o < OUTPUTS, other=0.0)
                total += values[:, None] * kernel[None, :]
            if POOL > 1:
                larger = (total > best) | (total != total)
                best, tap_of = tl.where(larger, total, best), tl.where(larger, inner, tap_of)
            else:
                best = total
        inside = (place < limit)[:, None] & (o < OUTPUTS)[None, :]
        where = (row.to(tl.int64) * width * windows + place)[:, None] * OUTPUTS + o[None, :]
        if POOL > 1:
            tl.store(taken + where, tap_of.to(tl.uint8), mask=inside)
        if FIRST:
            record = row.to(tl.int64) * width + place // windows
            where = (record[:, None] * OUTPUTS + o[None, :]) * windows + (place % windows)[:, None]
        tl.store(out + where, best, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def record_gradients(  # type: ignore[no-untyped-def]
    x, dy, grads, shifts, squares, lengths, width,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grads[record, o, tap, c] = Σ_p dy[record, p, o]·x[record, p at tap, c], shifts = Σ_p dy, and squared norms.

    x comes in its frame of zeros, dy as ``dy[record, TOP + ROW_STEP·i, LEFT + COLUMN_STEP·j, o]`` in one of its own.
    ``squares[record, block]`` are the squared norms of each block of gradients, those of a bias with the first.
    """
    depth: tl.constexpr = KH * KW * CHANNELS
    blocks_k: tl.constexpr = (depth + BLOCK_K - 1) // BLOCK_K
    blocks: tl.constexpr = blocks_k * ((OUTPUTS + BLOCK_O - 1) // BLOCK_O)
    record, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row = record // width
    if record - row * width < tl.load(lengths + row):
        k = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
        o = block // blocks_k * BLOCK_O + tl.arange(0, BLOCK_O)
        seen = k
        if CHANNELS % 4 != 0:  # numbers are read one by one: cheaper where none is left out
            seen = tl.minimum(k, depth - 1)
        offset = (seen // CHANNELS // KW * DH * WIDE + seen // CHANNELS % KW * DW) * CHANNELS + seen % CHANNELS
        inside = k < depth
        base = x + record * (HIGH * WIDE * CHANNELS)
        slopes = dy + record * (TALL * BROAD * OUTPUTS)
        total = tl.zeros((BLOCK_O, BLOCK_K), dtype=tl.float32)
        slopes_of = tl.zeros((BLOCK_O, BLOCK), dtype=tl.float32)
        for start in range(0, OUT_HIGH * OUT_WIDE, BLOCK):
            p = start + tl.arange(0, BLOCK)
            spot = tl.minimum(p, OUT_HIGH * OUT_WIDE - 1)
            high, wide = spot // OUT_WIDE, spot % OUT_WIDE
            where = ((high * ROW_STEP + TOP) * BROAD + wide * COLUMN_STEP + LEFT)[None, :] * OUTPUTS + o[:, None]
            mine = (p < OUT_HIGH * OUT_WIDE)[None, :] & (o < OUTPUTS)[:, None]
            slope = tl.load(slopes + where, mask=mine, other=0.0)
            slopes_of += slope
            corner = (high * SH * WIDE + wide * SW) * CHANNELS
            if depth % BLOCK_K == 0 or CHANNELS % 4 != 0:
                values = tl.load(base + (corner[:, None] + offset[None, :]))
            else:
                values = tl.load(base + (corner[:, None] + offset[None, :]), mask=inside[None, :], other=0.0)
            total = _added(total, slope, values)
        total = tl.where(inside[None, :], total, 0.0)
        where = record * (OUTPUTS * depth) + o[:, None] * depth + k[None, :]
        tl.store(grads + where, total, mask=(o < OUTPUTS)[:, None] & inside[None, :])
        square = tl.sum(total * total)
        if BIAS and block % blocks_k == 0:
            shift = tl.sum(slopes_of, 1)
            tl.store(shifts + record * OUTPUTS + o, shift, mask=o < OUTPUTS)
            square += tl.sum(shift * shift)
        tl.store(squares + record * blocks + block, square)


@triton.jit  # type: ignore[untyped-decorator]
def pooled_gradients(  # type: ignore[no-untyped-def]
    x, dy, taken, grads, shifts, squares, lengths, width,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``record_gradients`` where dy[record, window, o] belongs to one position of each window, which ``taken`` names.

    Only these are multiplied, one in POOL², each with what the kernel sees from where it was. An input that is not
    finite shows in ``squares`` all the same, as it would if products with zero were made.
    """
    depth: tl.constexpr = KH * KW * CHANNELS
    across: tl.constexpr = OUT_WIDE // POOL
    windows: tl.constexpr = OUT_HIGH // POOL * across
    blocks_k: tl.constexpr = (depth + BLOCK_K - 1) // BLOCK_K
    blocks: tl.constexpr = blocks_k * ((OUTPUTS + BLOCK_O - 1) // BLOCK_O)
    record, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row = record // width
    if record - row * width < tl.load(lengths + row):
        k = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
        o = block // blocks_k * BLOCK_O + tl.arange(0, BLOCK_O)
        seen = tl.minimum(k, depth - 1)
        offset = (seen // CHANNELS // KW * DH * WIDE + seen // CHANNELS % KW * DW) * CHANNELS + seen % CHANNELS
        base = x + record * (HIGH * WIDE * CHANNELS)
        total = tl.zeros((BLOCK, BLOCK_O, BLOCK_K), dtype=tl.float32)
        slopes_of = tl.zeros((BLOCK, BLOCK_O), dtype=tl.float32)
        for start in range(0, windows, BLOCK):
            window = start + tl.arange(0, BLOCK)
            where = record * (windows * OUTPUTS) + window[:, None] * OUTPUTS + o[None, :]
            mine = (window < windows)[:, None] & (o < OUTPUTS)[None, :]
            inner = tl.load(taken + where, mask=mine, other=255).to(tl.int32)
            slope = tl.load(dy + where, mask=mine & (inner < 255), other=0.0)
            inner = tl.where(inner < 255, inner, 0)
            window = tl.minimum(window, windows - 1)
            high = (window // across * POOL)[:, None] + inner // POOL
            wide = (window % across * POOL)[:, None] + inner % POOL
            corner = (high * SH * WIDE + wide * SW) * CHANNELS
            slopes_of += slope
            total += slope[:, :, None] * tl.load(base + (corner[:, :, None] + offset[None, None, :]))
        found = tl.where((k < depth)[None, :], tl.sum(total, 0), 0.0)
        where = record * (OUTPUTS * depth) + o[:, None] * depth + k[None, :]
        tl.store(grads + where, found, mask=(o < OUTPUTS)[:, None] & (k < depth)[None, :])
        square = tl.sum(found * found)
        if BIAS and block % blocks_k == 0:
            shift = tl.sum(slopes_of, 0)
            tl.store(shifts + record * OUTPUTS + o, shift, mask=o < OUTPUTS)
            square += tl.sum(shift * shift)
        if block == 0:
            for start in range(0, HIGH * WIDE * CHANNELS, 256):
                at = start + tl.arange(0, 256)
                value = tl.load(base + at, mask=at < HIGH * WIDE * CHANNELS, other=0.0)
                finite = tl.min((tl.abs(value) < float("inf")).to(tl.int32), 0)
                square = tl.where(finite > 0, square, float("inf"))
        tl.store(squares + record * blocks + block, square)


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
        total = _added(total, slope * factor[None, :], values)
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
