// unscale_cast's loop.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace {

template <typename Float, typename Bits>
bool scale_loop(Float* __restrict__ to, const Float* __restrict__ from, int64_t count,
                Float factor) {
  static_assert(sizeof(Float) == sizeof(Bits));
  constexpr int kFraction = std::numeric_limits<Float>::digits - 1;
  constexpr Bits kLowest = Bits{1} << kFraction;  // bit of the exponent
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1), kExponent = kSign - kLowest;
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    // An exponent of ones carries into the place of the sign.
    found |= (bits & kExponent) + kLowest;
    to[i] = from[i] * factor;
  }
  return (found & kSign) != 0;
}

}  // namespace
