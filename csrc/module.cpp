// The Python module autocast_backend._C: facts about this build, this machine and the arguments of
// a call, for the host side only. The ops are in the same library and register themselves when it
// is loaded.

// The pybind11 headers that torch 2.11 ships refuse to be included for the stable ABI; this file
// uses nothing of torch.
#undef TORCH_TARGET_VERSION

#include "look_at_tensors.h"
#include "ops/cpu/capability.h"

#include <pybind11/pybind11.h>

#include <string>

namespace {

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

// In ATen's spelling.
std::string cpu_capability() {
  switch (smart_autocast::cpu_capability()) {
    case smart_autocast::Capability::kAvx512Bf16:
    case smart_autocast::Capability::kAvx512:
      return "AVX512";
    case smart_autocast::Capability::kAvx2:
      return "AVX2";
    case smart_autocast::Capability::kDefault:
      break;
  }
  return "DEFAULT";
}

// What its caches are like shows in what a call costs, whatever the instruction set.
std::string cpu_vendor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) {
    return "amd";
  }
  if (__builtin_cpu_is("intel")) {
    return "intel";
  }
#endif
  return "other";
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = SMART_AUTOCAST_TORCH_VERSION;
  info["python"] = PY_VERSION;
  info["compiler"] = compiler();
  info["cuda_architectures"] = SMART_AUTOCAST_CUDA_ARCHITECTURES;
  return info;
}

// A plain function of Python's C API: `multi_cast` calls it each time, and pybind11 would only
// pass its arguments on.
PyMethodDef functions[] = {
    {"look_at_tensors",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(smart_autocast::look_at_tensors)),
     METH_FASTCALL,
     "look_at_tensors(tensors, types) -> int: 0 if 'tensors' is no list or tuple, or one of them "
     "is not exactly of one of 'types', a tuple; 2 if one of them requires grad; else 1."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info,
        "What this library was built with: torch, python, compiler, cuda_architectures (each a "
        "str; the last is 'none' where the CUDA library was not built).");
  m.def("cpu_capability", &cpu_capability,
        "The instruction set that the CPU kernels use: 'AVX512', 'AVX2' or 'DEFAULT', the widest "
        "that this CPU has and ATEN_CPU_CAPABILITY allows.");
  m.def("cpu_vendor", &cpu_vendor, "Who made this CPU: 'amd', 'intel' or 'other'.");
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) {
    throw pybind11::error_already_set();
  }
}
