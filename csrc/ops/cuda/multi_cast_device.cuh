// multi_cast on CUDA: what runs on the GPU. It needs no CUDA header beyond the language itself, so
// that tests/csrc/emulate_multi_cast.cpp can run it thread by thread on a CPU.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace smart_autocast {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

// Tensors are laid end to end: this one's elements are those from the end of the one before.
struct Entry {
  const void* from;
  void* to;
  int64_t end;
};

// 4 KiB of parameters on every driver and architecture; 32,764 bytes since CUDA 12.1.
constexpr int kSmallTable = 168;
constexpr int kLargeTable = 1360;

template <int kCapacity>
struct Table {
  int64_t total;  // elements
  int64_t chunk;  // elements that a block takes at a time
  int32_t size;   // entries
  Entry entries[kCapacity];
};
static_assert(sizeof(Table<kSmallTable>) <= 4096 && sizeof(Table<kLargeTable>) <= 32764);

template <typename T, int kSize>
struct alignas(kVectorBytes) Vector {
  T values[kSize];
};

// static_cast through torch's own Half and BFloat16 gives the bits that aten::to gives, NaNs
// included; it rounds float64 to float32 first.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

// A stretch of one tensor, by a block. Stores of whole vectors begin at the first aligned place of
// `to`; whether loads can be vectors there depends on `from` alone.
template <typename To, typename From>
__device__ __forceinline__ void cast_stretch(To* __restrict__ to, const From* __restrict__ from,
                                             int count) {
  constexpr int kSize = kVectorBytes / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kVectorBytes);
  const int head =
      min(count, beyond == 0 ? 0 : (kVectorBytes - beyond) / static_cast<int>(sizeof(To)));
  const int vectors = (count - head) / kSize;
  const int tail = head + vectors * kSize;
  // Both ends are shorter than the block.
  if (static_cast<int>(threadIdx.x) < head) {
    to[threadIdx.x] = convert<To>(from[threadIdx.x]);
  }
  if (static_cast<int>(threadIdx.x) < count - tail) {
    to[tail + threadIdx.x] = convert<To>(from[tail + threadIdx.x]);
  }

  auto* to_vectors = reinterpret_cast<Vector<To, kSize>*>(to + head);
  if (reinterpret_cast<uintptr_t>(from + head) % kVectorBytes == 0) {
    const auto* from_vectors = reinterpret_cast<const Vector<From, kSize>*>(from + head);
#pragma unroll 2
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      const Vector<From, kSize> in = from_vectors[i];
      Vector<To, kSize> out;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        out.values[k] = convert<To>(in.values[k]);
      }
      to_vectors[i] = out;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      Vector<To, kSize> out;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        out.values[k] = convert<To>(from[head + i * kSize + k]);
      }
      to_vectors[i] = out;
    }
  }
}

template <typename To, typename From, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    multi_cast_kernel(const __grid_constant__ Table<kCapacity> table) {
  for (int64_t begin = blockIdx.x * table.chunk; begin < table.total;
       begin += gridDim.x * table.chunk) {
    const int64_t end = min(begin + table.chunk, table.total);
    int low = 0, high = table.size;  // the first tensor that ends after `begin` lies between
    while (low < high) {
      const int middle = (low + high) / 2;
      if (table.entries[middle].end <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    int64_t first = low == 0 ? 0 : table.entries[low - 1].end;
    for (int64_t place = begin; place < end; ++low) {
      const Entry entry = table.entries[low];
      const int64_t stop = min(end, entry.end);
      cast_stretch(static_cast<To*>(entry.to) + (place - first),
                   static_cast<const From*>(entry.from) + (place - first),
                   static_cast<int>(stop - place));
      place = stop;
      first = entry.end;
    }
  }
}

}  // namespace
}  // namespace smart_autocast
