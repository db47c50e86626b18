// What every kernel of stochastic_cast checks before it begins, and the numbers it rounds to.

#pragma once

#include "round_number.h"
#include "smart_cast.h"
#include "tensor_list.h"

#include <string>

namespace smart_autocast {

inline void check_stochastic_cast(const TensorList& tensors, ScalarType dtype, int64_t offset) {
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half &&
      dtype != ScalarType::Float8_e4m3fn && dtype != ScalarType::Float8_e5m2) {
    fail("stochastic_cast",
         "argument 'dtype' must be torch.bfloat16, torch.float16, torch.float8_e4m3fn or "
         "torch.float8_e5m2, got " +
             dtype_name(dtype));
  }
  if (offset < 0) {
    fail("stochastic_cast",
         "argument 'offset' must not be negative, got " + std::to_string(offset));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor tensor = stable_tensor(tensors[i]);
    check_castable("stochastic_cast", "tensors", tensor);
    check_floating("stochastic_cast", "tensors", i, tensor);
    check_same_device("stochastic_cast", tensors, i, DeviceOf(tensors[0]));
  }
}

inline Grid find_grid(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return {.fraction = 7, .bottom = 0};
    case ScalarType::Half:
      return {.fraction = 10, .bottom = 113};
    case ScalarType::Float8_e4m3fn:
      return {.fraction = 3, .bottom = 121};
    default:  // Float8_e5m2
      return {.fraction = 2, .bottom = 113};
  }
}

}  // namespace smart_autocast
