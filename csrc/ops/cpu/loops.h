// What CPU kernels do to a run of elements between loads and stores, on one thread: loops that the
// compiler turns into the vector instructions of a set, and the choice among the sets.

#pragma once

#include "../round_number.h"

#include <cstdint>

namespace smart_autocast {

struct Stats {
  uint32_t amax_bits = 0;  // of a float32
  int64_t overflows = 0;
  int64_t underflows = 0;
  int64_t nans = 0;
};

// Where a cast to nearest even loses a number: what its magnitude as float32, by its bits, is from
// or up to there.
struct Losses {
  uint32_t overflow;   // from here on it becomes infinite
  uint32_t underflow;  // up to here it becomes 0
};

// What a call of any of them takes at most: counts are of 32 bits while they are in registers.
constexpr int64_t kMostLooped = 1 << 20;

struct Loops {
  // Counts what a cast does to float32 numbers, by their bits.
  void (*count)(Stats& stats, const uint32_t* from, int64_t count, Losses losses);
  // to[i] = from[i] * factor. Whether a from[i] is infinite or NaN. No overlap.
  bool (*scale)(float* to, const float* from, int64_t count, float factor);
  bool (*scale_double)(double* to, const double* from, int64_t count, double factor);
  // float32 numbers, by their bits, to neighbours on the grid, by the random words of the counters
  // from `counter` on (stochastic_cast.cpp), four for each.
  void (*round)(uint32_t* bits, int64_t count, Grid grid, uint64_t seed, uint64_t counter);
};

// The fastest for this CPU.
const Loops& find_loops();

// The same of one instruction set, for find_loops alone.
extern const Loops kLoopsDefault, kLoopsAvx2, kLoopsAvx512;

}  // namespace smart_autocast
