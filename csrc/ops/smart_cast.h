// The one rule that every smart cast follows, here once.
//
// PyTorch's autocast casts a tensor (`cached_cast` in ATen/autocast_mode.h) if and only if it is
// floating point, is not float64, lives on the region's device type, and does not have the target
// dtype yet. Everything else goes through untouched: a smart cast returns its argument itself.
//
// Smart casts are CompositeImplicitAutograd: they call aten::to and nothing else, so gradients,
// AOTAutograd's traces, functionalization and meta tensors are PyTorch's own.

#pragma once

#include "torch_errors.h"

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace smart_autocast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Only what torch 2.11's headers have may be used here and in the kernels; they have, for one,
// TORCH_ERROR_CODE_CHECK but not yet STABLE_TORCH_ERROR_CODE_CHECK.

// std::runtime_error becomes Python's RuntimeError. STD_TORCH_CHECK would put this file's path and
// line before the text; the user needs the op and the argument instead.
[[noreturn]] inline void fail(const char* op, const std::string& message) {
  throw std::runtime_error("smart_autocast::" + std::string(op) + ": " + message);
}

// What Python calls a dtype.
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default: {  // the others differ in capitals alone
      std::string name = torch::headeronly::toString(dtype);
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      return "torch." + name;
    }
  }
}

// `Tensor::scalar_type()`, also of dtypes without a name in the stable ABI (quantized, uint4), of
// which it throws without saying which tensor. The ABI's numbers are ScalarType's.
inline ScalarType scalar_type_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return static_cast<ScalarType>(dtype);
}

// The device type an op was asked to act on; empty: each tensor's own.
inline std::optional<int32_t> parse_device_type(const char* op,
                                                const std::optional<std::string>& name) {
  if (!name.has_value()) {
    return std::nullopt;
  }
  uint32_t type = 0;
  int32_t index = -1;
  if (torch_parse_device_string(name->c_str(), &type, &index) != 0 || index != -1) {
    fail(op,
         "argument 'device_type' must be a device type without an index, such as 'cpu' or "
         "'cuda', got '" +
             *name + "'");
  }
  return static_cast<int32_t>(type);
}

inline bool is_sparse(int32_t layout) {
  return layout == aoti_torch_layout_sparse_coo() || layout == aoti_torch_layout_sparse_csr() ||
         layout == aoti_torch_layout_sparse_csc() || layout == aoti_torch_layout_sparse_bsr() ||
         layout == aoti_torch_layout_sparse_bsc();
}

// The name of a tensor in a list, as Python writes it.
inline std::string item(const std::string& argument, size_t i) {
  return argument + "[" + std::to_string(i) + "]";
}

[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& found) {
  fail(op, std::string("argument '") + argument + "' must be a dense tensor of real numbers, got " +
               found);
}

// Tensors whose values a cast would not simply round: no policy covers them, so say so early.
inline void check_supported(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(op, argument, "None");  // to Python; PyTorch makes an undefined tensor of it
  }
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (is_sparse(layout)) {
    refuse(op, argument, "a sparse tensor; pass tensor.to_dense(), or cast its values");
  }

  const ScalarType dtype = scalar_type_of(tensor);
  if (torch::headeronly::isQIntType(dtype)) {
    refuse(op, argument, "a quantized tensor; call tensor.dequantize() first");
  }
  switch (dtype) {
    case ScalarType::ComplexHalf:
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
      refuse(op, argument, "a complex tensor; cast torch.view_as_real(tensor) instead");
    default:
      return;
  }
}

// The dtypes that only hold bits, for subclasses to give them a meaning: uint1 to int7, bits8 and
// others.
inline bool is_without_numbers(ScalarType dtype) {
  return (dtype >= ScalarType::Bits1x8 && dtype <= ScalarType::Bits16) ||
         (dtype >= ScalarType::UInt1 && dtype <= ScalarType::Int7);
}

// What aten::to cannot cast although it is supported: its own errors do not get through the stable
// ABI with their words.
inline void check_convertible(const char* op, const char* argument, const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (layout == aoti_torch_layout__mkldnn()) {
    refuse(op, argument, "an MKLDNN tensor; pass tensor.to_dense()");
  }
  const ScalarType dtype = scalar_type_of(tensor);
  if (dtype == ScalarType::Float4_e2m1fn_x2) {
    refuse(op, argument, "a float4 tensor, which PyTorch does not cast; unpack it first");
  }
  if (is_without_numbers(dtype)) {
    refuse(op, argument, "a " + dtype_name(dtype) + " tensor, which PyTorch does not cast");
  }
}

// For an op that casts each tensor it is given.
inline void check_castable(const char* op, const char* argument, const Tensor& tensor) {
  check_supported(op, argument, tensor);
  check_convertible(op, argument, tensor);
}

// Floating dtypes that fit in 32 bits: all that autocast ever casts from.
inline bool is_autocast_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e4m3fnuz:
    case ScalarType::Float8_e8m0fnu:
    case ScalarType::Float4_e2m1fn_x2:
      return true;
    default:
      return false;
  }
}

// For an op that takes numbers alone with a fraction; of the tensor at a place in a list.
inline void check_floating(const char* op, const char* argument, size_t i, const Tensor& tensor) {
  const ScalarType dtype = scalar_type_of(tensor);
  if (dtype != ScalarType::Double && !is_autocast_dtype(dtype)) {
    fail(op, std::string("argument '") + argument + "' must hold floating tensors, got " +
                 dtype_name(dtype) + " for " + item(argument, i) +
                 "; leave it out, or call .float() on it first");
  }
}

inline bool is_eligible(const Tensor& tensor, const std::optional<int32_t>& device_type) {
  if (!is_autocast_dtype(scalar_type_of(tensor))) {
    return false;
  }
  if (!device_type.has_value()) {
    return true;
  }
  int32_t own = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &own));
  return own == *device_type;
}

// The rule itself, for an op that takes one tensor named `self`.
inline Tensor smart_cast(const char* op, const Tensor& self, ScalarType target,
                         const std::optional<std::string>& device_type) {
  check_supported(op, "self", self);
  const auto device = parse_device_type(op, device_type);
  if (!is_eligible(self, device) || scalar_type_of(self) == target) {
    return self;
  }
  check_convertible(op, "self", self);
  return to(self, target);
}

}  // namespace smart_autocast

// Registers a smart cast under the keys it needs. FuncTorchBatchedDecomposition is vmap's: without
// it vmap refuses every schema with an alias in it; with it vmap runs the same composite function.
#define SMART_AUTOCAST_COMPOSITE_OP(name, function)                             \
  STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeImplicitAutograd, m) {     \
    m.impl(name, TORCH_BOX(&function));                                         \
  }                                                                             \
  STABLE_TORCH_LIBRARY_IMPL(smart_autocast, FuncTorchBatchedDecomposition, m) { \
    m.impl(name, TORCH_BOX(&function));                                         \
  }
