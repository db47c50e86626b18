#include "smart_cast.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

Tensor autocast_to_fp16(const Tensor& self, std::optional<std::string> device_type) {
  return smart_cast("autocast_to_fp16", self, ScalarType::Half, device_type);
}

}  // namespace smart_autocast

// float16(self), rounded to nearest even, for an eligible `self` (see smart_cast.h); else `self`.
// The gradient returns in self's dtype.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("autocast_to_fp16(Tensor(a) self, *, str? device_type=None) -> Tensor(a)");
}

SMART_AUTOCAST_COMPOSITE_OP("autocast_to_fp16", smart_autocast::autocast_to_fp16)
