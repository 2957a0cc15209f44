// Standard normals by Box and Muller from keyed words of Philox4x64-10: the bits of privacy/normals.py, which says what
// is computed. Products and sums are rounded one by one, never joined (-ffp-contract=off): hence the same bits.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int WORDS = 256;  // words that are made at once; two normals each

// Four words of the stream: the counter's value under a key.
inline void four(uint64_t first, uint64_t block, uint64_t key0, uint64_t key1, uint64_t *out) {
    uint64_t a = first, b = 0, c = block, d = 0;
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 p = (unsigned __int128)0xD2E7470EE14C6C93ull * a, q = (unsigned __int128)0xCA5A826395121157ull * c;
        const uint64_t left = (uint64_t)(q >> 64) ^ b ^ key0, right = (uint64_t)(p >> 64) ^ d ^ key1;
        a = left, b = (uint64_t)q, c = right, d = (uint64_t)p;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

inline int32_t bits(float value) {
    int32_t found;
    std::memcpy(&found, &value, 4);
    return found;
}

inline float number(int32_t of) {
    float found;
    std::memcpy(&found, &of, 4);
    return found;
}

// Two normals of every word: (radius, angle) as its low and high half say.
void pairs(const uint64_t *words, float *even, float *odd) {
#pragma omp simd
    for (int i = 0; i < WORDS; i++) {
        const uint32_t low = (uint32_t)words[i], high = (uint32_t)(words[i] >> 32);
        const float u = (float)low * 0x1p-32f + 0x1p-33f;
        const int32_t power = (bits(u) - 0x3f3504f3) >> 23;
        const float f = number(bits(u) - (power << 23)) - 1.0f, e = (float)power, ff = f * f;
        float p = 7.0376836292e-2f;
        p = p * f - 1.1514610310e-1f;
        p = p * f + 1.1676998740e-1f;
        p = p * f - 1.2420140846e-1f;
        p = p * f + 1.4249322787e-1f;
        p = p * f - 1.6668057665e-1f;
        p = p * f + 2.0000714765e-1f;
        p = p * f - 2.4999993993e-1f;
        p = p * f + 3.3333331174e-1f;
        p = p * f * ff;
        p = p + e * -2.12194440e-4f;
        p = p - ff * 0.5f;
        const float log = f + p + e * 0.693359375f;
        const float radius = std::sqrt(log * -2.0f);
        const uint32_t quarter = (high + 0x20000000u) >> 30;
        const float x = (float)(int32_t)(high - (quarter << 30)) * 1.4629180793e-9f, xx = x * x;
        float s = -1.9515295891e-4f, c = 2.443315711809948e-5f;
        s = s * xx + 8.3321608736e-3f;
        s = s * xx - 1.6666654611e-1f;
        s = s * xx * x + x;
        c = c * xx - 1.388731625493765e-3f;
        c = c * xx + 4.166664568298827e-2f;
        c = c * xx * xx - xx * 0.5f + 1.0f;
        const bool turned = quarter & 1;
        const float across = turned ? s : c, along = turned ? c : s;
        even[i] = radius * number(bits(across) ^ (int32_t)(((quarter + 1) & 2) << 30));
        odd[i] = radius * number(bits(along) ^ (int32_t)((quarter & 2) << 30));
    }
}

}  // namespace

// Normals of every row, out[rows, width], each row's in blocks of `block` from keys[rows, 2]; or, with scales[rows], the
// row's scale times them is added to what is there.
extern "C" void fill(float *out, const uint64_t *keys, const float *scales, long rows, long width, long block, long threads) {
    const long blocks = (width + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long job = 0; job < rows * blocks; job++) {
        const long row = job / blocks, number_of = job % blocks, start = number_of * block;
        const long count = width - start < block ? width - start : block;
        const uint64_t *key = keys + 2 * row;
        float *own = out + row * width + start;
        uint64_t words[WORDS];
        float even[WORDS], odd[WORDS];
        for (long from = 0; from < count; from += 2 * WORDS) {
            for (long k = 0; k < WORDS / 4; k++) four((uint64_t)(from / 8 + k + 1), (uint64_t)number_of, key[0], key[1], words + 4 * k);
            pairs(words, even, odd);
            const long left = count - from, whole = left < 2 * WORDS ? left / 2 : WORDS;
            float *to = own + from;
            if (scales) {
                const float scale = scales[row];
                for (long i = 0; i < whole; i++) {
                    to[2 * i] = to[2 * i] + even[i] * scale;
                    to[2 * i + 1] = to[2 * i + 1] + odd[i] * scale;
                }
                if (left < 2 * WORDS && left % 2) to[left - 1] = to[left - 1] + even[whole] * scale;
            } else {
                for (long i = 0; i < whole; i++) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
                if (left < 2 * WORDS && left % 2) to[left - 1] = even[whole];
            }
        }
    }
}
