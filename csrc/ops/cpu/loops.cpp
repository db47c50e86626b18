// The loops for every CPU, and the choice among the instruction sets.

#include "loops.h"

#include "all_loops.h"
#include "capability.h"

namespace smart_autocast {

const Loops kLoopsDefault = kLoops;

const Loops& find_loops() {
#if defined(__x86_64__)
  switch (cpu_capability()) {
    case Capability::kAvx512Bf16:
    case Capability::kAvx512:
      return kLoopsAvx512;
    case Capability::kAvx2:
      return kLoopsAvx2;
    case Capability::kDefault:
      break;
  }
#endif
  return kLoopsDefault;
}

}  // namespace smart_autocast
