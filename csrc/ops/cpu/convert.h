// Converting one run of contiguous elements, on one thread: what all CPU kernels are made of.

#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace smart_autocast {

// Writes `count` elements to `to`, which does not overlap `from`. `stream`: with stores that go
// around the caches, for results that would not fit in them.
using ConvertFunction = void (*)(void* to, const void* from, int64_t count, bool stream);

// The fastest conversion between two dtypes on this CPU, or null where ATen has to do it.
//
// The bits are those of ATen's copy, which rounds every pair of floating dtypes through float32, to
// nearest even: float64 to bfloat16 is rounded twice. A NaN becomes what it becomes in ATen's
// vectorized loops; ATen itself has others at the end of a tensor, for some pairs of dtypes.
ConvertFunction find_convert(torch::headeronly::ScalarType to, torch::headeronly::ScalarType from);

// As beyond_float8.h says; set by find_convert before it returns a conversion that needs it.
extern int32_t beyond_float8_e4m3fn;

// The same of one instruction set; null for a pair that it has nothing better for. Called by
// find_convert alone.
ConvertFunction find_convert_default(torch::headeronly::ScalarType to,
                                     torch::headeronly::ScalarType from);
ConvertFunction find_convert_avx2(torch::headeronly::ScalarType to,
                                  torch::headeronly::ScalarType from);
ConvertFunction find_convert_avx512(torch::headeronly::ScalarType to,
                                    torch::headeronly::ScalarType from);
ConvertFunction find_convert_avx512_bf16(torch::headeronly::ScalarType to,
                                         torch::headeronly::ScalarType from);

}  // namespace smart_autocast
