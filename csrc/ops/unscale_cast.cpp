#include <torch/csrc/stable/library.h>

// What torch.amp.GradScaler does to gradients in two passes over memory, in one: every tensor in
// `dtype` as `cast` gives it, times the reciprocal of `scale`, and whether any number was not
// finite.
//
//   inverse = float32(1 / float64(scale))
//   narrow  = grads[i] in dtype, rounded as aten::to rounds
//   result  = narrow * inverse, computed in float32 (float64 where dtype is), rounded to dtype
//
// result[i] has the strides of grads[i] where that is dense. The second result, found_inf, is a
// float32 tensor of no dimensions on the device of `scale`, as fused optimizers take it: 1 if an
// element of a `narrow` is infinite or NaN, else 0; what the product makes infinite does not count.
// A NaN stays a NaN, of any bits.
//
// `out`: into these tensors, of `dtype` and the shapes of `grads`, each with memory of its own, or
// grads[i] itself as out[i]; none that `scale` is in. The result is found_inf.
//
// `grads` are floating (float8 too), of any shapes, strides and mixed dtypes, on the device of
// `scale`, a float32 tensor of one element that is never read on the host. `dtype` is float64,
// float32, float16 or bfloat16. Not differentiable. Fake, autograd and vmap registrations, and the
// implementation for devices without a kernel, are in autocast_backend/ops/_unscale_cast.py.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def("unscale_cast(Tensor[] grads, Tensor scale, ScalarType dtype) -> (Tensor[], Tensor)");
  m.def(
      "unscale_cast.out(Tensor[] grads, Tensor scale, ScalarType dtype, *, Tensor(a!)[] out) -> "
      "Tensor");
}
