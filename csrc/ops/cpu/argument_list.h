// Lists of tensors that a Python program has as well.

#pragma once

#include <Python.h>

#include "../tensor_list.h"

namespace smart_autocast {

// The tensors of an argument `Tensor[]`. PyTorch calls a kernel without Python's lock, and takes it
// to drop a tensor's last reference but Python's: for a list, as often as it has tensors. They are
// dropped under one lock here.
class ArgumentList {
 public:
  explicit ArgumentList(StableIValue argument) : tensors_(take_list(argument)) {}
  ArgumentList(const ArgumentList&) = delete;
  ArgumentList& operator=(const ArgumentList&) = delete;
  ~ArgumentList() {
    const PyGILState_STATE state = PyGILState_Ensure();
    tensors_.clear();
    PyGILState_Release(state);
  }

  const TensorList& operator*() const { return tensors_; }
  const OwnedTensor& operator[](size_t i) const { return tensors_[i]; }
  size_t size() const { return tensors_.size(); }

 private:
  TensorList tensors_;
};

}  // namespace smart_autocast
