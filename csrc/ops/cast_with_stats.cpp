#include <torch/csrc/stable/library.h>

// `tensor` in `dtype` as `cast` gives it, and in the same pass over memory four numbers in float64:
//
//   amax        the largest magnitude of an element that is no NaN; 0 if there is none
//   overflows   finite elements that became infinite
//   underflows  elements other than 0 that became 0
//   nans        elements that are NaN
//
// `dtype` is float16 or bfloat16; `tensor` is float64, float32, float16 or bfloat16. The numbers
// have no gradient. Fake, autograd and vmap registrations, and the implementation for devices
// without a kernel, are in autocast_backend/ops/_cast_with_stats.py.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("cast_with_stats(Tensor tensor, ScalarType dtype) -> (Tensor, Tensor)");
}
