#include "multi_cast.h"

// multi_cast as aten::to does it, one tensor after the other, in C++: for tensors that require
// grad, each with PyTorch's own autograd node. Composite, so that nothing but these calls is ever
// seen.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("cast_each(Tensor[] tensors, ScalarType dtype) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeImplicitAutograd, m) {
  m.impl("cast_each", &smart_autocast::multi_cast);
}

// vmap's: it takes no composite op of a list without.
STABLE_TORCH_LIBRARY_IMPL(smart_autocast, FuncTorchBatchedDecomposition, m) {
  m.impl("cast_each", &smart_autocast::multi_cast);
}
