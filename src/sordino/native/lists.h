// Sums over lists of numbers times what lies at their places, a block of rows and chunks of a kernel in registers.

#pragma once

#include "vectors.h"

// What of a row of a kernel lies in a vector: all lanes, fewer behind the row's end.
static inline int64_t lanes_left(int64_t run, int64_t chunk) {
    const int64_t left = run - chunk * LANES;
    return left < LANES ? left : LANES;
}

static inline Ints first_lanes(int64_t count) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < static_cast<int32_t>(count);
}

// A list of numbers, and of the places that each of them is multiplied with.
struct List {
    const float* values;
    const int32_t* places;
    int64_t count;
};

// held += value * (ROWS x CHUNKS vectors at its place), over a list.
template <int ROWS, int CHUNKS>
static inline __attribute__((always_inline)) void gather(List list, const float* from, int64_t stride,
                                                         Vec (&held)[ROWS][CHUNKS]) {
    for (int64_t e = 0; e < list.count; e++) {
        const Vec value = all(list.values[e]);
        const float* at = from + list.places[e];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            asm("" : "+r"(at));  // one pointer a row, not one a vector
#pragma GCC unroll 8
            for (int k = 0; k < CHUNKS; k++) held[r][k] += value * load(at + k * LANES);
            at += stride;
        }
    }
}

// Some rows and chunks of an output's gradient, written to `grads`; returns their squares.
template <int ROWS, int CHUNKS>
static double add_up(const Shape& s, List list, const float* from, int64_t chunk, float* grads) {
    const int64_t run = s.run();
    Vec held[ROWS][CHUNKS] = {}, part = {};
    gather<ROWS, CHUNKS>(list, from, s.padded_w(), held);
    const int64_t left = lanes_left(run, chunk + CHUNKS - 1);
    const Ints own = first_lanes(left);  // the rest are neighbours' numbers
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        held[r][CHUNKS - 1] = own ? held[r][CHUNKS - 1] : Vec{};
#pragma GCC unroll 8
        for (int k = 0; k < CHUNKS; k++) {
            part += held[r][k] * held[r][k];  // HELD squares a lane at most in float32, float64 beyond
            if (k + 1 < CHUNKS || left == LANES) store(grads + r * run + k * LANES, held[r][k]);
        }
        if (left < LANES)
            for (int64_t i = 0; i < left; i++) grads[r * run + (CHUNKS - 1) * LANES + i] = held[r][CHUNKS - 1][i];
    }
    return sum_of(part);
}

// Every position's list times some rows and chunks of the kernels, added to the padded gradient of the input.
template <int ROWS, int CHUNKS>
static void spread(const Shape& s, List all_of, const int32_t* ends, const int32_t* places, int64_t positions,
                   const float* kernels, float* padded) {
    const int64_t wide = s.padded_w(), stride = s.chunks() * LANES;
    int64_t start = 0;
    for (int64_t p = 0; p < positions; p++) {
        if (ends[p] == start) continue;
        float* to = padded + places[p];
        Vec held[ROWS][CHUNKS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int k = 0; k < CHUNKS; k++) held[r][k] = load(to + r * wide + k * LANES);
        gather<ROWS, CHUNKS>({all_of.values + start, all_of.places + start, ends[p] - start}, kernels, stride, held);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int k = 0; k < CHUNKS; k++) store(to + r * wide + k * LANES, held[r][k]);
        start = ends[p];
    }
}

constexpr int MOST = 5;  // rows and chunks of a block
typedef double (*AddUp)(const Shape&, List, const float*, int64_t, float*);
typedef void (*Spread)(const Shape&, List, const int32_t*, const int32_t*, int64_t, const float*, float*);

template <int... PAIRS>
static AddUp add_up_of(int64_t rows, int64_t chunks, std::integer_sequence<int, PAIRS...>) {
    static const AddUp all_of[] = {add_up<PAIRS / MOST + 1, PAIRS % MOST + 1>...};
    return all_of[(rows - 1) * MOST + chunks - 1];
}

template <int... PAIRS>
static Spread spread_of(int64_t rows, int64_t chunks, std::integer_sequence<int, PAIRS...>) {
    static const Spread all_of[] = {spread<PAIRS / MOST + 1, PAIRS % MOST + 1>...};
    return all_of[(rows - 1) * MOST + chunks - 1];
}

constexpr auto PAIRS = std::make_integer_sequence<int, MOST * MOST>();

// How many rows and chunks of a kernel are added up at once: `most` together.
struct Blocks {
    int64_t rows, chunks;

    Blocks(const Shape& s, int64_t most) {
        const int64_t across = (s.chunks() + MOST - 1) / MOST;
        chunks = at_most((s.chunks() + across - 1) / across, most);
        rows = at_most(at_most(most / chunks, MOST), s.kernel_h);
    }
};
