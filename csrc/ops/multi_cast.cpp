#include "multi_cast.h"

namespace smart_autocast {

void multi_cast(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  check_multi_cast(tensors, dtype);
  TensorList results;
  results.reserve(tensors.size());
  for (const OwnedTensor& tensor : tensors) {
    results.push_back(cast_by_aten(tensor, dtype));
  }
  stack[0] = give_list(std::move(results));
}

void multi_cast_out(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const TensorList out = take_list(stack[2]);
  check_multi_cast_out(tensors, dtype, out);
  for (size_t i = 0; i < tensors.size(); ++i) {
    copy_by_aten(out[i], tensors[i]);
  }
}

}  // namespace smart_autocast

// Every tensor in `dtype`, in one pass: what `cast` gives for each, rounded as aten::to rounds,
// always new tensors, with the strides of the argument where that is dense. `dtype` is floating;
// the tensors are real, on one device, of any dtypes and shapes. A gradient returns in its tensor's
// dtype, for each tensor on its own (autocast_backend/ops/_multi_cast.py).
//
// `out`: into these tensors, of `dtype` and the shapes of `tensors`, each with memory of its own.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("multi_cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]");
  m.def("multi_cast.out(Tensor[] tensors, ScalarType dtype, *, Tensor(a!)[] out) -> ()");
}

// Devices without a kernel of ours: ATen's copies, one by one.
STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeExplicitAutograd, m) {
  m.impl("multi_cast", &smart_autocast::multi_cast);
  m.impl("multi_cast.out", &smart_autocast::multi_cast_out);
}
