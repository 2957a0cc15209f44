// Every record's gradient of a convolution's weights, and its squared norm: g[o, tap, c] = sum over positions t of
// dy[t, o] * x[stride*t + tap*hole - pad, c]. Patches are never copied: a few rows of the image are packed, zeros
// around them, 32 channels at a time, and every tap reads them from its own place.

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr long LANES = 16;
#else
constexpr long LANES = 8;
#endif
constexpr long VECTORS = 2, CHANNELS = LANES * VECTORS, OUTPUTS = LANES == 16 ? 8 : 4, TILE = OUTPUTS * CHANNELS;
constexpr long POSITIONS = 128;  // of a block: input and slopes of one tile then lie in the first cache

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));

struct Shape {
    long inputs, outputs, height, width, high, wide, kh, kw, sh, sw, ph, pw, dh, dw;
};

// What the packed input of a block of `rows` rows of the output looks like.
struct Room {
    long rows, columns;
    Room(const Shape &s, long out) : rows((out - 1) * s.sh + (s.kh - 1) * s.dh + 1),
                                     columns((s.wide - 1) * s.sw + (s.kw - 1) * s.dw + 1) {}
    long size() const { return rows * columns * CHANNELS; }
};

void pack_input(const float *x, const Shape &s, long first, long channel, const Room &room, float *to) {
    const long some = std::min(CHANNELS, s.inputs - channel);
    for (long row = 0; row < room.rows; row++) {
        const long above = first * s.sh - s.ph + row;
        for (long column = 0; column < room.columns; column++, to += CHANNELS) {
            const long at = column - s.pw;
            const bool inside = above >= 0 && above < s.height && at >= 0 && at < s.width;
            const long taken = inside ? some : 0;
            if (inside) std::memcpy(to, x + (above * s.width + at) * s.inputs + channel, taken * sizeof(float));
            if (taken < CHANNELS) std::memset(to + taken, 0, (CHANNELS - taken) * sizeof(float));
        }
    }
}

void pack_slopes(const float *dy, long positions, long outputs, float *to) {
    for (long output = 0; output < outputs; output += OUTPUTS) {
        const long some = std::min(OUTPUTS, outputs - output);
        for (long t = 0; t < positions; t++, to += OUTPUTS)
            for (long k = 0; k < OUTPUTS; k++) to[k] = k < some ? dy[t * outputs + output + k] : 0.0f;
    }
}

// tile[OUTPUTS, CHANNELS] += sum over a block's positions of slopes (x) input.
inline void add_tile(const float *input, const float *slopes, long rows, long wide, long row_step, long step, float *tile) {
    Vector sum[OUTPUTS][VECTORS];
#pragma GCC unroll 8
    for (long o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 2
        for (long v = 0; v < VECTORS; v++) sum[o][v] = *(const Vector *)(tile + o * CHANNELS + v * LANES);
    for (long row = 0; row < rows; row++) {
        const float *at = input + row * row_step;
        for (long t = 0; t < wide; t++, at += step, slopes += OUTPUTS) {
            Vector seen[VECTORS];
#pragma GCC unroll 2
            for (long v = 0; v < VECTORS; v++) seen[v] = *(const Vector *)(at + v * LANES);
#pragma GCC unroll 8
            for (long o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 2
                for (long v = 0; v < VECTORS; v++) sum[o][v] += slopes[o] * seen[v];
        }
    }
#pragma GCC unroll 8
    for (long o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 2
        for (long v = 0; v < VECTORS; v++) *(Vector *)(tile + o * CHANNELS + v * LANES) = sum[o][v];
}

void add_input(const float *x, const float *dy, const Shape &s, float *input, float *slopes, float *tiles) {
    const long deep = (s.inputs + CHANNELS - 1) / CHANNELS, across = (s.outputs + OUTPUTS - 1) / OUTPUTS;
    const long most = std::max(1L, POSITIONS / s.wide);
    for (long first = 0; first < s.high; first += most) {
        const long rows = std::min(most, s.high - first), positions = rows * s.wide;
        const Room room(s, rows);
        pack_slopes(dy + first * s.wide * s.outputs, positions, s.outputs, slopes);
        float *tile = tiles;
        for (long d = 0; d < deep; d++) {
            pack_input(x, s, first, d * CHANNELS, room, input);
            for (long a = 0; a < across; a++)
                for (long i = 0; i < s.kh; i++)
                    for (long j = 0; j < s.kw; j++, tile += TILE)
                        add_tile(input + (i * s.dh * room.columns + j * s.dw) * CHANNELS, slopes + a * OUTPUTS * positions,
                                 rows, s.wide, s.sh * room.columns * CHANNELS, s.sw * CHANNELS, tile);
        }
    }
}

// Tiles to g[outputs, taps, inputs]; the sum of squares, every one of them exact in double.
double put(const float *tiles, const Shape &s, float *g) {
    const long deep = (s.inputs + CHANNELS - 1) / CHANNELS, across = (s.outputs + OUTPUTS - 1) / OUTPUTS, taps = s.kh * s.kw;
    double square = 0;
    for (long d = 0; d < deep; d++)
        for (long a = 0; a < across; a++)
            for (long tap = 0; tap < taps; tap++)
                for (long k = 0; k < OUTPUTS; k++, tiles += CHANNELS) {
                    const long o = a * OUTPUTS + k, some = std::min(CHANNELS, s.inputs - d * CHANNELS);
                    if (o >= s.outputs) continue;
                    std::memcpy(g + (o * taps + tap) * s.inputs + d * CHANNELS, tiles, some * sizeof(float));
                    double part[8] = {0};
                    long c = 0;
                    for (; c + 8 <= some; c += 8)
                        for (long l = 0; l < 8; l++) part[l] += (double)tiles[c + l] * (double)tiles[c + l];
                    for (; c < some; c++) part[0] += (double)tiles[c] * (double)tiles[c];
                    square += ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
                }
    return square;
}

float *aligned(long count) {
    return (float *)std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
}

}  // namespace

// x[records*copies, height, width, inputs] and dy[records*copies, high, wide, outputs], channels last and dense;
// g[records, outputs, taps, inputs], squares[records]. Returns 0, or 1 where there is no memory.
extern "C" long weight_gradients(const float *x, const float *dy, long records, long copies, const long *sizes, float *g,
                                 double *squares, long threads) {
    Shape s;
    std::memcpy(&s, sizes, sizeof s);
    const long deep = (s.inputs + CHANNELS - 1) / CHANNELS, across = (s.outputs + OUTPUTS - 1) / OUTPUTS;
    const long most = std::min(s.high, std::max(1L, POSITIONS / s.wide)), taps = s.kh * s.kw;
    const long tiles_size = deep * across * taps * TILE;
    long failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *input = aligned(Room(s, most).size()), *slopes = aligned(across * OUTPUTS * most * s.wide);
        float *tiles = aligned(tiles_size);
        failed |= !input || !slopes || !tiles;
#pragma omp for schedule(dynamic)
        for (long record = 0; record < records; record++) {
            if (failed) continue;
            std::memset(tiles, 0, tiles_size * sizeof(float));
            for (long copy = record * copies; copy < (record + 1) * copies; copy++)
                add_input(x + copy * s.height * s.width * s.inputs, dy + copy * s.high * s.wide * s.outputs, s, input, slopes,
                          tiles);
            squares[record] = put(tiles, s, g + record * s.outputs * taps * s.inputs);
        }
        std::free(input), std::free(slopes), std::free(tiles);
    }
    return failed;
}
