// Rows of a convolution, output channels in the lanes of vectors, and the largest of their windows.

#pragma once

#include "vectors.h"

// POSITIONS neighbours x LANES*VECTORS output channels; STEP numbers from one to the next, where it is known.
template <int POSITIONS, int VECTORS, int STEP>
static void tile(const Shape& s, const float* seen, const float* kernels, const float* bias, float* out) {
    const int64_t lanes = s.lanes(), run = s.run(), wide = s.padded_w();
    const int64_t step = STEP ? STEP : s.stride_w * s.channels;
    Vec sums[POSITIONS][VECTORS];
#pragma GCC unroll 32
    for (int t = 0; t < POSITIONS; t++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums[t][v] = load(bias + v * LANES);
    for (int64_t row = 0; row < s.kernel_h; row++)
        for (int64_t r = 0; r < run; r++) {
            asm("" ::: "memory");  // what neighbours share is loaded again: registers are for the sums
            const float* from = seen + row * wide + r;
            const float* weights = kernels + (row * run + r) * lanes;
            Vec own[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) own[v] = load(weights + v * LANES);
#pragma GCC unroll 32
            for (int t = 0; t < POSITIONS; t++) {
                const Vec value = all(from[t * step]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) sums[t][v] += value * own[v];
            }
        }
#pragma GCC unroll 32
    for (int t = 0; t < POSITIONS; t++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(out + t * lanes + v * LANES, sums[t][v]);
}

typedef void (*Tile)(const Shape&, const float*, const float*, const float*, float*);

template <int VECTORS, int STEP, int... SIZES>
static Tile tile_of(int64_t size, std::integer_sequence<int, SIZES...>) {
    static const Tile all_of[] = {tile<SIZES + 1, VECTORS, STEP>...};
    return all_of[size - 1];
}

// One row of the convolution's output, count positions, all channels.
static void convolve_row(const Shape& s, const float* seen, const float* kernels, const float* bias, int64_t count,
                         float* out) {
    const int64_t lanes = s.lanes(), step = s.stride_w * s.channels;
    for (int64_t o = 0; o < lanes; o += 2 * LANES) {
        const bool two = o + LANES < lanes, dense = !two && step == 1;
        const int64_t tiles = (count - 1) / (dense ? LONG_TILE : TILE) + 1;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t from = count * t / tiles, size = count * (t + 1) / tiles - from;
            const Tile own = dense ? tile_of<1, 1>(size, std::make_integer_sequence<int, LONG_TILE>())
                             : two ? tile_of<2, 0>(size, std::make_integer_sequence<int, TILE>())
                                   : tile_of<1, 0>(size, std::make_integer_sequence<int, TILE>());
            own(s, seen + from * step, kernels + o, bias + o, out + from * lanes + o);
        }
    }
}

// The largest of every window of p rows, rectified, and which: 255 where it is not above 0 and nothing goes back.
static void pool_rows(const Shape& s, const float* rows, float* out, uint8_t* taken) {
    const int64_t lanes = s.lanes(), p = s.pool, wide = s.out_w * p * lanes;
    for (int64_t x = 0; x < s.out_w; x++)
        for (int64_t o = 0; o < s.outputs; o += LANES) {
            const float* from = rows + x * p * lanes + o;
            Vec best = load(from);
            Ints which = {};
            for (int64_t k = 1; k < p * p; k++) {
                const Vec value = load(from + k / p * wide + k % p * lanes);
                const Ints larger = (value > best) | (value != value);
                best = larger ? value : best;
                which = larger ? Ints{} + static_cast<int32_t>(k) : which;
            }
            const Ints dead = best <= 0;
            best = dead ? Vec{} : best;
            const Bytes bytes = __builtin_convertvector(dead ? Ints{} + 255 : which, Bytes);
            const int64_t count = s.outputs - o < LANES ? s.outputs - o : LANES;
            if (count == LANES) {
                store(out + x * s.outputs + o, best);
                memcpy(taken + x * s.outputs + o, &bytes, LANES);
            } else {
                memcpy(out + x * s.outputs + o, &best, 4 * count);
                memcpy(taken + x * s.outputs + o, &bytes, count);
            }
        }
}
