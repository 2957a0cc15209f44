// Group normalisation of single records: y = scale*(x - mean)/deviation + shift, with mean and deviation over a group of
// channels, and the way back: the gradient of x, and every record's gradients of scale and shift.
//
// A record is [positions, channels] (channels last) or [channels, positions]. Sums are float over at most SOME numbers
// and double beyond.

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace {

constexpr long SOME = 32;  // positions whose sums are float
constexpr long LANES = 64; // channels that are summed at once: they stay in registers

// sums[c] += the sum over positions of f(position, channel), channels last.
template <class F> void add_last(long positions, long channels, double *sums, F value) {
    for (long first = 0; first < channels; first += LANES) {
        const long lanes = std::min(LANES, channels - first);
        for (long start = 0; start < positions; start += SOME) {
            const long end = std::min(positions, start + SOME);
            float part[LANES] = {0};
            if (lanes == LANES) {
                for (long t = start; t < end; t++)
#pragma omp simd
                    for (long c = 0; c < LANES; c++) part[c] += value(t * channels + first + c, first + c);
            } else {
                for (long t = start; t < end; t++)
                    for (long c = 0; c < lanes; c++) part[c] += value(t * channels + first + c, first + c);
            }
            for (long c = 0; c < lanes; c++) sums[first + c] += part[c];
        }
    }
}

// The same with channels first.
template <class F> void add_first(long positions, long channels, double *sums, F value) {
    for (long c = 0; c < channels; c++)
        for (long start = 0; start < positions; start += SOME) {
            float part = 0;
            const long end = std::min(positions, start + SOME);
#pragma omp simd reduction(+ : part)
            for (long t = start; t < end; t++) part += value(c * positions + t, c);
            sums[c] += part;
        }
}

template <class F> void add(bool last, long positions, long channels, double *sums, F value) {
    std::fill(sums, sums + channels, 0.0);
    last ? add_last(positions, channels, sums, value) : add_first(positions, channels, sums, value);
}

// Write f(position, channel) everywhere.
template <class F> void each(bool last, long positions, long channels, float *out, F value) {
    if (last) {
        for (long t = 0; t < positions; t++)
#pragma omp simd
            for (long c = 0; c < channels; c++) out[t * channels + c] = value(t * channels + c, c);
    } else {
        for (long c = 0; c < channels; c++)
#pragma omp simd
            for (long t = 0; t < positions; t++) out[c * positions + t] = value(c * positions + t, c);
    }
}

}  // namespace

// x, out[records, ..]; means, inverses[records, groups]; scale, shift[channels] or null.
extern "C" void normalise(const float *x, const float *scale, const float *shift, long records, long channels,
                          long positions, long groups, long last, double eps, float *out, float *means, float *inverses,
                          long threads) {
    const long wide = channels / groups, size = channels * positions;
#pragma omp parallel num_threads(threads)
    {
        double *sums = (double *)std::malloc(channels * sizeof(double));
        float *mean = (float *)std::malloc(3 * channels * sizeof(float)), *a = mean + channels, *b = a + channels;
#pragma omp for schedule(static)
        for (long record = 0; record < records; record++) {
            const float *own = x + record * size;
            add(last, positions, channels, sums, [=](long at, long) { return own[at]; });
            for (long g = 0; g < groups; g++) {
                double total = 0;
                for (long c = g * wide; c < (g + 1) * wide; c++) total += sums[c];
                const float found = (float)(total / (wide * positions));
                means[record * groups + g] = found;
                std::fill(mean + g * wide, mean + (g + 1) * wide, found);
            }
            add(last, positions, channels, sums, [=](long at, long c) { return (own[at] - mean[c]) * (own[at] - mean[c]); });
            for (long g = 0; g < groups; g++) {
                double total = 0;
                for (long c = g * wide; c < (g + 1) * wide; c++) total += sums[c];
                const float inverse = (float)(1.0 / std::sqrt(total / (wide * positions) + eps));
                inverses[record * groups + g] = inverse;
                for (long c = g * wide; c < (g + 1) * wide; c++) {
                    a[c] = inverse * (scale ? scale[c] : 1.0f);
                    b[c] = shift ? shift[c] : 0.0f;
                }
            }
            each(last, positions, channels, out + record * size, [=](long at, long c) { return a[c] * (own[at] - mean[c]) + b[c]; });
        }
        std::free(sums), std::free(mean);
    }
}

// dx[records, ..], and of every record the gradients of scale and shift, [records, channels] each.
extern "C" void normalise_back(const float *dy, const float *x, const float *means, const float *inverses, const float *scale,
                               long records, long channels, long positions, long groups, long last, float *dx,
                               float *dscale, float *dshift, long threads) {
    const long wide = channels / groups, size = channels * positions;
#pragma omp parallel num_threads(threads)
    {
        double *along = (double *)std::malloc(2 * channels * sizeof(double)), *flat = along + channels;
        float *mean = (float *)std::malloc(4 * channels * sizeof(float)), *a = mean + channels, *e = a + channels, *f = e + channels;
#pragma omp for schedule(static)
        for (long record = 0; record < records; record++) {
            const float *own = x + record * size, *slopes = dy + record * size;
            for (long c = 0; c < channels; c++) mean[c] = means[record * groups + c / wide];
            add(last, positions, channels, flat, [=](long at, long) { return slopes[at]; });
            add(last, positions, channels, along, [=](long at, long c) { return slopes[at] * (own[at] - mean[c]); });
            for (long g = 0; g < groups; g++) {
                const double inverse = inverses[record * groups + g];
                double level = 0, tilt = 0;
                for (long c = g * wide; c < (g + 1) * wide; c++) {
                    const double s = scale ? scale[c] : 1.0;
                    along[c] *= inverse;
                    level += s * flat[c];
                    tilt += s * along[c];
                    a[c] = (float)(s * inverse);
                    dscale[record * channels + c] = (float)along[c];
                    dshift[record * channels + c] = (float)flat[c];
                }
                const double count = wide * positions;
                std::fill(e + g * wide, e + (g + 1) * wide, (float)(-tilt / count * inverse * inverse));
                std::fill(f + g * wide, f + (g + 1) * wide, (float)(-level / count * inverse));
            }
            if (dx)
                each(last, positions, channels, dx + record * size,
                     [=](long at, long c) { return a[c] * slopes[at] + (e[c] * (own[at] - mean[c]) + f[c]); });
        }
        std::free(along), std::free(mean);
    }
}
