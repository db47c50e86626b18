// What every kernel of cast_with_stats checks before it begins.

#pragma once

#include "smart_cast.h"

#include <string>

namespace smart_autocast {

inline void check_cast_with_stats(const Tensor& tensor, ScalarType dtype) {
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) {
    fail("cast_with_stats",
         "argument 'dtype' must be torch.float16 or torch.bfloat16, got " + dtype_name(dtype));
  }
  const ScalarType from = scalar_type_of(tensor);
  if (from != ScalarType::Double && from != ScalarType::Float && from != ScalarType::Half &&
      from != ScalarType::BFloat16) {
    fail("cast_with_stats",
         "argument 'tensor' must be float64, float32, float16 or bfloat16, got " +
             dtype_name(from) + "; convert it with .to(torch.float32)");
  }
  check_castable("cast_with_stats", "tensor", tensor);
}

}  // namespace smart_autocast
