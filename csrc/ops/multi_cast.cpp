#include "multi_cast.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

std::vector<Tensor> multi_cast(const std::vector<Tensor>& tensors, ScalarType dtype) {
  check_multi_cast(tensors, dtype);
  std::vector<Tensor> results;
  results.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    results.push_back(torch::stable::to(tensor, dtype, /*layout=*/std::nullopt,
                                        /*device=*/std::nullopt, /*pin_memory=*/std::nullopt,
                                        /*non_blocking=*/false, /*copy=*/true));
  }
  return results;
}

void multi_cast_out(const std::vector<Tensor>& tensors, ScalarType dtype, std::vector<Tensor> out) {
  check_multi_cast_out(tensors, dtype, out);
  for (size_t i = 0; i < tensors.size(); ++i) {
    torch::stable::copy_(out[i], tensors[i]);
  }
}

}  // namespace smart_autocast

// Every tensor in `dtype`, in one pass: what `cast` gives for each, rounded as aten::to rounds,
// always new tensors, with the strides of the argument where that is dense. `dtype` is floating;
// the tensors are real, on one device, of any dtypes and shapes. A gradient returns in its tensor's
// dtype, for each tensor on its own (autocast_backend/ops/multi_cast.py).
//
// `out`: into these tensors, of `dtype` and the shapes of `tensors`, each with memory of its own.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("multi_cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]");
  m.def("multi_cast.out(Tensor[] tensors, ScalarType dtype, *, Tensor(a!)[] out) -> ()");
}

// Devices without a kernel of ours: ATen's copies, one by one.
STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeExplicitAutograd, m) {
  m.impl("multi_cast", TORCH_BOX(&smart_autocast::multi_cast));
  m.impl("multi_cast.out", TORCH_BOX(&smart_autocast::multi_cast_out));
}
