"""Triton kernels for convolutions of stacked rows. Channels last, float32, no patches in memory.

A stack is as in :mod:`kernels`. Images stand in frames of zeros, so that no window is cut off and no kernel asks what
lies outside. Products run on tensor cores, by default as three TF32 products each, which keeps float32's accuracy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _held(x):  # type: ignore[no-untyped-def]
    """What TF32 holds of x: rounded to ten binary digits behind the first."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def added(total, left, right):  # type: ignore[no-untyped-def]
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
    BIAS: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr, LONG: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[record, p, o] = Σ_{tap, c} x[record, p at tap, c]·weight[row, o, tap, c] (+ bias): an implicit product.

    x comes in its frame of zeros, so that a kernel never leaves it, and weights as ``arrange`` left them.
    ``POOL`` > 1: instead of the output, the largest of every POOL × POOL window, rectified, and which it was; with
    ``FIRST`` the largest are written with channels first, as what flattens them wants. ``LONG``: a row's frames have
    more numbers than 32 bits count.
    """
    row = tl.program_id(0)
    positions: tl.constexpr = (OUT_HIGH // POOL) * (OUT_WIDE // POOL) * POOL * POOL
    depth: tl.constexpr = KH * KW * CHANNELS
    first = tl.program_id(1) * BLOCK
    limit = tl.load(lengths + row) * positions
    if first < limit:
        place = first + tl.arange(0, BLOCK)
        spot = tl.minimum(place, limit - 1)  # those behind the last read what it reads, and are not written
        if LONG:
            spot = spot.to(tl.int64)
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
            if SPLIT:  # as ``added`` does, with one side split before
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
    BIAS: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr, LONG: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
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
        if LONG:
            spot = spot.to(tl.int64)
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
            total = added(total, slope, values)
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
