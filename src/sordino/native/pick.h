// The gradient of the weights where images have one channel.

#pragma once

#include "vectors.h"

#if defined(__AVX512F__)
// Rows of the gradient of images with one channel at p = 2: output channels lie in the lanes of vectors, each of which
// picks its own numbers from two rows of the window.
template <int ROWS, int WIDE>
static double pick(const Shape& s, const float* values, const uint8_t* taken, const float* padded, int64_t o,
                   int64_t row, float* grads) {
    const int64_t lanes = s.lanes(), stride = s.padded_w(), taps = s.kernel_h * s.kernel_w;
    Vec held[ROWS][WIDE] = {};
    for (int64_t y = 0; y < s.copies * s.out_h; y++) {
        const float* line = padded + y / s.out_h * s.padded() + (y % s.out_h * 2 + row) * stride;
        for (int64_t x = 0; x < s.out_w; x++) {
            const int64_t window = y * s.out_w + x;
            const Vec value = load(values + window * lanes + o);
            Bytes bytes;
            memcpy(&bytes, taken + window * s.outputs + o, LANES);
            const Ints which = __builtin_convertvector(bytes, Ints), first = (which & 2) * 4 + (which & 1);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const __m256 upper = _mm256_loadu_ps(line + r * stride + 2 * x);
                const __m256 lower = _mm256_loadu_ps(line + (r + 1) * stride + 2 * x);
                const __m512d both = _mm512_insertf64x4(
                    _mm512_castpd256_pd512(_mm256_castps_pd(upper)), _mm256_castps_pd(lower), 1);
#pragma GCC unroll 8
                for (int t = 0; t < WIDE; t++)
                    held[r][t] += value * (Vec)_mm512_permutexvar_ps((__m512i)(first + t), _mm512_castpd_ps(both));
            }
        }
    }
    Vec part = {};
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < WIDE; t++) {
            part += held[r][t] * held[r][t];
            for (int i = 0; i < LANES; i++) grads[(o + i) * taps + (row + r) * WIDE + t] = held[r][t][i];
        }
    return sum_of(part);
}

template <int WIDE>
static double picked(const Shape& s, const float* values, const uint8_t* taken, const float* padded, float* grads) {
    double square = 0;
    for (int64_t o = 0; o < s.outputs; o += LANES)
        for (int64_t row = 0; row < s.kernel_h; row += 3) {
            const int64_t rows = s.kernel_h - row;
            const auto own = rows > 2 ? pick<3, WIDE> : rows > 1 ? pick<2, WIDE> : pick<1, WIDE>;
            square += own(s, values, taken, padded, o, row, grads);
        }
    return square;
}

static bool picks(const Shape& s) {
    const bool plain = s.channels == 1 && s.pool == 2 && s.stride_h == 1 && s.stride_w == 1;
    return plain && s.outputs % LANES == 0 && (s.kernel_w == 3 || s.kernel_w == 5 || s.kernel_w == 7);
}

static double picked_of(const Shape& s, const float* values, const uint8_t* taken, const float* padded, float* grads) {
    const auto own = s.kernel_w == 3 ? picked<3> : s.kernel_w == 5 ? picked<5> : picked<7>;
    return own(s, values, taken, padded, grads);
}
#else
static bool picks(const Shape&) { return false; }

static double picked_of(const Shape&, const float*, const uint8_t*, const float*, float*) { return 0; }
#endif
