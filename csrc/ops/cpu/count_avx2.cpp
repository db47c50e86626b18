// Compiled for AVX2 (CMakeLists.txt); called only where the CPU has it.

#include "count.h"

#if defined(__AVX2__)

#include "count_loop.h"

namespace smart_autocast {

void count_avx2(Stats& stats, const uint32_t* from, const uint16_t* to, int64_t count,
                uint16_t infinity) {
  count_loop(stats, from, to, count, infinity);
}

}  // namespace smart_autocast

#endif
