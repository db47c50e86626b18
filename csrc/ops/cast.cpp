#include "smart_cast.h"
#include "torch_errors.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

Tensor cast(const Tensor& self, ScalarType dtype) { return copy_to(self, dtype); }

}  // namespace smart_autocast

// `self` in `dtype`, rounded as aten::to rounds, always as a new tensor with self's strides where
// self is dense (aten's preserve_format): no rule, any dtype.
//
// It is aten::to, on every device: a composite op costs autograd one node, AOTAutograd traces it to
// _to_copy, and Inductor fuses that into what stands beside it. A kernel of ours gains only where
// new memory is what takes the time (`1 x` in benchmarks/README.md): multi_cast is for that.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("cast(Tensor self, ScalarType dtype) -> Tensor");
}

SMART_AUTOCAST_COMPOSITE_OP("cast", smart_autocast::cast)
