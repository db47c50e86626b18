#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace smart_autocast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor cast(const Tensor& self, ScalarType dtype) {
  return torch::stable::to(self, dtype, /*layout=*/std::nullopt, /*device=*/std::nullopt,
                           /*pin_memory=*/std::nullopt, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace smart_autocast

// `self` in `dtype`, rounded as aten::to rounds, always as a new tensor with self's strides where
// self is dense (aten's preserve_format). The functional primitive under the smart casts: no rule,
// any dtype. Its fake, autograd and vmap registrations are in autocast_backend/ops/cast.py.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("cast(Tensor self, ScalarType dtype) -> Tensor");
}

// Every device: ATen's copy. ops/cuda/cast_kernel.cu takes CUDA where its library is loaded.
STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CompositeExplicitAutograd, m) {
  m.impl("cast", TORCH_BOX(&smart_autocast::cast));
}
