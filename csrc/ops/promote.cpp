#include "smart_cast.h"
#include "torch_errors.h"

#include <torch/csrc/stable/library.h>

#include <vector>

namespace smart_autocast {

std::vector<Tensor> promote(std::vector<Tensor> tensors, std::optional<std::string> device_type) {
  constexpr auto op = "promote";
  const auto device = parse_device_type(op, device_type);

  std::optional<ScalarType> widest;
  for (const Tensor& tensor : tensors) {
    check_supported(op, "tensors", tensor);
    if (is_eligible(tensor, device)) {
      const ScalarType dtype = scalar_type_of(tensor);
      widest = !widest.has_value() || *widest == dtype ? dtype : ScalarType::Float;
    }
  }
  for (Tensor& tensor : tensors) {
    if (is_eligible(tensor, device) && scalar_type_of(tensor) != *widest) {
      check_convertible(op, "tensors", tensor);
      tensor = to(tensor, *widest);
    }
  }
  return tensors;
}

}  // namespace smart_autocast

// The tensors, in order, with every eligible one (see smart_cast.h) in the dtype that holds them
// all: their common dtype where they have one, else float32. float16 with bfloat16 gives float32
// (eager autocast raises: pytorch/pytorch#191125); float64 tensors take no part, as in eager.
// A tensor that needs no cast is returned itself. Each gradient returns in its tensor's dtype.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("promote(Tensor(a)[] tensors, *, str? device_type=None) -> Tensor(a)[]");
}

SMART_AUTOCAST_COMPOSITE_OP("promote", smart_autocast::promote)
