// cast_with_stats's loop, in whole numbers alone: compilers turn it into vector instructions of the
// instruction set that the file which includes this is compiled for.

#pragma once

#include "loops.h"

namespace {

// 1 or 0, for numbers below 2^31. GCC 12 does not turn a loop with comparisons into vectors for
// AVX-512.
inline uint32_t is_less(uint32_t a, uint32_t b) { return (a - b) >> 31; }

inline void count_loop(smart_autocast::Stats& stats, const uint32_t* from, const uint16_t* to,
                       int64_t count, uint16_t infinity) {
  constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  uint32_t amax = 0, overflows = 0, underflows = 0, nans = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = from[i] & kMagnitude;
    const uint32_t result = to[i] & 0x7fffu;
    const uint32_t is_nan = is_less(kInfinity, magnitude);
    const uint32_t number = magnitude & (is_nan - 1);  // 0 in place of a NaN
    amax = number > amax ? number : amax;
    nans += is_nan;
    overflows += is_less(magnitude, kInfinity) & is_less(result ^ infinity, 1);
    underflows += is_less(0, magnitude) & is_less(result, 1);
  }
  stats.amax_bits = amax > stats.amax_bits ? amax : stats.amax_bits;
  stats.overflows += overflows;
  stats.underflows += underflows;
  stats.nans += nans;
}

}  // namespace
