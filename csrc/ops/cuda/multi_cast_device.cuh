// multi_cast on CUDA: what runs on the GPU.

#pragma once

#include "../float8.h"
#include "table.cuh"

namespace smart_autocast {
namespace {

template <typename T>
constexpr bool kIsFloat8 = std::is_same_v<T, Float8_e4m3fn> || std::is_same_v<T, Float8_e5m2>;

// `beyond`: what float8_e4m3fn makes of numbers beyond it (beyond_float8.h); others need it not.
template <typename To, typename From>
__device__ __forceinline__ To convert_or_round(From value, int32_t beyond) {
  if constexpr (kIsFloat8<To>) {
    To result;
    if constexpr (std::is_same_v<To, Float8_e5m2>) {
      beyond = Float8<To>::kInfinity;
    }
    result.x = to_float8<To>(static_cast<float>(value), beyond);
    return result;
  } else {
    return convert<To>(value);
  }
}

template <typename To, typename From, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    multi_cast_kernel(const __grid_constant__ Table<kCapacity> table, int32_t beyond) {
  for_each_stretch(table, [&](const Entry& entry, int64_t first, int64_t place, int count) {
    map_stretch(static_cast<To*>(entry.to) + (place - first),
                static_cast<const From*>(entry.from) + (place - first), count,
                [&](From value) { return convert_or_round<To>(value, beyond); });
  });
}

}  // namespace
}  // namespace smart_autocast
