// Stochastic rounding of one number, in whole numbers. What it computes is defined in
// stochastic_cast.cpp; here is what processors and GPUs share.

#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <cstdint>
#include <cstring>

namespace smart_autocast {

// The numbers of a dtype narrower than float32, without an upper end.
struct Grid {
  int fraction;  // bits of the fraction
  // The exponent, biased as float32's are, of the smallest number that is normal in both; 0 for
  // bfloat16: what float32 has denormal, it has too.
  int bottom;
};

}  // namespace smart_autocast

// Unnamed, for the reason given in cpu/convert_loop.h.
namespace {

// `yes` if `condition` is 1, `no` if it is 0; with a branch in it the loop is not made vectors.
C10_HOST_DEVICE inline uint32_t choose(uint32_t condition, uint32_t yes, uint32_t no) {
  return no ^ ((yes ^ no) & (0 - condition));
}

C10_HOST_DEVICE inline int within(int value, int low, int high) {
  const int above = value < low ? low : value;
  return above > high ? high : above;
}

// A float32 number, by its bits, to a neighbour on the grid by a random word. `kBottom`: whether
// the grid has a bottom, that is, whether float32 has smaller normal numbers.
template <bool kBottom>
C10_HOST_DEVICE inline uint32_t round_number(uint32_t bits, uint32_t word,
                                             smart_autocast::Grid grid) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const int dropped = 23 - grid.fraction;
  // A carry out of the fraction is one more in the exponent: the next binade.
  uint32_t result = (magnitude + (word >> (32 - dropped))) >> dropped << dropped;
  if constexpr (kBottom) {
    // Below the smallest normal number more bits are dropped, the leading one with them. All of
    // what is denormal as a float32 is less than a random word can tell from nothing.
    const int exponent = static_cast<int>(magnitude >> 23);
    const int more = within(dropped + grid.bottom - exponent, 0, 255);
    const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t share = significand << within(32 - more, 0, 31) >> within(more - 32, 0, 31);
    const uint32_t up = word + share < share ? 1 : 0;
    const auto quanta = static_cast<int>((significand >> within(more, 0, 31)) + up);
    const uint32_t quantum_bits = static_cast<uint32_t>(grid.bottom - grid.fraction) << 23;
    float quantum;
    std::memcpy(&quantum, &quantum_bits, sizeof(quantum));
    const float denormal = static_cast<float>(quanta) * quantum;
    uint32_t denormal_bits;
    std::memcpy(&denormal_bits, &denormal, sizeof(denormal_bits));
    result = choose(static_cast<uint32_t>(exponent - grid.bottom) >> 31, denormal_bits, result);
  }
  result = choose((magnitude - 0x7f800000) >> 31, result, magnitude);
  return result | (bits & 0x80000000);
}

}  // namespace
