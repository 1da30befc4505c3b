// Convolution of images [height, width, channels] with weights [rows, columns, channels / groups,
// outputs], any stride, dilation, padding and groups, and its two gradients.
//
// Forward and the gradient of the images are one function: a pixel of the result is a sum over
// taps, each a pixel of the source times a matrix of weights. A tile of results stays in registers:
// up to 8 pixels times 32 channels. Its pixels lie side by side in a row; where rows are short, at
// one place in several images of the batch, so that no product is with padding.

#include <vector>

#include "vectors.h"

namespace {

constexpr int kBlocks = kWidth == 16 ? 2 : 1;  // of 16 channels in a tile
constexpr int kPixels = std::min(kColumns, 8);  // and pixels: more make no difference, but more code
constexpr int kShortRow = 8;                   // pixels: up to here a tile goes through the batch

int blocks_of(int channels) { return (channels + kLanes - 1) / kLanes; }

int ceil_div(int a, int b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }

struct Axis {  // rows or columns
  int inputs, outputs, taps, stride, dilation, pad;

  // Where a tap of output `to` reads: an input, which may lie outside.
  int input(int to, int tap) const { return to * stride + tap * dilation - pad; }

  // Outputs for which this tap reads inside: first … end - 1.
  int first(int tap) const { return std::clamp(ceil_div(pad - tap * dilation, stride), 0, outputs); }
  int end(int tap) const { return std::clamp(ceil_div(inputs + pad - tap * dilation, stride), first(tap), outputs); }
};

struct Layer {
  int64_t clients, batch;
  Axis y, x;
  int channels, outputs, groups;
  int64_t image, result, weights;

  bool depthwise() const { return groups > 1 && groups == channels && groups == outputs; }
};

// A convolution from a source to a result: the layer itself, or backwards from gradients to images.
struct Pass {
  const Layer& layer;
  bool backward;
  int height, width, channels, to_height, to_width, to_channels;  // of source and result
  int step, to_step;  // columns from pixel to pixel of a tile
  int per_group, to_per_group;

  Pass(const Layer& layer, bool backward)
      : layer(layer), backward(backward), height(layer.y.inputs), width(layer.x.inputs), channels(layer.channels),
        to_height(layer.y.outputs), to_width(layer.x.outputs), to_channels(layer.outputs), step(layer.x.stride), to_step(1) {
    if (backward) {
      std::swap(height, to_height), std::swap(width, to_width), std::swap(channels, to_channels);
      std::swap(step, to_step);
    }
    per_group = channels / layer.groups, to_per_group = to_channels / layer.groups;
  }

  // The pixel that a tap of result `to` reads along an axis, if there is one.
  bool source(const Axis& axis, int to, int tap, int& from) const {
    if (!backward) return from = axis.input(to, tap), true;
    const int place = to + axis.pad - tap * axis.dilation;
    from = place >= 0 ? place / axis.stride : -(-place / axis.stride);
    return from * axis.stride == place;
  }

