#include <torch/csrc/stable/library.h>

// Every tensor in `dtype`, each number rounded to one of its two neighbours there, with
// probabilities that make the result right on average. A function of its arguments alone: the same
// bits on every device, but for NaNs, with any number of threads.
//
// Random words. An element's place is where it lies in its result, whose strides are those that
// aten::to gives (the argument's where that is dense, of whatever order of dimensions). Every
// tensor begins with a counter of its own: tensor i's are those from
//
//   first[i] = offset + sum over j < i of ceil(numel[j] / 4)      modulo 2^64
//
// and the element at place p has word p % 4 of Philox4x32-10 (Salmon et al., 2011) with
//
//   key     = (seed mod 2^32, seed div 2^32)                      seed as a number modulo 2^64
//   counter = (c mod 2^32, c div 2^32, 0, 0)                      c = first[i] + p div 4
//
// Rounding. A float64 number is rounded to float32 first, to nearest even, as every cast here is.
// Where x lies between neighbours k * q and (k + 1) * q in magnitude (q: the distance of numbers in
// x's binade, that of the denormal ones below), with f = |x| / q - k and a random word r, it
// becomes
//
//   (k + 1) * q  if r + floor(f * 2^32) >= 2^32, and k * q if not; the sign stays
//
// so what `dtype` has stays as it is, and the mean is x up to 2^-32 of q. Neighbours go on beyond
// the largest number as if exponents did: what is between that and the next is rounded to either,
// and then cast by aten::to, which makes infinity of the next (float8_e4m3fn: NaN, or the largest
// number again, by the version of torch). Infinities become what aten::to makes of them; a NaN
// stays a NaN, of any bits.
//
// `dtype` is bfloat16, float16, float8_e4m3fn or float8_e5m2; the tensors are floating, on one
// device, of any mixed dtypes and shapes; those that `dtype` holds exactly just become it. No
// gradients: a tensor that requires grad is refused. Fake, autograd and vmap registrations, and the
// implementation for devices without a kernel, are in autocast_backend/ops/_stochastic_cast.py.
STABLE_TORCH_LIBRARY_FRAGMENT(smart_autocast, m) {
  m.def(
      "stochastic_cast(Tensor[] tensors, ScalarType dtype, SymInt seed, SymInt offset) "
      "-> Tensor[]");
}
