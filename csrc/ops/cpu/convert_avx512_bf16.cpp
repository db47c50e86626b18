// Compiled for AVX-512 as convert_avx512.cpp is, and AVX512-BF16, whose instruction rounds 32
// numbers to bfloat16 in place of eleven instructions.

#include "convert.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__)

#include "avx512_lanes.h"

namespace smart_autocast {

ConvertFunction find_convert_avx512_bf16(torch::headeronly::ScalarType to,
                                         torch::headeronly::ScalarType from) {
  return find<Avx512Lanes>(to, from);
}

}  // namespace smart_autocast

#endif
