// Compiled for AVX-512 F, BW, DQ and VL (CMakeLists.txt); called only where the CPU has them.

#include "convert.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "avx512_lanes.h"

namespace smart_autocast {

ConvertFunction find_convert_avx512(torch::headeronly::ScalarType to,
                                    torch::headeronly::ScalarType from) {
  return find<Avx512Lanes>(to, from);
}

}  // namespace smart_autocast

#endif
