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
  Float amax = 0;
  // Of a thread or a block: below 2^32 for any tensor that fits in memory.
  unsigned overflows = 0, underflows = 0, nans = 0;

  __device__ __forceinline__ void add(const Stats& other) {
    amax = other.amax > amax ? other.amax : amax;
    overflows += other.overflows;
    underflows += other.underflows;
    nans += other.nans;
  }
};

// Over the threads of a block; the result is the first thread's. All of them must come here.
template <typename Float>
__device__ __forceinline__ Stats<Float> reduce(Stats<Float> stats) {
  constexpr unsigned kAll = 0xffffffff;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    Stats<Float> other;
    other.amax = __shfl_xor_sync(kAll, stats.amax, distance);
    other.overflows = __shfl_xor_sync(kAll, stats.overflows, distance);
    other.underflows = __shfl_xor_sync(kAll, stats.underflows, distance);
    other.nans = __shfl_xor_sync(kAll, stats.nans, distance);
    stats.add(other);
  }
  __shared__ Float amax[kThreads / kWarp];
  __shared__ unsigned counts[kThreads / kWarp][3];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    amax[warp] = stats.amax;
    counts[warp][0] = stats.overflows;
    counts[warp][1] = stats.underflows;
    counts[warp][2] = stats.nans;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / kWarp; ++i) {
      Stats<Float> other;
      other.amax = amax[i];
      other.overflows = counts[i][0];
      other.underflows = counts[i][1];
      other.nans = counts[i][2];
      stats.add(other);
    }
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
  Stats<Float> stats;
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

  stats = reduce(stats);
  if (threadIdx.x == 0) {
    // Numbers that are not negative are in the order of their bits.
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
