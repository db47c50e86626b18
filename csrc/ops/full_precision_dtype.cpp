#include "smart_cast.h"

#include <torch/csrc/stable/library.h>

namespace smart_autocast {

std::optional<ScalarType> full_precision_dtype(const Tensor& self, std::optional<ScalarType> dtype,
                                               std::optional<std::string> device_type) {
  constexpr auto op = "full_precision_dtype";
  if (dtype.has_value()) {
    return dtype;
  }
  check_supported(op, "self", self);
  const auto device = parse_device_type(op, device_type);
  return is_eligible(self, device) ? std::optional(ScalarType::Float) : std::nullopt;
}

}  // namespace smart_autocast

// The dtype argument that autocast's policy `fp32_set_opt_dtype` gives to an op such as softmax or
// sum: `dtype` where the caller named one, else float32 for an eligible `self` (see smart_cast.h),
// else none. With it a graph holds `softmax(x, -1, full_precision_dtype(x))` and no dtype.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def(
      "full_precision_dtype(Tensor self, ScalarType? dtype=None, *, str? device_type=None) "
      "-> ScalarType?");
}

SMART_AUTOCAST_COMPOSITE_OP("full_precision_dtype", smart_autocast::full_precision_dtype)
