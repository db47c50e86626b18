// Compiled for AVX-512 (CMakeLists.txt); called only where the CPU has it.

#include "loops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include "all_loops.h"

namespace smart_autocast {

const Loops kLoopsAvx512 = kLoops;

}  // namespace smart_autocast

#endif
