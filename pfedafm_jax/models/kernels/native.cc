// What XLA does badly on a CPU, for JAX's foreign function interface: convolution 5x5 with bias,
// ReLU and max-pooling 2x2, its gradients, and the step of SGD.
//
// Every kernel works on 16 channels at a time, held in one AVX-512 register, two of AVX2 or four of
// anything narrower; the compiler's vector types spell all three. Images are [height, width,
// channels], weights [5, 5, channels, outputs]; leading axes are clients (from vmap) and the batch.
// A kernel has no threads, no state and allocates once a call: there is one device per core.
//
// Of the four convolution outputs under a pooled pixel the first largest one, or the first NaN, in
// reading order is the winner: it alone has a gradient, and none where ReLU gave zero. So three
// quarters of the dense products of a gradient, and more where ReLU is zero, need not be computed.
// No -ffast-math: NaN must pass, so that a client that diverged is seen.

#include "vectors.h"

namespace {

constexpr uint8_t kDead = 4;  // the winner where ReLU gave zero; otherwise its place, 0 to 3

struct Shape {
  int64_t clients, batch;
  int height, width, channels, outputs;
  int rows, columns;   // of pooled pixels
  int blocks;          // of 16 outputs
  int row, taps;       // numbers of an image's row, and of those under a row of the kernel
  int64_t image, pooled, weights;

  Shape(int64_t clients, int64_t batch, int64_t height, int64_t width, int64_t channels, int64_t outputs)
      : clients(clients), batch(batch), height(height), width(width), channels(channels), outputs(outputs),
        rows(height / 2 - 2), columns(width / 2 - 2), blocks((outputs + kLanes - 1) / kLanes),
        row(width * channels), taps(5 * channels), image(height * width * channels),
        pooled((int64_t)rows * columns * outputs), weights(25 * channels * outputs) {}

