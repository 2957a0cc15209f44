// Squared norms of a convolution's per-record gradients from inner products of positions, in double:
// |g|^2 = sum over s, t of (dy_s . dy_t) * sum over taps of x_(s+tap) . x_(t+tap); and sum over t of |P_t| |dy_t|,
// with P_t what the kernel sees at t. Neither patches nor gradients are made.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr long LANES = 8, ROWS = 8;
#else
constexpr long LANES = 4, ROWS = 4;
#endif
constexpr long VECTORS = 2, COLUMNS = LANES * VECTORS, DEPTH = 32;  // channels at a time: they lie in the first cache

typedef double Vector __attribute__((vector_size(LANES * 8), aligned(8)));

struct Shape {
    long inputs, outputs, height, width, high, wide, kh, kw, sh, sw, ph, pw, dh, dw;
};

// Where the numbers of images lie: steps from one image, channel, row and column to the next.
struct Images {
    const float *data;
    long image, channel, row, column;
};

// A grid of every step-th row and column of images.
struct Grid {
    long top, left, down, right, rows, columns;
    long size() const { return rows * columns; }
};

long padded(long positions) { return (positions + COLUMNS - 1) / COLUMNS * COLUMNS; }

// Some channels at all positions of a record's images, widened: to[channel, position], zeros beyond the last.
void widen(const Images &x, long first, long copies, const Grid &grid, long channel, long some, long wide, double *to) {
    long t = 0;
    for (long copy = 0; copy < copies; copy++)
        for (long i = 0; i < grid.rows; i++) {
            const float *row = x.data + (first + copy) * x.image + (grid.top + i * grid.down) * x.row + channel * x.channel;
            for (long j = 0; j < grid.columns; j++, t++) {
                const float *at = row + (grid.left + j * grid.right) * x.column;
                for (long k = 0; k < some; k++) to[k * wide + t] = at[k * x.channel];
            }
        }
    for (; t < wide; t++)
        for (long k = 0; k < some; k++) to[k * wide + t] = 0;
}

// gram[s, t] += sum over channels of values[channel, s] * values[channel, t], for blocks on and above the diagonal.
void add_products(const double *values, long some, long wide, double *gram) {
    for (long s = 0; s < wide; s += ROWS)
        for (long t = s / COLUMNS * COLUMNS; t < wide; t += COLUMNS) {
            Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
            for (long a = 0; a < ROWS; a++)
#pragma GCC unroll 2
                for (long v = 0; v < VECTORS; v++) sum[a][v] = *(const Vector *)(gram + (s + a) * wide + t + v * LANES);
            for (long k = 0; k < some; k++) {
                const double *left = values + k * wide + s, *right = values + k * wide + t;
                Vector other[VECTORS];
#pragma GCC unroll 2
                for (long v = 0; v < VECTORS; v++) other[v] = *(const Vector *)(right + v * LANES);
#pragma GCC unroll 8
                for (long a = 0; a < ROWS; a++)
#pragma GCC unroll 2
                    for (long v = 0; v < VECTORS; v++) sum[a][v] += left[a] * other[v];
            }
#pragma GCC unroll 8
            for (long a = 0; a < ROWS; a++)
#pragma GCC unroll 2
                for (long v = 0; v < VECTORS; v++) *(Vector *)(gram + (s + a) * wide + t + v * LANES) = sum[a][v];
        }
}

// Inner products of all positions of a grid of a record's images, [wide, wide] with wide = padded(positions).
void products(const Images &x, long first, long copies, const Grid &grid, long channels, double *room, double *gram) {
    const long wide = padded(copies * grid.size());
    std::memset(gram, 0, wide * wide * sizeof(double));
    for (long channel = 0; channel < channels; channel += DEPTH) {
        const long some = std::min(DEPTH, channels - channel);
        widen(x, first, copies, grid, channel, some, wide, room);
        add_products(room, some, wide, gram);
    }
    for (long s = 0; s < wide; s++)
        for (long t = 0; t < s; t++) gram[s * wide + t] = gram[t * wide + s];
}

