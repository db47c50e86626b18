// Stochastic rounding, in whole numbers. What it computes is defined in stochastic_cast.cpp.

#pragma once

#include "loops.h"
#include "philox.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// `yes` if `condition` is 1, `no` if it is 0; with a branch in it the loop is not made vectors.
inline uint32_t choose(uint32_t condition, uint32_t yes, uint32_t no) {
  return no ^ ((yes ^ no) & (0 - condition));
}

// A float32 number, by its bits, to a neighbour on the grid by a random word. `kBottom`: whether
// the grid has a bottom, that is, whether float32 has smaller normal numbers.
template <bool kBottom>
inline uint32_t round_number(uint32_t bits, uint32_t word, int fraction, int bottom) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const int dropped = 23 - fraction;
  // A carry out of the fraction is one more in the exponent: the next binade.
  uint32_t result = (magnitude + (word >> (32 - dropped))) >> dropped << dropped;
  if constexpr (kBottom) {
    // Below the smallest normal number more bits are dropped, the leading one with them. All of
    // what is denormal as a float32 is less than a random word can tell from nothing.
    const int exponent = static_cast<int>(magnitude >> 23);
    const int more = std::max(dropped + bottom - exponent, 0);
    const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t share = significand << std::max(std::min(32 - more, 31), 0) >>
                           std::min(std::max(more - 32, 0), 31);
    const uint32_t up = word + share < share ? 1 : 0;
    const auto quanta = static_cast<int>((significand >> std::min(more, 31)) + up);
    const uint32_t quantum_bits = static_cast<uint32_t>(bottom - fraction) << 23;
    float quantum;
    std::memcpy(&quantum, &quantum_bits, sizeof(quantum));
    const float denormal = static_cast<float>(quanta) * quantum;
    uint32_t denormal_bits;
    std::memcpy(&denormal_bits, &denormal, sizeof(denormal_bits));
    result = choose(static_cast<uint32_t>(exponent - bottom) >> 31, denormal_bits, result);
  }
  result = choose((magnitude - 0x7f800000) >> 31, result, magnitude);
  return result | (bits & 0x80000000);
}

template <bool kBottom>
void round_all(uint32_t* bits, int64_t count, smart_autocast::Grid grid, uint64_t seed,
               uint64_t counter) {
  alignas(64) uint32_t words[kWords];
  for (; count > 0; count -= kWords, bits += kWords, counter += kCounters) {
    make_words(words, seed, counter);
    const int now = static_cast<int>(std::min<int64_t>(count, kWords));
    for (int i = 0; i < now; ++i) {
      bits[i] = round_number<kBottom>(bits[i], words[i], grid.fraction, grid.bottom);
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
