#include "smart_cast.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

Tensor autocast_to_reduced_precision(const Tensor& self, ScalarType dtype,
                                     std::optional<std::string> device_type) {
  constexpr auto op = "autocast_to_reduced_precision";
  if (!is_autocast_dtype(dtype) || dtype == ScalarType::Float) {
    fail(op,
         "argument 'dtype' must be a floating dtype narrower than float32, such as "
         "torch.float16 or torch.bfloat16, got " +
             dtype_name(dtype));
  }
  return smart_cast(op, self, dtype, device_type);
}

}  // namespace smart_autocast

// `self` in `dtype`, rounded as aten::to rounds, for an eligible `self` (see smart_cast.h); else
// `self`. `dtype` is a floating dtype narrower than float32. The gradient returns in self's dtype.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def(
      "autocast_to_reduced_precision(Tensor(a) self, ScalarType dtype, *, str? device_type=None) "
      "-> Tensor(a)");
}

SMART_AUTOCAST_COMPOSITE_OP("autocast_to_reduced_precision",
                            smart_autocast::autocast_to_reduced_precision)
