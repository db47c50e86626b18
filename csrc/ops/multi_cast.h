// What every kernel of multi_cast checks before it begins.

#pragma once

#include "out.h"
#include "smart_cast.h"
#include "tensor_list.h"

#include <string>

namespace smart_autocast {

// The dtype that is asked for, and tensors of real numbers on one device.
inline void check_multi_cast(const TensorList& tensors, ScalarType dtype) {
  if (dtype != ScalarType::Double && !is_autocast_dtype(dtype)) {
    fail("multi_cast", "argument 'dtype' must be a floating dtype, such as torch.bfloat16, got " +
                           dtype_name(dtype));
  }
  if (tensors.empty()) {
    return;
  }
  const DeviceOf device(tensors[0]);
  const int32_t strided = aoti_torch_layout_strided();
  int32_t checked_dtype = -1;  // many tensors have the dtype of the one before
  for (size_t i = 0; i < tensors.size(); ++i) {
    const OwnedTensor& tensor = tensors[i];
    const int32_t own_dtype = dtype_of(tensor);
    if (own_dtype != checked_dtype || layout_of(tensor) != strided) {
      check_castable("multi_cast", "tensors", stable_tensor(tensor));
      checked_dtype = own_dtype;
    }
    check_same_device("multi_cast", tensors, i, device);
  }
}

// `out` fits `tensors` one by one, and its memory is its own.
inline void check_multi_cast_out(const TensorList& tensors, ScalarType dtype,
                                 const TensorList& out) {
  check_multi_cast(tensors, dtype);
  check_out({.op = "multi_cast", .argument = "tensors", .may_be_itself = false}, tensors, dtype,
            out);
}

// The op by ATen's casts, one after the other: what autograd can record.
void multi_cast(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

}  // namespace smart_autocast