  int lanes(int block) const { return std::min(kLanes, outputs - block * kLanes); }
};

// --------------------------------------------------------------------------------------- forward

// Outputs first … first+n-1 of one row of the convolution, for 16 channels: to[n][16].
template <int n>
inline void convolve(const Shape& shape, const float* image, const float* weights, float* to) {
  Lanes sums[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) zero(sums[i]);
  const int channels = shape.channels, taps = shape.taps;
  for (int dy = 0; dy < 5; dy++, image += shape.row) {
    const float* input = image;
    for (int tap = 0; tap < taps; tap++, input++, weights += kLanes) {
      Lanes weight = load(weights);
#pragma GCC unroll 16
      for (int i = 0; i < n; i++) add_product(sums[i], weight, input[i * channels]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) store(to + i * kLanes, sums[i]);
}

// One row of pooled pixels from two rows of the convolution, [2][2 * columns][16].
inline void pool(const Shape& shape, const float* upper, const Lanes& bias, int lanes, float* out, uint8_t* winners) {
  const float* lower = upper + 2 * shape.columns * kLanes;
  for (int x = 0; x < shape.columns; x++, upper += 2 * kLanes, lower += 2 * kLanes) {
    float values[kLanes];
    uint8_t places[kLanes];
    for (int i = 0; i < kParts; i++) {
      auto at = [&](const float* from) { return *(const Unaligned*)(from + i * kWidth); };
      Vector a = at(upper), b = at(upper + kLanes), c = at(lower), d = at(lower + kLanes);
      Integers zeros{}, ones = zeros + 1, twos = zeros + 2, threes = zeros + 3;
      Integers first = (a >= b) | (a != a), third = (c >= d) | (c != c);
      Vector top = first ? a : b, bottom = third ? c : d;
      Integers above = (top >= bottom) | (top != top);
      Vector value = (above ? top : bottom) + bias.part[i];
      Integers place = above ? (first ? zeros : ones) : (third ? twos : threes);
      Integers dead = value <= Vector{};
      *(Unaligned*)(values + i * kWidth) = dead ? Vector{} : value;
      place = dead ? zeros + kDead : place;
      *(Octets*)(places + i * kWidth) = __builtin_convertvector(place, Octets);
    }
    if (lanes == kLanes) {
      std::memcpy(out, values, sizeof values);
      std::memcpy(winners, places, sizeof places);
    } else {
      std::memcpy(out, values, lanes * sizeof(float));
      std::memcpy(winners, places, lanes);
    }
    out += shape.outputs, winners += shape.outputs;
  }
}

// Weights [25 * channels, outputs] as [blocks][25 * channels][16], zero where there is no output.
inline void pack(const Shape& shape, const float* weights, float* packed) {
  const int rows = 25 * shape.channels;
  for (int block = 0; block < shape.blocks; block++)
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < kLanes; j++, packed++) {
        int output = block * kLanes + j;
        *packed = output < shape.outputs ? weights[(int64_t)i * shape.outputs + output] : 0.0f;
      }
}

void forward(const Shape& shape, const float* images, const float* kernel, const float* bias, float* out, uint8_t* winners) {
  const int columns = 2 * shape.columns;
  const size_t block_weights = 25 * shape.channels * kLanes;
  Scratch scratch(4 * (shape.blocks * (block_weights + kLanes) + 2 * columns * kLanes));
  float* packed = scratch.take<float>(shape.blocks * block_weights);
  float* biases = scratch.take<float>(shape.blocks * kLanes);
  float* rows = scratch.take<float>(2 * columns * kLanes);
  for (int64_t client = 0; client < shape.clients; client++) {
    pack(shape, kernel + client * shape.weights, packed);
    std::fill(biases, biases + shape.blocks * kLanes, 0.0f);
    std::copy(bias + client * shape.outputs, bias + (client + 1) * shape.outputs, biases);
    for (int64_t i = client * shape.batch; i < (client + 1) * shape.batch; i++)
      for (int block = 0; block < shape.blocks; block++) {
        const float* weights = packed + block * block_weights;
        const Lanes shift = load(biases + block * kLanes);
        for (int y = 0; y < shape.rows; y++) {
          for (int r = 0; r < 2; r++) {
            const float* image = images + i * shape.image + (2 * y + r) * shape.row;
            in_parts<kColumns>(columns, [&](auto n, int first) {
              convolve<n()>(shape, image + first * shape.channels, weights, rows + (r * columns + first) * kLanes);
            });
          }
          int64_t at = i * shape.pooled + (int64_t)y * shape.columns * shape.outputs + block * kLanes;
          pool(shape, rows, shift, shape.lanes(block), out + at, winners + at);
        }
      }
  }
}

// --------------------------------------------------------------------------------------- gradient of the weights

struct Living {  // a gradient that is not zero by ReLU, and the place in memory that it belongs to
  int32_t place;
  float gradient;
};

// Adds to the gradients of one output's weights, 5 rows of n vectors: gradient times the numbers of
// the image that its winner had seen, over all living pixels.
template <int width, int n>
inline void correlate(const float* image, int row, const Living* pixel, const Living* end, float* to, int stride) {
  typedef float Part __attribute__((vector_size(4 * width)));
  typedef float Load __attribute__((vector_size(4 * width), aligned(4), may_alias));
  Part sums[5][n];
#pragma GCC unroll 5
  for (int dy = 0; dy < 5; dy++)
#pragma GCC unroll 5
    for (int i = 0; i < n; i++) sums[dy][i] = *(const Load*)(to + dy * stride + i * width);
  for (; pixel < end; pixel++) {
    const float* from = image + pixel->place;
#pragma GCC unroll 5
    for (int dy = 0; dy < 5; dy++)
#pragma GCC unroll 5
      for (int i = 0; i < n; i++)
        sums[dy][i] += *(const Load*)(from + (int64_t)dy * row + i * width) * pixel->gradient;
  }
#pragma GCC unroll 5
  for (int dy = 0; dy < 5; dy++)
#pragma GCC unroll 5
    for (int i = 0; i < n; i++) *(Load*)(to + dy * stride + i * width) = sums[dy][i];
}

inline bool all_zero(const float* values, int64_t count) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t one;
    std::memcpy(&one, values + i, 4);
    bits |= one << 1;  // -0 is zero too
  }
  return bits == 0;
}

