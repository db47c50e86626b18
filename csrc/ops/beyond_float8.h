// What a number beyond the largest of float8_e4m3fn becomes, without its sign: NaN in older
// versions of torch, the largest number in newer ones, and these libraries are not built for one.
// ATen is asked, once.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace smart_autocast {

inline int32_t ask_beyond_float8_e4m3fn() {
  using torch::headeronly::ScalarType;
  using torch::stable::Tensor;
  static const int32_t beyond = [] {
    Tensor number = torch::stable::empty({1}, ScalarType::Float);
    *static_cast<float*>(number.mutable_data_ptr()) = 1e9F;
    const Tensor cast = torch::stable::to(number, ScalarType::Float8_e4m3fn);
    return int32_t{*static_cast<const uint8_t*>(cast.const_data_ptr())};
  }();
  return beyond;
}

}  // namespace smart_autocast
