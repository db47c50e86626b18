// What every kernel of cast_with_stats checks before it begins.

#pragma once

#include "smart_cast.h"

#include <string>

namespace smart_autocast {

inline void check_cast_with_stats(const Tensor& self, ScalarType dtype) {
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) {
    fail("cast_with_stats",
         "argument 'dtype' must be torch.float16 or torch.bfloat16, got " + dtype_name(dtype));
  }
  const ScalarType from = scalar_type_of(self);
  if (from != ScalarType::Double && from != ScalarType::Float && from != ScalarType::Half &&
      from != ScalarType::BFloat16) {
    fail("cast_with_stats",
         "argument 'self' must be float64, float32, float16 or bfloat16, got " + dtype_name(from));
  }
  check_castable("cast_with_stats", "self", self);
}

}  // namespace smart_autocast
