// stochastic_cast on CUDA: what runs on the GPU, from float32.

#pragma once

#include "../round_number.h"
#include "convert.cuh"
#include "table.cuh"

namespace smart_autocast {
namespace {

constexpr int kWords = 4;
static_assert(kTensorBegin == kWords);

// Philox4x32-10; stochastic_cast.cpp says of what.
__device__ __forceinline__ Vector<uint32_t, kWords> make_words(uint64_t seed, uint64_t counter) {
  auto c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = 0, c3 = 0;
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xd2511f53} * c0, second = uint64_t{0xcd9e8d57} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(second);
    c3 = static_cast<uint32_t>(first);
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return {{c0, c1, c2, c3}};
}

template <typename To>
__device__ __forceinline__ To round_to(float value, uint32_t word, Grid grid, int32_t beyond) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  bits = round_number<!std::is_same_v<To, BFloat16>>(bits, word, grid);
  memcpy(&value, &bits, sizeof(bits));
  return convert<To>(value, beyond);
}

// That a table's elements have: the next table's come after them.
template <int kCapacity>
uint64_t count_counters(const Table<kCapacity>& table) {
  return static_cast<uint64_t>(next_begin(table.total)) / kWords;
}

// `counter` is that of the table's first element; `beyond`: see convert.cuh. Results are aligned as
// the allocator gives memory, and four elements stay together.
template <typename To, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    stochastic_cast_kernel(const __grid_constant__ Table<kCapacity> table, Grid grid,
                           int32_t beyond, uint64_t seed, uint64_t counter) {
  const auto round = [&](const Entry& entry, int64_t first, int64_t place, int count) {
    To* __restrict__ to = static_cast<To*>(entry.to) + (place - first);
    const float* __restrict__ from = static_cast<const float*>(entry.from) + (place - first);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % kVectorBytes == 0;
    for (int i = kWords * threadIdx.x; i < count; i += kWords * kThreads) {
      const bool whole = aligned && i + kWords <= count;
      Vector<float, kWords> in;
      if (whole) {  // on its way while the words are made
        in = *reinterpret_cast<const Vector<float, kWords>*>(from + i);
      }
      const auto words = make_words(seed, counter + static_cast<uint64_t>(place + i) / kWords);
      if (whole) {
        To out[kWords];
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          out[k] = round_to<To>(in.values[k], words.values[k], grid, beyond);
        }
        // As one number: nvcc stores the elements one by one here.
        std::conditional_t<kIsFloat8<To>, uint32_t, uint64_t> packed;
        static_assert(sizeof(packed) == sizeof(out));
        memcpy(&packed, out, sizeof(out));
        *reinterpret_cast<decltype(packed)*>(to + i) = packed;
      } else {
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          if (i + k < count) {
            to[i + k] = round_to<To>(from[i + k], words.values[k], grid, beyond);
          }
        }
      }
    }
  };
  // With a guess it needs more registers than six blocks of a processor have.
  for_each_stretch</*kGuess=*/false>(table, round);
}

}  // namespace
}  // namespace smart_autocast
