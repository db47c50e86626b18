// Counting what a cast did to a run of elements, on one thread.

#pragma once

#include <cstdint>

namespace smart_autocast {

struct Stats {
  uint32_t amax_bits = 0;  // of a float32
  int64_t overflows = 0;
  int64_t underflows = 0;
  int64_t nans = 0;
};

// At most this many elements a call: counts are of 32 bits while they are in registers.
constexpr int64_t kMostCounted = 1 << 20;

// `from`: float32 numbers, by their bits. `to`: what became of them, as numbers of 16 bits, of
// which `infinity` is the positive infinity.
using CountFunction = void (*)(Stats& stats, const uint32_t* from, const uint16_t* to,
                               int64_t count, uint16_t infinity);

// The fastest for this CPU.
CountFunction find_count();

// The same of one instruction set, for find_count alone.
void count_default(Stats&, const uint32_t*, const uint16_t*, int64_t, uint16_t);
void count_avx2(Stats&, const uint32_t*, const uint16_t*, int64_t, uint16_t);
void count_avx512(Stats&, const uint32_t*, const uint16_t*, int64_t, uint16_t);

}  // namespace smart_autocast