template <int width>
void weight_gradient(const Shape& shape, const float* images, const uint8_t* winners, const float* gradients,
                     float* kernel_gradient, float* bias_gradient) {
  const int pixels = shape.rows * shape.columns, outputs = shape.outputs;
  const int vectors = (shape.taps + width - 1) / width, stride = vectors * width;
  const size_t sums_size = (size_t)outputs * 5 * stride;
  Scratch scratch(4 * (sums_size + shape.image + kLanes + outputs + pixels) + sizeof(Living) * (pixels + 1));
  float* sums = scratch.take<float>(sums_size);  // [outputs][5][stride]: whole vectors, the rest is not used
  float* image = scratch.take<float>(shape.image + kLanes);  // what is read beyond its end goes there
  float* bias_sums = scratch.take<float>(outputs);
  int32_t* corners = scratch.take<int32_t>(pixels);
  Living* living = scratch.take<Living>(pixels + 1);
  const int32_t offsets[5] = {0, shape.channels, shape.row, shape.row + shape.channels, 0};
  for (int p = 0; p < pixels; p++)
    corners[p] = 2 * (p / shape.columns) * shape.row + 2 * (p % shape.columns) * shape.channels;
  std::fill(image + shape.image, image + shape.image + kLanes, 0.0f);
  for (int64_t client = 0; client < shape.clients; client++) {
    std::fill(sums, sums + sums_size, 0.0f);
    std::fill(bias_sums, bias_sums + outputs, 0.0f);
    for (int64_t i = client * shape.batch; i < (client + 1) * shape.batch; i++) {
      const float* gradient = gradients + i * shape.pooled;
      const uint8_t* winner = winners + i * shape.pooled;
      if (all_zero(gradient, shape.pooled)) continue;  // padding of a batch
      std::copy(images + i * shape.image, images + (i + 1) * shape.image, image);
      for (int output = 0; output < outputs; output++) {
        int count = 0;
        float bias_sum = 0;
        for (int p = 0; p < pixels; p++) {
          const int at = p * outputs + output, place = winner[at];
          living[count] = {corners[p] + offsets[place], gradient[at]};
          bias_sum += place == kDead ? 0.0f : gradient[at];
          count += place != kDead;
        }
        bias_sums[output] += bias_sum;
        in_parts<kTaps>(vectors, [&](auto n, int first) {
          float* to = sums + (size_t)output * 5 * stride + first * width;
          correlate<width, n()>(image + first * width, shape.row, living, living + count, to, stride);
        });
      }
    }
    float* to = kernel_gradient + client * shape.weights;
    for (int dy = 0; dy < 5; dy++)
      for (int tap = 0; tap < shape.taps; tap++)
        for (int output = 0; output < outputs; output++) *to++ = sums[((size_t)output * 5 + dy) * stride + tap];
    std::copy(bias_sums, bias_sums + outputs, bias_gradient + client * outputs);
  }
}

// --------------------------------------------------------------------------------------- gradient of the images

