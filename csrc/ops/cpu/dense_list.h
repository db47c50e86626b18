// Lists of tensors for kernels that read each as a run of elements: what is not one is made one,
// and what is written is a new tensor, or the caller's.

#pragma once

#include "../out.h"
#include "../tensor_list.h"
#include "convert.h"
#include "runs.h"

#include <cstdint>
#include <utility>

namespace smart_autocast {

class DenseList {
 public:
  // What has no conversion to `read_as`, or elements that do not lie side by side, ATen casts to
  // that. Results are of `dtype`: `out`, or new ones where that is null.
  DenseList(ScalarType read_as, ScalarType dtype, const TensorList* out)
      : read_as_(read_as), code_(dtype_code(dtype)), out_(out) {}

  // Calls add(run, convert, from) for each of `tensors` that holds elements; `convert` is from the
  // dtype of what is read, `from`, to `read_as`.
  template <typename Add>
  void for_each(const TensorList& tensors, const Add& add) {
    const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(code_));
    made_.resize(tensors.size());
    read_.resize(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const OwnedTensor* source = &tensors[i];
      ScalarType from = scalar_type(dtype_of(*source));
      if (find_convert(read_as_, from) == nullptr || !is_dense(*source, Geometry(*source))) {
        read_[i] = cast_memory_by_aten(*source, read_as_);
        source = &read_[i];
        from = read_as_;
      }
      const Geometry geometry(*source);
      const OwnedTensor* result = out_ == nullptr ? &made_[i] : &(*out_)[i];
      if (out_ == nullptr || !same_strides(geometry, Geometry(*result))) {
        made_[i] = empty_strided(geometry, code_, aoti_torch_device_type_cpu(), /*device_index=*/0);
        result = &made_[i];
      }
      if (geometry.numel > 0) {
        add(Run{data_of(*result), data_of(*source), geometry.numel, size,
                static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_code(from)))},
            find_convert(read_as_, from), from);
      }
    }
  }

  // When the runs are done: the new results, or, with `out`, none, but copies of those that could
  // not be written there.
  TensorList finish() {
    if (out_ == nullptr) {
      return std::move(made_);
    }
    for (size_t i = 0; i < made_.size(); ++i) {
      if (made_[i] != nullptr) {
        copy_by_aten((*out_)[i], made_[i]);
      }
    }
    return {};
  }

 private:
  ScalarType read_as_;
  int32_t code_;  // of dtype
  const TensorList* out_;
  TensorList made_, read_;
};

}  // namespace smart_autocast
