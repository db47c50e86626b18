// A number of one dtype in another, with the bits that aten::to gives.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "../float8.h"

namespace smart_autocast {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename T>
constexpr bool kIsFloat8 = std::is_same_v<T, Float8_e4m3fn> || std::is_same_v<T, Float8_e5m2>;

template <typename From>
__device__ __forceinline__ float widen(From value) {
  if constexpr (std::is_same_v<From, Float8_e4m3fn>) {
    return to_float(value);
  } else {
    return static_cast<float>(value);
  }
}

// static_cast through torch's own Half and BFloat16 gives the bits that aten::to gives, NaNs
// included; it rounds float64 to float32 first.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(widen(value));
  }
}

// To float8, too. `beyond`: what float8_e4m3fn makes of numbers beyond it (beyond_float8.h); others
// need it not.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value, int32_t beyond) {
  if constexpr (kIsFloat8<To> && !std::is_same_v<To, From>) {
    if constexpr (std::is_same_v<To, Float8_e5m2>) {
      beyond = Float8<To>::kInfinity;
    }
    To result;
    result.x = to_float8<To>(widen(value), beyond);
    return result;
  } else {
    return convert<To>(value);
  }
}

}  // namespace
}  // namespace smart_autocast
