// What the kernels share: 16 channels at a time, in the compiler's vector types; scratch memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;    // floats in a register
constexpr int kColumns = 14;  // convolution outputs held in registers
constexpr int kTaps = 5;      // vectors of a row of weights whose gradients are held in registers
#elif defined(__AVX__)
constexpr int kWidth = 8, kColumns = 6, kTaps = 2;
#else
constexpr int kWidth = 4, kColumns = 5, kTaps = 4;
#endif
constexpr int kLanes = 16, kParts = kLanes / kWidth;

typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef float Unaligned __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));
typedef uint8_t Octets __attribute__((vector_size(kWidth), aligned(1), may_alias));
typedef int32_t UnalignedIntegers __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

struct Lanes {  // 16 channels
  Vector part[kParts];
};

inline Lanes load(const float* from) {
  Lanes lanes;
  for (int i = 0; i < kParts; i++) lanes.part[i] = *(const Unaligned*)(from + i * kWidth);
  return lanes;
}

inline void store(float* to, const Lanes& lanes) {
  for (int i = 0; i < kParts; i++) *(Unaligned*)(to + i * kWidth) = lanes.part[i];
}

inline void zero(Lanes& lanes) {
  for (int i = 0; i < kParts; i++) lanes.part[i] = Vector{};
}

inline void add(Lanes& sum, const Lanes& more) {
  for (int i = 0; i < kParts; i++) sum.part[i] += more.part[i];
}

inline void add_product(Lanes& sum, const Lanes& a, const Lanes& b) {
  for (int i = 0; i < kParts; i++) sum.part[i] += a.part[i] * b.part[i];
}

inline void add_product(Lanes& sum, const Lanes& a, float b) {
  for (int i = 0; i < kParts; i++) sum.part[i] += a.part[i] * b;
}

// Calls work(std::integral_constant<int, n>, first) for parts of 0 … total-1 that are at most kMost long
// and as even as can be: each n has code of its own, with everything in registers.
template <int kMost, class Work>
inline void in_parts(int total, Work work) {
  int parts = (total + kMost - 1) / kMost, first = 0;
  for (int i = 0; i < parts; i++) {
    int size = (total - first + parts - i - 1) / (parts - i);
    auto call = [&]<int... n>(std::integer_sequence<int, n...>) {
      ((size == n + 1 ? work(std::integral_constant<int, n + 1>(), first) : void()), ...);
    };
    call(std::make_integer_sequence<int, kMost>());
    first += size;
  }
}

struct Scratch {  // memory of one call, in aligned pieces
  std::unique_ptr<char[]> memory;
  char* next;
  explicit Scratch(size_t bytes) : memory(new char[bytes + 1024]), next(memory.get()) {}
  template <class T>
  T* take(size_t count) {
    next = (char*)(((uintptr_t)next + 63) & ~(uintptr_t)63);
    T* found = (T*)next;
    next += count * sizeof(T);
    return found;
  }
};

using Floats = ffi::Buffer<ffi::F32>;
using Bytes = ffi::Buffer<ffi::U8>;
using FloatsOut = ffi::Result<Floats>;
using BytesOut = ffi::Result<Bytes>;

int64_t product(ffi::Span<const int64_t> dims, size_t count) {
  int64_t total = 1;
  for (size_t i = 0; i < count; i++) total *= dims[i];
  return total;
}

}  // namespace
