// Compiled for AVX2 (CMakeLists.txt); called only where the CPU has it.

#include "loops.h"

#if defined(__AVX2__)

#include "all_loops.h"

namespace smart_autocast {

const Loops kLoopsAvx2 = kLoops;

}  // namespace smart_autocast

#endif
