// cast_with_stats on CUDA: what runs on the GPU.

#pragma once

#include "convert.cuh"
#include "table.cuh"

namespace smart_autocast {
namespace {

constexpr int kWarp = 32;

// Float: what magnitudes are compared in, float64 for itself and float32 for all others.
template <typename Float>
struct Stats {
  Float amax;
  // Of a thread or a block: below 2^32 for any tensor that fits in memory.
  unsigned overflows, underflows, nans;
};

constexpr unsigned kAllThreads = 0xffffffff;

// Over the threads of a warp, all of which must come here, as to the next one; the result is every
// thread's. One instruction, where there is one for it: numbers that are not negative are in the
// order of their bits.
template <typename Float>
__device__ __forceinline__ Float max_of_warp(Float value) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Float, float>) {
    return __uint_as_float(__reduce_max_sync(kAllThreads, __float_as_uint(value)));
  }
#endif
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Float other = __shfl_xor_sync(kAllThreads, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

__device__ __forceinline__ unsigned sum_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllThreads, value);
#else
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllThreads, value, distance);
  }
  return value;
#endif
}

template <typename Float>
__device__ __forceinline__ Stats<Float> reduce_warp(const Stats<Float>& stats) {
  return {max_of_warp(stats.amax), sum_of_warp(stats.overflows), sum_of_warp(stats.underflows),
          sum_of_warp(stats.nans)};
}

// Over the threads of a block, all of which must come here; the result is the first warp's.
template <typename Float>
__device__ __forceinline__ Stats<Float> reduce_block(Stats<Float> stats) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ Stats<Float> of_warps[kWarps];
  stats = reduce_warp(stats);
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = stats;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    stats = reduce_warp(threadIdx.x < kWarps ? of_warps[threadIdx.x] : Stats<Float>{});
  }
  return stats;
}

// `numbers`: the four of the result, 0 before. In any order of blocks they become the same: whole
// numbers below 2^53 add up exactly in float64.
template <typename To, typename From>
__global__ void __launch_bounds__(kThreads)
    cast_with_stats_kernel(const __grid_constant__ Table<1> table, double* __restrict__ numbers) {
  using Float = std::conditional_t<std::is_same_v<From, double>, double, float>;
  constexpr int kToInfinity = std::is_same_v<To, Half> ? 0x7c00 : 0x7f80;
  Stats<Float> stats{};
  for_each_stretch(table, [&](const Entry& entry, int64_t first, int64_t place, int count) {
    To* __restrict__ to = static_cast<To*>(entry.to) + (place - first);
    const From* __restrict__ from = static_cast<const From*>(entry.from) + (place - first);
    map_stretch(to, from, count, [&](From value) {
      const To result = convert<To>(value);
      const int bits = result.x & 0x7fff;
      const auto number = static_cast<Float>(value);
      const Float magnitude = number < 0 ? -number : number;
      const bool finite = magnitude - magnitude == 0;
      // A NaN compares as nothing.
      stats.amax = magnitude > stats.amax ? magnitude : stats.amax;
      stats.overflows += finite && bits == kToInfinity ? 1 : 0;
      stats.underflows += magnitude > 0 && bits == 0 ? 1 : 0;
      stats.nans += magnitude != magnitude ? 1 : 0;
      return result;
    });
  });

  stats = reduce_block(stats);
  if (threadIdx.x == 0) {
    // As in max_of_warp.
    if (stats.amax > 0) {
      const auto amax = static_cast<double>(stats.amax);
      unsigned long long bits;
      memcpy(&bits, &amax, sizeof(bits));
      atomicMax(reinterpret_cast<unsigned long long*>(numbers), bits);
    }
    const unsigned counts[] = {stats.overflows, stats.underflows, stats.nans};
    for (int i = 0; i < 3; ++i) {
      if (counts[i] > 0) {
        atomicAdd(numbers + 1 + i, static_cast<double>(counts[i]));
      }
    }
  }
}

}  // namespace
}  // namespace smart_autocast