void input_gradient(const Shape& shape, const float* kernel, const uint8_t* winners, const float* gradients, float* out) {
  const int pixels = shape.rows * shape.columns, outputs = shape.outputs;
  const int blocks = (shape.channels + kLanes - 1) / kLanes, line = shape.width * kLanes;
  const size_t row_weights = (size_t)outputs * 5 * kLanes, plane = (size_t)shape.height * line;
  Scratch scratch(4 * (blocks * 5 * row_weights + plane + 5 * pixels) + 5 * sizeof(Living) * (size_t)pixels * outputs);
  float* packed = scratch.take<float>(blocks * 5 * row_weights);  // [blocks][5 rows][outputs][5 columns][16]
  float* sums = scratch.take<float>(plane);                       // [height][width][16]
  Living* living = scratch.take<Living>((size_t)5 * pixels * outputs);  // [pixels][5 winners][outputs]: place of weights
  int32_t* counts = scratch.take<int32_t>(5 * pixels);
  for (int64_t client = 0; client < shape.clients; client++) {
    float* to = packed;
    for (int block = 0; block < blocks; block++)
      for (int dy = 0; dy < 5; dy++)
        for (int output = 0; output < outputs; output++)
          for (int dx = 0; dx < 5; dx++)
            for (int j = 0; j < kLanes; j++, to++) {
              int channel = block * kLanes + j;
              int64_t from = ((int64_t)(dy * 5 + dx) * shape.channels + channel) * outputs + output;
              *to = channel < shape.channels ? kernel[client * shape.weights + from] : 0.0f;
            }
    for (int64_t i = client * shape.batch; i < (client + 1) * shape.batch; i++) {
      const float* gradient = gradients + i * shape.pooled;
      const uint8_t* winner = winners + i * shape.pooled;
      float* image = out + i * shape.image;
      if (all_zero(gradient, shape.pooled)) {
        std::fill(image, image + shape.image, 0.0f);
        continue;
      }
      std::fill(counts, counts + 5 * pixels, 0);
      for (int p = 0; p < pixels; p++) {
        Living* lists = living + (size_t)5 * p * outputs;
        for (int output = 0; output < outputs; output++) {
          const int place = winner[p * outputs + output];
          lists[place * outputs + counts[5 * p + place]++] = {output * 5 * kLanes, gradient[p * outputs + output]};
        }
      }
      for (int block = 0; block < blocks; block++) {
        std::fill(sums, sums + plane, 0.0f);
        for (int dy = 0; dy < 5; dy++) {  // a row of weights for all outputs stays in the first cache
          const float* weights = packed + (block * 5 + dy) * row_weights;
          for (int p = 0; p < pixels; p++) {
            float* corner = sums + (2 * (p / shape.columns) + dy) * line + 2 * (p % shape.columns) * kLanes;
            for (int k = 0; k < 4; k++) {
              const Living *entry = living + (size_t)(5 * p + k) * outputs, *end = entry + counts[5 * p + k];
              if (entry == end) continue;
              float* at = corner + (k / 2) * line + (k % 2) * kLanes;
              Lanes five[5];
#pragma GCC unroll 5
              for (int dx = 0; dx < 5; dx++) five[dx] = load(at + dx * kLanes);
              for (; entry < end; entry++) {
                const float* row = weights + entry->place;
#pragma GCC unroll 5
                for (int dx = 0; dx < 5; dx++) add_product(five[dx], load(row + dx * kLanes), entry->gradient);
              }
#pragma GCC unroll 5
              for (int dx = 0; dx < 5; dx++) store(at + dx * kLanes, five[dx]);
            }
          }
        }
        const int lanes = std::min(kLanes, shape.channels - block * kLanes);
        for (int p = 0; p < shape.height * shape.width; p++)
          std::memcpy(image + (int64_t)p * shape.channels + block * kLanes, sums + (int64_t)p * kLanes, 4 * lanes);
      }
    }
  }
}

// --------------------------------------------------------------------------------------- handlers

// images […, batch, height, width, channels], weights […, 5, 5, channels, outputs]
template <class Work>
ffi::Error with_shape(ffi::Span<const int64_t> images, int64_t outputs, Work work) {
  const size_t rank = images.size();
  if (rank < 4 || images[rank - 3] % 2 || images[rank - 2] % 2 || images[rank - 3] < 6 || images[rank - 2] < 6)
    return ffi::Error::InvalidArgument("images must be [..., batch, height, width, channels] with even sides of 6 or more");
  try {
    work(Shape(product(images, rank - 4), images[rank - 4], images[rank - 3], images[rank - 2], images[rank - 1], outputs));
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory in a convolution");
  }
  return ffi::Error::Success();
}

ffi::Error forward_handler(Floats images, Floats kernel, Floats bias, FloatsOut out, BytesOut winners) {
  return with_shape(images.dimensions(), bias.dimensions().back(), [&](const Shape& shape) {
    forward(shape, images.typed_data(), kernel.typed_data(), bias.typed_data(), out->typed_data(), winners->typed_data());
  });
}