// seen[s, t] += gram[s + shift, t + shift] over the outputs that see no padding there.
void add_shifted(const double *gram, const Grid &grid, const Shape &s, long copies, long down, long right, double *seen) {
    const long from = std::max(0L, -down), to = std::min(s.high, grid.rows - down);
    const long begin = std::max(0L, -right), end = std::min(s.wide, grid.columns - right);
    const long wide = padded(copies * grid.size()), across = padded(copies * s.high * s.wide);
    if (begin >= end) return;
    for (long copy = 0; copy < copies; copy++)
        for (long i = from; i < to; i++)
            for (long j = begin; j < end; j++) {
                const double *source = gram + ((copy * grid.rows + i + down) * grid.columns + j + right) * wide;
                double *target = seen + ((copy * s.high + i) * s.wide + j) * across;
                for (long other = 0; other < copies; other++)
                    for (long k = from; k < to; k++) {
                        const double *g = source + (other * grid.rows + k + down) * grid.columns + right;
                        double *into = target + (other * s.high + k) * s.wide;
                        for (long m = begin; m < end; m++) into[m] += g[m];
                    }
            }
}

long floor_of(long a, long b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

Grid phase(const Shape &s, long top, long left) {
    const long rows = top < s.height ? (s.height - top + s.sh - 1) / s.sh : 0;
    const long columns = left < s.width ? (s.width - left + s.sw - 1) / s.sw : 0;
    return Grid{top, left, s.sh, s.sw, rows, columns};
}

// Inner products of what the kernel sees: by the residue of what a tap sees, since others never see the same.
void patch_products(const Images &x, long first, long copies, const Shape &s, double *room, double *gram, double *seen) {
    const long across = padded(copies * s.high * s.wide);
    std::memset(seen, 0, across * across * sizeof(double));
    for (long top = 0; top < s.sh; top++)
        for (long left = 0; left < s.sw; left++) {
            const Grid grid = phase(s, top, left);
            bool made = false;
            for (long i = 0; i < s.kh && grid.size(); i++)
                for (long j = 0; j < s.kw; j++) {
                    const long down = floor_of(i * s.dh - s.ph, s.sh), right = floor_of(j * s.dw - s.pw, s.sw);
                    if (i * s.dh - s.ph - down * s.sh != top || j * s.dw - s.pw - right * s.sw != left) continue;
                    if (!made) products(x, first, copies, grid, s.inputs, room, gram);
                    made = true;
                    add_shifted(gram, grid, s, copies, down, right, seen);
                }
        }
}

double *aligned(long count) {
    return (double *)std::aligned_alloc(64, (count * sizeof(double) + 63) / 64 * 64);
}

}  // namespace

// x: images [records*copies, inputs, height, width] with these four steps, dy: [.., outputs, high, wide] with its own.
// Returns 0, or 1 where there is no memory.
extern "C" long squared_norms(const float *x, const long *x_steps, const float *dy, const long *dy_steps, long records,
                              long copies, const long *sizes, double *squares, double *reach, long threads) {
    Shape s;
    std::memcpy(&s, sizes, sizeof s);
    const Images inputs{x, x_steps[0], x_steps[1], x_steps[2], x_steps[3]};
    const Images slopes{dy, dy_steps[0], dy_steps[1], dy_steps[2], dy_steps[3]};
    const Grid all{0, 0, 1, 1, s.high, s.wide};
    const long across = padded(copies * all.size()), most = std::max(across, padded(copies * phase(s, 0, 0).size()));
    long failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        double *room = aligned(DEPTH * most), *gram = aligned(most * most), *seen = aligned(across * across);
        failed |= !room || !gram || !seen;
#pragma omp for schedule(dynamic)
        for (long record = 0; record < records; record++) {
            if (failed) continue;
            patch_products(inputs, record * copies, copies, s, room, gram, seen);
            products(slopes, record * copies, copies, all, s.outputs, room, gram);
            double total = 0, lengths = 0;
            for (long t = 0; t < across; t++) {
                double part = 0;
#pragma omp simd reduction(+ : part)
                for (long k = 0; k < across; k++) part += seen[t * across + k] * gram[t * across + k];
                total += part;
                lengths += std::sqrt(seen[t * across + t] * gram[t * across + t]);
            }
            squares[record] = total;
            reach[record] = lengths;
        }
        std::free(room), std::free(gram), std::free(seen);
    }
    return failed;
}
