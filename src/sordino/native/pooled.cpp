// A convolution, the largest of every p x p window of its output, and max(., 0), forward and back, record by record.
//
// Images lie channels last. Forward, a row of positions is computed at a time, output channels in the lanes of vectors,
// and pooled while it is in the cache; what stays is the pooled output and which position of a window it came from.
// Backward, the gradient of the convolution's output has one number at most for every window and channel. Only those
// are multiplied: a quarter of the products at p = 2. A record's gradient of the weights is one list of (number, patch)
// an output channel, added up in registers straight from the image; the gradient of the input is one list of (number,
// kernel) a position.

#include "convolve.h"
#include "unpool.h"

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
