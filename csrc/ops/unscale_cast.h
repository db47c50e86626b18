// What every kernel of unscale_cast checks before it begins.

#pragma once

#include "out.h"
#include "smart_cast.h"
#include "tensor_list.h"

#include <string>
#include <vector>

namespace smart_autocast {

inline void check_unscale_cast(const TensorList& grads, const OwnedTensor& scale,
                               ScalarType dtype) {
  if (dtype != ScalarType::Float && dtype != ScalarType::Double && dtype != ScalarType::Half &&
      dtype != ScalarType::BFloat16) {
    fail("unscale_cast",
         "argument 'dtype' must be torch.float32, torch.float64, torch.float16 or torch.bfloat16, "
         "got " +
             dtype_name(dtype));
  }
  check_castable("unscale_cast", "scale", stable_tensor(scale));
  const int32_t scale_dtype = dtype_of(scale);
  const int64_t scale_numel = Geometry(scale).numel;
  if (scale_dtype != dtype_code(ScalarType::Float) || scale_numel != 1) {
    fail("unscale_cast",
         "argument 'scale' must be a float32 tensor of one element, such as "
         "torch.tensor(65536.0, device=grads[0].device), got " +
             std::to_string(scale_numel) + " of " +
             dtype_name(static_cast<ScalarType>(scale_dtype)));
  }
  const DeviceOf device(scale);
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor tensor = stable_tensor(grads[i]);
    check_castable("unscale_cast", "grads", tensor);
    check_floating("unscale_cast", "grads", i, tensor);
    if (!(DeviceOf(grads[i]) == device)) {
      fail("unscale_cast", "argument 'grads' must hold tensors on the device of 'scale', " +
                               text_of(device) + ", got " + item("grads", i) + " on " +
                               text_of(DeviceOf(grads[i])) +
                               "; call it once for each device, with scale.to(device)");
    }
  }
}

// A gradient may be written where it is; the scale may not, which is read until all is written.
inline void check_unscale_cast_out(const TensorList& grads, const OwnedTensor& scale,
                                   ScalarType dtype, const TensorList& out) {
  check_unscale_cast(grads, scale, dtype);
  std::vector<ByteRange> written = check_out(
      {.op = "unscale_cast", .argument = "grads", .may_be_itself = true}, grads, dtype, out);
  check_no_overlap(
      {.op = "unscale_cast", .argument = "scale", .may_be_itself = false, .is_list = false},
      {ByteRange(0, scale, Geometry(scale), sizeof(float))}, written);
}

}  // namespace smart_autocast
