// A convolution, the largest of every p x p window of its output, and max(., 0), forward and back, record by record.
//
// Images lie channels last. Forward, a row of positions is computed at a time, output channels in the lanes of vectors,
// and pooled while it is in the cache; what stays is the pooled output and which position of a window it came from.
// Backward, the gradient of the convolution's output has one number at most for every window and channel. Only those
// are multiplied: a quarter of the products at p = 2. A record's gradient of the weights is one list of (number, patch)
// an output channel, added up in registers straight from the image; the gradient of the input is one list of (number,
// kernel) a position.

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

extern "C" int64_t room_forward(const Shape* s) { return (s->kernel_h * s->run() + 1) * s->lanes(); }

extern "C" int64_t room_backward(const Shape* s) { return s->outputs * s->kernel_h * s->chunks() * LANES; }

// kernels[taps, channels, lanes] from weight[outputs, channels, taps], zeros behind the last output.
extern "C" void pack_forward(const Shape* shape, const float* weight, const float* bias, float* kernels) {
    const Shape& s = *shape;
    const int64_t taps = s.kernel_h * s.kernel_w, lanes = s.lanes(), all_of = taps * s.channels;
    for (int64_t t = 0; t < taps; t++)
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t o = 0; o < lanes; o++)
                kernels[(t * s.channels + c) * lanes + o] = o < s.outputs ? weight[(o * s.channels + c) * taps + t] : 0;
    for (int64_t o = 0; o < lanes; o++) kernels[all_of * lanes + o] = bias && o < s.outputs ? bias[o] : 0;
}

extern "C" void forward(const Shape* shape, const float* x, const float* kernels, float* out, uint8_t* taken,
                        int threads) {
    const Shape& s = *shape;
    const int64_t lanes = s.lanes(), count = s.out_w * s.pool;
    const float* bias = kernels + s.kernel_h * s.run() * lanes;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t j = 0; j < s.inputs; j++) {
        float* padded = room(0, s.padded());
        float* rows = room(1, s.pool * count * lanes);
        pad(s, x + j * s.image(), padded);
        for (int64_t y = 0; y < s.out_h; y++) {
            for (int64_t k = 0; k < s.pool; k++)
                convolve_row(s, padded + (y * s.pool + k) * s.stride_h * s.padded_w(), kernels, bias, count,
                             rows + k * count * lanes);
            const int64_t at = j * s.pooled() + y * s.out_w * s.outputs;
            pool_rows(s, rows, out + at, taken + at);
        }
    }
}

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

static double sum_of(Vec values) {
    const Wide wide = __builtin_convertvector(values, Wide);
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += wide[i];
    return sum;
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

static inline int64_t at_most(int64_t number, int64_t most) { return number < most ? number : most; }

// How many rows and chunks of a kernel are added up at once: `most` together.
struct Blocks {
    int64_t rows, chunks;

    Blocks(const Shape& s, int64_t most) {
        const int64_t across = (s.chunks() + MOST - 1) / MOST;
        chunks = at_most((s.chunks() + across - 1) / across, most);
        rows = at_most(at_most(most / chunks, MOST), s.kernel_h);
    }
};

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

// kernels[outputs, kernel rows, chunks of LANES] from weight[outputs, channels, taps], zeros behind a row's last.
extern "C" void pack_backward(const Shape* shape, const float* weight, float* kernels) {
    const Shape& s = *shape;
    const int64_t wide = s.chunks() * LANES, taps = s.kernel_h * s.kernel_w;
    for (int64_t o = 0; o < s.outputs; o++)
        for (int64_t row = 0; row < s.kernel_h; row++)
            for (int64_t r = 0; r < wide; r++) {
                const int64_t tap = row * s.kernel_w + r / s.channels, c = r % s.channels;
                kernels[(o * s.kernel_h + row) * wide + r] =
                    r < s.run() ? weight[(o * s.channels + c) * taps + tap] : 0;
            }
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

static bool finite(const float* values, int64_t count) {
    Vec sum = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(values + i) * 0;
    float last = 0;
    for (; i < count; i++) last += values[i] * 0;
    for (int k = 0; k < LANES; k++) last += sum[k];
    return last == 0;
}

// Every unit's gradient of weights and bias with its squared norm, and every input's gradient where dx is given.
//
// A unit is `copies` inputs in succession, whose gradients are added up. Where an input holds a number that is not
// finite, so is the unit's square, as it would be if products with zero were made.
extern "C" void backward(const Shape* shape, const float* x, const float* dy, const uint8_t* taken,
                         const float* kernels, float* grads, float* shifts, double* squares, float* dx, int threads) {
    const Shape& s = *shape;
    const int64_t windows = s.out_h * s.out_w, lanes = s.lanes(), units = s.inputs / s.copies;
    const int64_t squared = s.pool * s.pool;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t unit = 0; unit < units; unit++) {
        float* padded = room(0, (s.copies + 1) * s.padded());
        float* values = room(1, s.copies * windows * lanes);
        int32_t* places = reinterpret_cast<int32_t*>(room(2, s.copies * windows * lanes));
        const int64_t longest = s.copies * windows > windows * lanes ? s.copies * windows : windows * lanes;
        float* listed = room(3, 2 * (longest + LANES) + 2 * windows * squared);
        int32_t* where = reinterpret_cast<int32_t*>(listed + longest + LANES);
        int32_t* ends = where + longest + LANES;
        bool whole = true;
        for (int64_t copy = 0; copy < s.copies; copy++) {
            const int64_t j = unit * s.copies + copy, at = copy * windows * lanes;
            whole &= finite(x + j * s.image(), s.image());
            pad(s, x + j * s.image(), padded + copy * s.padded());
            unpool(s, dy + j * s.pooled(), taken + j * s.pooled(), copy * s.padded(), values + at, places + at);
            if (!dx) continue;
            float* back = padded + s.copies * s.padded();
            input_gradient(s, values + at, taken + j * s.pooled(), kernels, listed, where, ends,
                           ends + windows * squared, back);
            for (int64_t y = 0; y < s.height; y++)
                memcpy(dx + j * s.image() + y * s.width * s.channels,
                       back + (y + s.pad_h) * s.padded_w() + s.pad_w * s.channels, 4 * s.width * s.channels);
        }
        float* own = grads + unit * s.outputs * s.kernel_h * s.run();
        double square = picks(s) ? picked_of(s, values, taken + unit * s.copies * s.pooled(), padded, own)
                                 : weight_gradient(s, values, places, padded, listed, where, own);
        if (shifts) square += bias_gradient(s, values, shifts + unit * s.outputs);
        squares[unit] = whole ? square : square - __builtin_nan("");
    }
}
