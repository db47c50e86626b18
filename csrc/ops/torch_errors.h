// Calls of torch that fail for reasons that users must see as torch gives them, out of memory above
// all: the macro TORCH_ERROR_CODE_CHECK says which call failed, and not why.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>

// The message of this thread's last error; null before torch 2.13, which added it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace smart_autocast {

[[noreturn]] inline void fail_as_torch(const char* otherwise) {
  if (torch_exception_get_what_without_backtrace != nullptr) {
    throw std::runtime_error(torch_exception_get_what_without_backtrace());
  }
  throw std::runtime_error(otherwise);
}

// aten::to.
template <typename... Arguments>
torch::stable::Tensor to(const torch::stable::Tensor& tensor, Arguments... arguments) {
  try {
    return torch::stable::to(tensor, arguments...);
  } catch (const std::runtime_error& error) {
    fail_as_torch(error.what());
  }
}

// aten::to, always into a new tensor.
inline torch::stable::Tensor copy_to(const torch::stable::Tensor& tensor,
                                     torch::headeronly::ScalarType dtype) {
  return to(tensor, dtype, /*layout=*/std::nullopt, /*device=*/std::nullopt,
            /*pin_memory=*/std::nullopt, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace smart_autocast
