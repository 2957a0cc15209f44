// Vectors as wide as the processor's, a convolution's shape, and memory of a thread.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, HELD = 25, TILE = 14, LONG_TILE = 28;
#elif defined(__AVX__)
constexpr int LANES = 8, HELD = 10, TILE = 6, LONG_TILE = 12;
#else
constexpr int LANES = 4, HELD = 20, TILE = 12, LONG_TILE = 24;
#endif
constexpr int NEAR = 32 * 1024;  // bytes of kernels that stay in the nearest cache beside an image

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef double Wide __attribute__((vector_size(8 * LANES)));

struct Shape {
    int64_t inputs, copies, channels, height, width, outputs, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
    int64_t pool, out_h, out_w;  // of the pooled output

    int64_t run() const { return kernel_w * channels; }  // what a row of the kernel sees lies end to end
    int64_t padded_w() const { return (width + 2 * pad_w) * channels; }
    int64_t padded() const { return (height + 2 * pad_h) * padded_w() + LANES; }
    int64_t chunks() const { return (run() + LANES - 1) / LANES; }
    int64_t lanes() const { return (outputs + LANES - 1) / LANES * LANES; }
    int64_t image() const { return height * width * channels; }
    int64_t pooled() const { return out_h * out_w * outputs; }
};

static inline Vec load(const float* at) { return *reinterpret_cast<const Loose*>(at); }
static inline void store(float* at, Vec value) { *reinterpret_cast<Loose*>(at) = value; }
static inline Vec all(float value) { return value - Vec{}; }

static inline int64_t at_most(int64_t number, int64_t most) { return number < most ? number : most; }

static double sum_of(Vec values) {
    const Wide wide = __builtin_convertvector(values, Wide);
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += wide[i];
    return sum;
}

// Memory of a thread, kept from call to call: fresh pages cost more than the arithmetic.
static float* room(int slot, int64_t count) {
    static thread_local float* kept[4];
    static thread_local int64_t sizes[4];
    if (sizes[slot] < count) {
        free(kept[slot]);
        sizes[slot] = (count + count / 8 + 63) / 16 * 16;
        kept[slot] = static_cast<float*>(aligned_alloc(64, 4 * sizes[slot]));
    }
    return kept[slot];
}

static void pad(const Shape& s, const float* image, float* padded) {
    const int64_t row = s.width * s.channels, side = s.pad_w * s.channels, wide = s.padded_w();
    memset(padded, 0, 4 * (s.pad_h * wide));
    for (int64_t y = 0; y < s.height; y++) {
        float* to = padded + (y + s.pad_h) * wide;
        memset(to, 0, 4 * side);
        memcpy(to + side, image + y * row, 4 * row);
        memset(to + side + row, 0, 4 * side);
    }
    memset(padded + (s.pad_h + s.height) * wide, 0, 4 * (s.pad_h * wide + LANES));
}