ffi::Error weight_gradient_handler(Floats images, Bytes winners, Floats gradient, FloatsOut kernel, FloatsOut bias) {
  return with_shape(images.dimensions(), bias->dimensions().back(), [&](const Shape& shape) {
    // A vector of 16 that is not aligned lies in two lines of the cache; half as long, in one most of the time.
    auto work = shape.channels % kWidth == 0 ? weight_gradient<kWidth> : weight_gradient<std::min(kWidth, 8)>;
    work(shape, images.typed_data(), winners.typed_data(), gradient.typed_data(), kernel->typed_data(),
         bias->typed_data());
  });
}

ffi::Error input_gradient_handler(Floats kernel, Bytes winners, Floats gradient, FloatsOut images) {
  return with_shape(images->dimensions(), kernel.dimensions().back(), [&](const Shape& shape) {
    input_gradient(shape, kernel.typed_data(), winners.typed_data(), gradient.typed_data(), images->typed_data());
  });
}

// --------------------------------------------------------------------------------------- SGD

float sum_of_squares(const float* values, int64_t count) {
  constexpr int kSums = 4 * kLanes;  // independent sums: the compiler may not reorder one
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
    for (int j = 0; j < kSums; j++) sums[j] += values[i + j] * values[i + j];
  for (int j = 0; i < count; i++, j++) sums[j] += values[i] * values[i];
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int j = 0; j < half; j++) sums[j] += sums[j + half];
  return sums[0];
}

// numbers […, 5]: learning rate, momentum, decay, clip norm, active (0: leave everything as it is).
// Then weights, momenta and gradients of every leaf; weights and momenta come back in the same memory.
ffi::Error sgd_handler(Floats numbers, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t leaves = arguments.size() / 3;
  if (arguments.size() != 3 * leaves || results.size() != 2 * leaves)
    return ffi::Error::InvalidArgument("sgd takes weights, momenta and gradients and gives weights and momenta");
  const auto dims = numbers.dimensions();
  const int64_t clients = product(dims, dims.size() - 1);
  for (int64_t client = 0; client < clients; client++) {
    const float* number = numbers.typed_data() + 5 * client;
    const float rate = number[0], momentum = number[1], decay = number[2], clip = number[3];
    float squares = 0;
    for (size_t leaf = 0; leaf < leaves; leaf++) {
      auto gradient = arguments.get<Floats>(2 * leaves + leaf);
      const int64_t size = (int64_t)gradient->element_count() / clients;
      squares += sum_of_squares(gradient->typed_data() + client * size, size);
    }
    const float norm = __builtin_sqrtf(squares);
    const float scale = norm > clip ? clip / norm : (norm == norm ? 1.0f : norm);  // NaN passes
    for (size_t leaf = 0; leaf < leaves; leaf++) {
      auto weights = arguments.get<Floats>(leaf), momenta = arguments.get<Floats>(leaves + leaf);
      auto gradients = arguments.get<Floats>(2 * leaves + leaf);
      auto new_weights = results.get<Floats>(leaf), new_momenta = results.get<Floats>(leaves + leaf);
      const int64_t size = (int64_t)weights->element_count() / clients, first = client * size;
      const float *w = weights->typed_data() + first, *m = momenta->typed_data() + first;
      const float* g = gradients->typed_data() + first;
      float *to_w = (*new_weights)->typed_data() + first, *to_m = (*new_momenta)->typed_data() + first;
      if (number[4] == 0.0f) {
        if (to_w != w) std::copy(w, w + size, to_w);
        if (to_m != m) std::copy(m, m + size, to_m);
        continue;
      }
      // The same place is read and written, never another: no dependence between steps of the loop.
#pragma GCC ivdep
      for (int64_t i = 0; i < size; i++) {
        const float velocity = momentum * m[i] + (g[i] * scale + decay * w[i]);
        to_m[i] = velocity;
        to_w[i] = w[i] - rate * velocity;
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ConvPool, forward_handler,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>().Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ConvPoolWeightGradient, weight_gradient_handler,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Bytes>().Arg<Floats>().Ret<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ConvPoolInputGradient, input_gradient_handler,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Bytes>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Sgd, sgd_handler, ffi::Ffi::Bind().Arg<Floats>().RemainingArgs().RemainingRets());

extern "C" int RegisterWidth() { return kWidth; }
