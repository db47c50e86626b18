// cast_with_stats's loop, in whole numbers alone: compilers turn it into vector instructions of the
// instruction set that the file which includes this is compiled for.

#pragma once

#include "loops.h"

namespace {

// 1 or 0, for numbers below 2^31. GCC 12 does not turn a loop with comparisons into vectors for
// AVX-512.
inline uint32_t is_less(uint32_t a, uint32_t b) { return (a - b) >> 31; }

inline void count_loop(smart_autocast::Stats& stats, const uint32_t* from, int64_t count,
                       smart_autocast::Losses losses) {
  constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  // Mostly nothing is lost, which the largest and the smallest number tell.
  uint32_t amax = 0, smallest = UINT32_MAX;  // the latter less 1, which makes 0 the largest
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = from[i] & kMagnitude;
    amax = magnitude > amax ? magnitude : amax;
    smallest = magnitude - 1 < smallest ? magnitude - 1 : smallest;
  }
  if (amax >= losses.overflow || smallest < losses.underflow) {
    amax = 0;
    uint32_t overflows = 0, underflows = 0, nans = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t magnitude = from[i] & kMagnitude;
      const uint32_t is_nan = is_less(kInfinity, magnitude);
      const uint32_t number = magnitude & (is_nan - 1);  // 0 in place of a NaN
      amax = number > amax ? number : amax;
      nans += is_nan;
      overflows += is_less(losses.overflow - 1, magnitude) & is_less(magnitude, kInfinity);
      underflows += is_less(0, magnitude) & is_less(magnitude, losses.underflow + 1);
    }
    stats.overflows += overflows;
    stats.underflows += underflows;
    stats.nans += nans;
  }
  stats.amax_bits = amax > stats.amax_bits ? amax : stats.amax_bits;
}

}  // namespace
