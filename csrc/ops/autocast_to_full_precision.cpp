#include "smart_cast.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

Tensor autocast_to_full_precision(const Tensor& self, std::optional<std::string> device_type) {
  return smart_cast("autocast_to_full_precision", self, ScalarType::Float, device_type);
}

}  // namespace smart_autocast

// float32(self), which is exact, for an eligible `self` (see smart_cast.h); else `self`: float64
// stays float64. The gradient returns in self's dtype.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("autocast_to_full_precision(Tensor(a) self, *, str? device_type=None) -> Tensor(a)");
}

SMART_AUTOCAST_COMPOSITE_OP("autocast_to_full_precision",
                            smart_autocast::autocast_to_full_precision)
