// From the gradient of a pooled output to that of weights, bias and input, of one unit.

#pragma once

#include "lists.h"
#include "pick.h"

// Of every window and output channel the gradient (0 where nothing goes back) and the place of its patch.
static void unpool(const Shape& s, const float* slopes, const uint8_t* taken, int64_t first, float* values,
                   int32_t* places) {
    const int64_t lanes = s.lanes(), squared = s.pool * s.pool, wide = s.padded_w();
    for (int64_t w = 0; w < s.out_h * s.out_w; w++) {
        const int64_t corner = first + w / s.out_w * s.pool * s.stride_h * wide +
                               w % s.out_w * s.pool * s.stride_w * s.channels;
        for (int64_t o = 0; o < s.outputs; o += LANES) {
            const int64_t count = at_most(s.outputs - o, LANES), at = w * s.outputs + o;
            Vec value = {};
            Bytes bytes = {};
            if (count == LANES) {
                value = load(slopes + at);
                memcpy(&bytes, taken + at, LANES);
            } else {
                memcpy(&value, slopes + at, 4 * count);
                memcpy(&bytes, taken + at, count);
            }
            const Ints which = __builtin_convertvector(bytes, Ints);
            Ints place = Ints{} + static_cast<int32_t>(corner);
            for (int64_t k = 1; k < squared; k++) {
                const int64_t off = k / s.pool * s.stride_h * wide + k % s.pool * s.stride_w * s.channels;
                place += which == static_cast<int32_t>(k) ? Ints{} + static_cast<int32_t>(off) : Ints{};
            }
            value = which == 255 ? Vec{} : value;
            memcpy(values + w * lanes + o, &value, sizeof value);
            memcpy(places + w * lanes + o, &place, sizeof place);
        }
    }
}

// A unit's gradient of the bias; returns its squared norm.
static double bias_gradient(const Shape& s, const float* values, float* shifts) {
    const int64_t lanes = s.lanes(), windows = s.copies * s.out_h * s.out_w;
    double square = 0;
    for (int64_t o = 0; o < lanes; o += LANES) {
        Wide sum = {};
        for (int64_t w = 0; w < windows; w++) sum += __builtin_convertvector(load(values + w * lanes + o), Wide);
        for (int64_t i = 0; i < at_most(s.outputs - o, LANES); i++) {
            shifts[o + i] = static_cast<float>(sum[i]);
            square += static_cast<double>(shifts[o + i]) * shifts[o + i];
        }
    }
    return square;
}

// A unit's gradient of the weights, [outputs, taps, channels]; returns its squared norm.
static double weight_gradient(const Shape& s, const float* values, const int32_t* places, const float* padded,
                              float* listed, int32_t* where, float* grads) {
    const Blocks block(s, HELD);
    const int64_t lanes = s.lanes(), windows = s.copies * s.out_h * s.out_w;
    double square = 0;
    for (int64_t o = 0; o < s.outputs; o++) {
        int64_t count = 0;
        for (int64_t w = 0; w < windows; w++) {
            const float value = values[w * lanes + o];
            listed[count] = value;
            where[count] = places[w * lanes + o];
            count += value != 0;
        }
        for (int64_t row = 0; row < s.kernel_h; row += block.rows)
            for (int64_t chunk = 0; chunk < s.chunks(); chunk += block.chunks) {
                const int64_t rows = at_most(s.kernel_h - row, block.rows);
                const int64_t chunks = at_most(s.chunks() - chunk, block.chunks);
                const float* from = padded + row * s.padded_w() + chunk * LANES;
                float* to = grads + (o * s.kernel_h + row) * s.run() + chunk * LANES;
                square += add_up_of(rows, chunks, PAIRS)(s, {listed, where, count}, from, chunk, to);
            }
    }
    return square;
}

// The lanes of a mask, moved to the front; how many.
static inline int64_t keep(Ints mask, Vec value, Ints place, float* values, int32_t* places) {
#if defined(__AVX512F__)
    const __mmask16 some = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(some, (__m512)value));
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi32(some, (__m512i)place));
    return __builtin_popcount(some);
#else
    int64_t count = 0;
    for (int i = 0; i < LANES; i++) {
        values[count] = value[i];
        places[count] = place[i];
        count += mask[i] != 0;
    }
    return count;
#endif
}

// An input's gradient, padded: of every position of the convolution's output the list of its numbers and kernels.
static void input_gradient(const Shape& s, const float* values, const uint8_t* taken, const float* kernels,
                           float* listed, int32_t* where, int32_t* ends, int32_t* places, float* padded) {
    const int64_t lanes = s.lanes(), windows = s.out_h * s.out_w, squared = s.pool * s.pool, wide = s.padded_w();
    const int64_t stride = s.chunks() * LANES;
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    int64_t total = 0;
    for (int64_t w = 0; w < windows; w++)
        for (int64_t k = 0; k < squared; k++) {
            for (int64_t o = 0; o < s.outputs; o += LANES) {
                const int64_t count = at_most(s.outputs - o, LANES);
                Bytes bytes = Bytes{} + 255;
                memcpy(&bytes, taken + w * s.outputs + o, count);
                const Vec value = load(values + w * lanes + o);
                const Ints some = (__builtin_convertvector(bytes, Ints) == static_cast<int32_t>(k)) & (value != 0);
                const Ints kernel = (lane + static_cast<int32_t>(o)) * static_cast<int32_t>(s.kernel_h * stride);
                total += keep(some, value, kernel, listed + total, where + total);
            }
            ends[w * squared + k] = total;
            places[w * squared + k] = (w / s.out_w * s.pool + k / s.pool) * s.stride_h * wide +
                                      (w % s.out_w * s.pool + k % s.pool) * s.stride_w * s.channels;
        }
    const int64_t near = NEAR / (4 * LANES * s.outputs);
    const Blocks block(s, near < 4 ? 4 : at_most(near, HELD));
    memset(padded, 0, 4 * s.padded());
    for (int64_t row = 0; row < s.kernel_h; row += block.rows)
        for (int64_t chunk = 0; chunk < s.chunks(); chunk += block.chunks) {
            const int64_t rows = at_most(s.kernel_h - row, block.rows);
            const int64_t chunks = at_most(s.chunks() - chunk, block.chunks);
            spread_of(rows, chunks, PAIRS)(s, {listed, where, total}, ends, places, windows * squared,
                                           kernels + row * stride + chunk * LANES,
                                           padded + row * wide + chunk * LANES);
        }
}