  // Taps in the order in which they read the source.
  int tap(const Axis& axis, int i) const { return backward ? axis.taps - 1 - i : i; }
};

struct Tap {
  int64_t source, weights;  // places in memory
  int count;                // numbers of the source, one after the other
};

inline void store_some(float* to, const Lanes& lanes, int count) {
  if (count >= kLanes) return store(to, lanes);
  float all[kLanes];
  store(all, lanes);
  std::memcpy(to, all, count * sizeof(float));
}

inline Lanes load_some(const float* from, int count) {
  if (count >= kLanes) return load(from);
  float all[kLanes] = {};
  std::memcpy(all, from, count * sizeof(float));
  return load(all);
}

// n pixels, v blocks of 16 channels: all taps, each a row of the source times rows of weights.
template <int n, int v>
__attribute__((noinline)) void dense(const Tap* tap, const Tap* end, const float* source, int64_t step, const float* weights, float* to,
                  int64_t to_step, int lanes) {
  Lanes sums[n][v];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++)
#pragma GCC unroll 2
    for (int j = 0; j < v; j++) zero(sums[i][j]);
  for (; tap < end; tap++) {
    const float *from = source + tap->source, *weight = weights + tap->weights * (v * kLanes);
    for (int k = 0; k < tap->count; k++, from++, weight += v * kLanes) {
      Lanes row[v];
#pragma GCC unroll 2
      for (int j = 0; j < v; j++) row[j] = load(weight + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < n; i++)
#pragma GCC unroll 2
        for (int j = 0; j < v; j++) add_product(sums[i][j], row[j], from[i * step]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; i++)
#pragma GCC unroll 2
    for (int j = 0; j < v; j++) store_some(to + i * to_step + j * kLanes, sums[i][j], lanes - j * kLanes);
}

// The same where every channel is by itself: 16 of them, taps with a row of 16 weights.
template <int n, bool whole>
__attribute__((noinline)) void alone(const Tap* tap, const Tap* end, const float* source, int64_t step, const float* weights, float* to,
                  int64_t to_step, int lanes) {
  Lanes sums[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) zero(sums[i]);
  for (; tap < end; tap++) {
    const float* from = source + tap->source;
    const Lanes weight = load(weights + tap->weights * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) add_product(sums[i], load_some(from + i * step, whole ? kLanes : lanes), weight);
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) store_some(to + i * to_step, sums[i], whole ? kLanes : lanes);
}

// Weights as [groups][blocks][taps][source channels][16 result channels]; v blocks that are used
// together lie side by side, zero where there is no channel.
void pack(const Pass& pass, const float* kernel, float* packed) {
  const Layer& layer = pass.layer;
  const int taps = layer.y.taps * layer.x.taps, from = pass.per_group, to = pass.to_per_group;
  const int inner = layer.channels / layer.groups, outer = layer.outputs / layer.groups;
  for (int group = 0; group < layer.groups; group++)
    in_parts<kBlocks>(blocks_of(to), [&](auto v, int first) {
      for (int tap = 0; tap < taps; tap++) {
        const float* weights = kernel + (int64_t)(pass.backward ? taps - 1 - tap : tap) * inner * layer.outputs + group * outer;
        for (int k = 0; k < from; k += kLanes)  // 16x16 at a time: lines of the cache are read once
          for (int j = 0; j < v(); j++) {
            const int rows = std::min(kLanes, from - k), start = (first + j) * kLanes, lanes = std::min(kLanes, to - start);
            float square[kLanes][kLanes] = {};
            if (pass.backward)
              for (int l = 0; l < lanes; l++) std::memcpy(square[l], weights + (int64_t)(start + l) * layer.outputs + k, 4 * rows);
            else
              for (int i = 0; i < rows; i++) std::memcpy(square[i], weights + (int64_t)(k + i) * layer.outputs + start, 4 * lanes);
            for (int i = 0; i < rows; i++) {
              float* at = packed + ((k + i) * v() + j) * kLanes;
              for (int l = 0; l < kLanes; l++) at[l] = pass.backward ? square[l][i] : square[i][l];
            }
          }
        packed += from * v() * kLanes;
      }
    });
}

// An image with zeros at both ends of its rows.
void pad_rows(const float* from, int rows, int row, int left, int right, float* to) {
  for (int y = 0; y < rows; y++, from += row)
    to = std::fill_n(std::copy_n(from, row, std::fill_n(to, left, 0.0f)), right, 0.0f);
}

void run(const Pass& pass, const float* sources, const float* kernel, float* results) {
  const Layer& layer = pass.layer;
  const Axis &ys = layer.y, &xs = layer.x;
  const bool depthwise = layer.depthwise();
  const int taps = ys.taps * xs.taps, channels = pass.channels, to_channels = pass.to_channels;
  const int groups = depthwise ? 1 : layer.groups, to = depthwise ? channels : pass.to_per_group, blocks = blocks_of(to);
  const bool through_batch = !depthwise && pass.to_width <= kShortRow && layer.batch > 1;
  const int64_t image = (int64_t)pass.height * pass.width * channels;
  const int64_t result = (int64_t)pass.to_height * pass.to_width * to_channels;

  int left = 0, right = 0;  // what rows need to be padded with
  for (int first = 0; first < pass.to_step && !through_batch; first++)
    for (int tap = 0, from; tap < xs.taps; tap++)
      if (first < pass.to_width && pass.source(xs, first, tap, from)) {
        const int last = from + (pass.to_width - 1 - first) / pass.to_step * pass.step;
        left = std::max(left, -from), right = std::max(right, last + 1 - pass.width);
      }
  const int width = left + pass.width + right;
  const bool copied = left || right;
  const int64_t packed_size = (int64_t)groups * taps * pass.per_group * blocks * kLanes;
  const int64_t padded_size = copied ? (int64_t)pass.height * width * channels : 0;
  Scratch scratch(4 * (packed_size + padded_size));
  float *packed = scratch.take<float>(packed_size), *padded = scratch.take<float>(padded_size);
  std::vector<Tap> list(taps);

  // Taps of a pixel of the result, those that read one after the other joined.
  auto taps_of = [&](int y, int x, bool exact) {
    int count = 0;
    for (int i = 0, row; i < ys.taps; i++) {
      if (!pass.source(ys, y, pass.tap(ys, i), row) || row < 0 || row >= pass.height) continue;
      for (int j = 0, column; j < xs.taps; j++) {
        if (!pass.source(xs, x, pass.tap(xs, j), column)) continue;
        if (exact && (column < 0 || column >= pass.width)) continue;
        Tap tap{((int64_t)row * width + left + column) * channels, (int64_t)(i * xs.taps + j) * pass.per_group, pass.per_group};
        Tap& last = list[count ? count - 1 : 0];
        if (count && !depthwise && last.source + last.count == tap.source && last.weights + last.count == tap.weights)
          last.count += tap.count;
        else
          list[count++] = tap;
      }
    }
    return count;
  };
  // A tile for all groups and channels: n pixels from these places on.
  auto tiles = [&](auto n, const Tap* end, const float* source, int64_t step, float* place, int64_t to_step) {
    if (depthwise)
      for (int block = 0; block < blocks; block++) {
        auto work = to - block * kLanes >= kLanes ? alone<n(), true> : alone<n(), false>;
        work(list.data(), end, source + block * kLanes, step, packed + block * taps * kLanes, place + block * kLanes, to_step,
             to - block * kLanes);
      }
    else
      for (int group = 0; group < groups; group++)
        in_parts<kBlocks>(blocks, [&](auto v, int first) {
          const float* weights = packed + ((int64_t)group * blocks + first) * kLanes * taps * pass.per_group;
          dense<n(), v()>(list.data(), end, source + group * pass.per_group, step, weights,
                          place + group * to + first * kLanes, to_step, to - first * kLanes);
        });
  };

  for (int64_t client = 0; client < layer.clients; client++) {
    if (depthwise) {
      for (int block = 0; block < blocks; block++)
        for (int tap = 0; tap < taps; tap++) {
          const float* weights = kernel + client * layer.weights + (pass.backward ? taps - 1 - tap : tap) * channels;
          store(packed + (block * taps + tap) * kLanes, load_some(weights + block * kLanes, channels - block * kLanes));
        }
    } else {
      pack(pass, kernel + client * layer.weights, packed);
    }
    const float* source = sources + client * layer.batch * image;
    float* place = results + client * layer.batch * result;
    if (through_batch)
      in_parts<kPixels>(layer.batch, [&](auto n, int first) {
        for (int y = 0; y < pass.to_height; y++)
          for (int x = 0; x < pass.to_width; x++) {
            const Tap* end = list.data() + taps_of(y, x, true);
            float* at = place + first * result + ((int64_t)y * pass.to_width + x) * to_channels;
            tiles(n, end, source + first * image, image, at, result);
          }
      });
    else
      for (int64_t i = 0; i < layer.batch; i++, source += image, place += result) {
        if (copied) pad_rows(source, pass.height, pass.width * channels, left * channels, right * channels, padded);
        for (int y = 0; y < pass.to_height; y++)
          for (int start = 0; start < std::min(pass.to_step, pass.to_width); start++) {
            const Tap* end = list.data() + taps_of(y, start, false);
            const int count = (pass.to_width - start + pass.to_step - 1) / pass.to_step;
            in_parts<kPixels>(count, [&](auto n, int first) {
              float* at = place + ((int64_t)y * pass.to_width + start + first * pass.to_step) * to_channels;
              const float* from = (copied ? padded : source) + (int64_t)first * pass.step * channels;
              tiles(n, end, from, (int64_t)pass.step * channels, at, (int64_t)pass.to_step * to_channels);
            });
          }
      }
  }
}

// --------------------------------------------------------------------------------------- gradient of the weights

// Adds to n rows (channels) and v blocks (outputs) of one tap's gradient, over all pixels that the
// tap reads in these images.
template <int n, int v>
__attribute__((noinline)) void correlate(const Layer& layer, int ky, int kx, const float* images, const float* gradients, int count,
                      float* to, int lanes, bool begin) {
  const Axis &ys = layer.y, &xs = layer.x;
  const int first = xs.first(kx), end = xs.end(kx), step = xs.stride * layer.channels;
  Lanes sums[n][v];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++)
#pragma GCC unroll 2
    for (int j = 0; j < v; j++) {
      zero(sums[i][j]);
      if (!begin) sums[i][j] = load_some(to + (int64_t)i * layer.outputs + j * kLanes, lanes - j * kLanes);
    }
  for (int b = 0; b < count; b++, images += layer.image, gradients += (int64_t)ys.outputs * xs.outputs * v * kLanes)
    for (int y = ys.first(ky); y < ys.end(ky); y++) {
      const float* image = images + ((int64_t)ys.input(y, ky) * xs.inputs + xs.input(first, kx)) * layer.channels;
      const float* gradient = gradients + (int64_t)(y * xs.outputs + first) * v * kLanes;
      for (int x = first; x < end; x++, image += step, gradient += v * kLanes) {
        Lanes row[v];
#pragma GCC unroll 2
        for (int j = 0; j < v; j++) row[j] = load(gradient + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < n; i++)
#pragma GCC unroll 2
          for (int j = 0; j < v; j++) add_product(sums[i][j], row[j], image[i]);
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < n; i++)
#pragma GCC unroll 2
    for (int j = 0; j < v; j++)
      store_some(to + (int64_t)i * layer.outputs + j * kLanes, sums[i][j], lanes - j * kLanes);
}

void weight_gradient(const Layer& layer, const float* images, const float* gradients, float* kernel) {
  const int pixels = layer.y.outputs * layer.x.outputs, inner = layer.channels / layer.groups;
  const int outer = layer.outputs / layer.groups;
  const int chunk = std::min<int64_t>(layer.batch, std::max(1, 1024 / std::max(1, pixels)));  // images
  Scratch scratch(4 * (size_t)chunk * pixels * kBlocks * kLanes);
  float* packed = scratch.take<float>((size_t)chunk * pixels * kBlocks * kLanes);
  for (int64_t client = 0; client < layer.clients; client++, kernel += layer.weights)
    for (int64_t start = 0; start < layer.batch; start += chunk) {
      const int count = std::min<int64_t>(chunk, layer.batch - start);
      const float* image = images + (client * layer.batch + start) * layer.image;
      const float* gradient = gradients + (client * layer.batch + start) * layer.result;
      for (int group = 0; group < layer.groups; group++)
        in_parts<kBlocks>(blocks_of(outer), [&](auto v, int block) {
          const int lanes = std::min(outer - block * kLanes, v() * kLanes), output = group * outer + block * kLanes;
          for (int64_t p = 0; p < (int64_t)count * pixels; p++)
            for (int j = 0; j < v(); j++)
              store(packed + (p * v() + j) * kLanes, load_some(gradient + p * layer.outputs + output + j * kLanes, lanes - j * kLanes));
          for (int ky = 0; ky < layer.y.taps; ky++)
            for (int kx = 0; kx < layer.x.taps; kx++)
              in_parts<kPixels>(inner, [&](auto n, int first) {
                float* to = kernel + ((int64_t)(ky * layer.x.taps + kx) * inner + first) * layer.outputs + output;
                correlate<n(), v()>(layer, ky, kx, image + group * inner + first, packed, count, to, lanes, start == 0);
              });
        });
    }
}

// Adds to one tap's gradient where every channel is by itself: up to 16 of them, in n images at once.
template <int n, bool whole>
__attribute__((noinline)) void correlate_alone(const Layer& layer, int ky, int kx, const float* images, const float* gradients,
                                               float* to, int lanes, bool begin) {
  const Axis &ys = layer.y, &xs = layer.x;
  Lanes sums[n], total;
#pragma GCC unroll 4
  for (int i = 0; i < n; i++) zero(sums[i]);
  for (int y = ys.first(ky); y < ys.end(ky); y++)
    for (int x = xs.first(kx); x < xs.end(kx); x++) {
      const float* image = images + ((int64_t)ys.input(y, ky) * xs.inputs + xs.input(x, kx)) * layer.channels;
      const float* gradient = gradients + ((int64_t)y * xs.outputs + x) * layer.channels;
#pragma GCC unroll 4
      for (int i = 0; i < n; i++)
        add_product(sums[i], load_some(image + i * layer.image, whole ? kLanes : lanes),
                    load_some(gradient + i * layer.result, whole ? kLanes : lanes));
    }
  zero(total);
  if (!begin) total = load_some(to, lanes);
#pragma GCC unroll 4
  for (int i = 0; i < n; i++) add(total, sums[i]);
  store_some(to, total, lanes);
}

void weight_gradient_alone(const Layer& layer, const float* images, const float* gradients, float* kernel) {
  const int channels = layer.channels;
  for (int64_t client = 0; client < layer.clients; client++, kernel += layer.weights)
    in_parts<4>(layer.batch, [&](auto n, int first) {
      const float* image = images + (client * layer.batch + first) * layer.image;
      const float* gradient = gradients + (client * layer.batch + first) * layer.result;
      for (int block = 0; block < channels; block += kLanes)
        for (int ky = 0; ky < layer.y.taps; ky++)
          for (int kx = 0; kx < layer.x.taps; kx++) {
            auto work = channels - block >= kLanes ? correlate_alone<n(), true> : correlate_alone<n(), false>;
            work(layer, ky, kx, image + block, gradient + block, kernel + (ky * layer.x.taps + kx) * channels + block,
                 channels - block, first == 0);
          }
    });
}

// --------------------------------------------------------------------------------------- handlers

// images […, batch, height, width, channels], kernel […, rows, columns, channels / groups, outputs],
// result […, batch, rows, columns, outputs]; numbers: strides, dilation, padding before, groups.
template <class Work>
ffi::Error with_layer(Floats& images, Floats& kernel, Floats& result, ffi::Span<const int64_t> numbers, Work work) {
  const auto in = images.dimensions(), weights = kernel.dimensions(), out = result.dimensions();
  const size_t rank = in.size();
  if (rank < 4 || weights.size() != rank || out.size() != rank || numbers.size() != 7)
    return ffi::Error::InvalidArgument("a convolution takes images, weights and seven numbers");
  auto axis = [&](int i) {
    return Axis{(int)in[rank - 3 + i], (int)out[rank - 3 + i], (int)weights[rank - 4 + i],
                (int)numbers[i], (int)numbers[2 + i], (int)numbers[4 + i]};
  };
  Layer layer{product(in, rank - 4), in[rank - 4], axis(0), axis(1), (int)in[rank - 1], (int)out[rank - 1], (int)numbers[6]};
  layer.image = in[rank - 3] * in[rank - 2] * in[rank - 1];
  layer.result = out[rank - 3] * out[rank - 2] * out[rank - 1];
  layer.weights = weights[rank - 4] * weights[rank - 3] * weights[rank - 2] * weights[rank - 1];
  try {
    work(layer);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory in a convolution");
  }
  return ffi::Error::Success();
}

ffi::Error forward_handler(Floats images, Floats kernel, FloatsOut out, ffi::Span<const int64_t> numbers) {
  return with_layer(images, kernel, *out, numbers, [&](const Layer& layer) {
    run(Pass(layer, false), images.typed_data(), kernel.typed_data(), out->typed_data());
  });
}

ffi::Error input_gradient_handler(Floats kernel, Floats gradient, FloatsOut images, ffi::Span<const int64_t> numbers) {
  return with_layer(*images, kernel, gradient, numbers, [&](const Layer& layer) {
    run(Pass(layer, true), gradient.typed_data(), kernel.typed_data(), images->typed_data());
  });
}

ffi::Error weight_gradient_handler(Floats images, Floats gradient, FloatsOut kernel, ffi::Span<const int64_t> numbers) {
  return with_layer(images, *kernel, gradient, numbers, [&](const Layer& layer) {
    auto work = layer.depthwise() ? weight_gradient_alone : weight_gradient;
    work(layer, images.typed_data(), gradient.typed_data(), kernel->typed_data());
  });
}

}  // namespace

#define CONVOLUTION(Name, handler)            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name, handler, \
                                ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>().Attr<ffi::Span<const int64_t>>("numbers"))
CONVOLUTION(Conv, forward_handler);
CONVOLUTION(ConvInputGradient, input_gradient_handler);
CONVOLUTION(ConvWeightGradient, weight_gradient_handler);
