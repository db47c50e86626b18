// What stochastic rounding rounds to.

#pragma once

namespace smart_autocast {

// The numbers of a dtype narrower than float32, without an upper end.
struct Grid {
  int fraction;  // bits of the fraction
  // The exponent, biased as float32's are, of the smallest number that is normal in both; 0 for
  // bfloat16: what float32 has denormal, it has too.
  int bottom;
};

}  // namespace smart_autocast
