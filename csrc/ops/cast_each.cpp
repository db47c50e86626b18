#include "multi_cast.h"

namespace smart_autocast {

void cast_each(StableIValue* stack, uint64_t, uint64_t) {
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

}  // namespace smart_autocast

// multi_cast as aten::to does it, one tensor after the other, in C++: for tensors that require
// grad, each with PyTorch's own autograd node. Composite, so that nothing but these calls is ever
// seen.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("cast_each(Tensor[] tensors, ScalarType dtype) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeImplicitAutograd, m) {
  m.impl("cast_each", &smart_autocast::cast_each);
}

// vmap's: it takes no composite op of a list without.
STABLE_TORCH_LIBRARY_IMPL(smart_autocast, FuncTorchBatchedDecomposition, m) {
  m.impl("cast_each", &smart_autocast::cast_each);
}
