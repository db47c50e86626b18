// Counting on every CPU, and the choice among the instruction sets.

#include "count.h"

#include "capability.h"
#include "count_loop.h"

namespace smart_autocast {

void count_default(Stats& stats, const uint32_t* from, const uint16_t* to, int64_t count,
                   uint16_t infinity) {
  count_loop(stats, from, to, count, infinity);
}

CountFunction find_count() {
#if defined(__x86_64__)
  switch (cpu_capability()) {
    case Capability::kAvx512Bf16:
    case Capability::kAvx512:
      return count_avx512;
    case Capability::kAvx2:
      return count_avx2;
    case Capability::kDefault:
      break;
  }
#endif
  return count_default;
}

}  // namespace smart_autocast
