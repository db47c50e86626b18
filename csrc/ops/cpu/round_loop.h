// Stochastic rounding of a run of numbers.

#pragma once

#include "../round_number.h"
#include "loops.h"
#include "philox.h"

#include <algorithm>
#include <cstdint>

namespace {

template <bool kBottom>
void round_all(uint32_t* bits, int64_t count, smart_autocast::Grid grid, uint64_t seed,
               uint64_t counter) {
  alignas(64) uint32_t words[kWords];
  for (; count > 0; count -= kWords, bits += kWords, counter += kCounters) {
    make_words(words, seed, counter);
    const int now = static_cast<int>(std::min<int64_t>(count, kWords));
    for (int i = 0; i < now; ++i) {
      bits[i] = round_number<kBottom>(bits[i], words[i], grid);
    }
  }
}

inline void round_loop(uint32_t* bits, int64_t count, smart_autocast::Grid grid, uint64_t seed,
                       uint64_t counter) {
  if (grid.bottom == 0) {
    round_all<false>(bits, count, grid, seed, counter);
  } else {
    round_all<true>(bits, count, grid, seed, counter);
  }
}

}  // namespace
