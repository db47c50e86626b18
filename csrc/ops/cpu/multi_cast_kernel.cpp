// multi_cast on the CPU: all elements of all tensors as one range, shared out among the threads.
//
// A tensor whose elements fill its memory without holes, in whatever order of dimensions, is one
// run of elements, and its result another with the same strides. What is not (slices, expanded
// tensors, dtypes that are not floating) is ATen's copy, before the threads begin.

#include "../multi_cast.h"
#include "argument_list.h"
#include "convert.h"
#include "runs.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

struct CastRun : Run {
  ConvertFunction convert;
};

void run_all(std::vector<CastRun>& runs) {
  share_out(runs, [](const CastRun& run, const Stretch& part) {
    run.convert(part.to, part.from, part.count, part.stream);
  });
}

// The conversion for each tensor in turn; many have the dtype of the one before.
class FindConvert {
 public:
  explicit FindConvert(ScalarType to) : to_(to) {}

  ConvertFunction operator()(int32_t from) {
    if (from != last_) {
      last_ = from;
      found_ = find_convert(to_, scalar_type(from));
    }
    return found_;
  }

 private:
  ScalarType to_;
  int32_t last_ = -1;
  ConvertFunction found_ = nullptr;
};

void multi_cast_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const ArgumentList tensors(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  check_multi_cast(*tensors, dtype);
  const int32_t code = dtype_code(dtype), cpu = aoti_torch_device_type_cpu();
  const auto to_size = static_cast<int64_t>(aoti_torch_dtype_element_size(code));
  FindConvert find(dtype);
  TensorList results(tensors.size());
  std::vector<CastRun> runs;
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int32_t from = dtype_of(tensors[i]);
    const ConvertFunction convert = find(from);
    const Geometry geometry(tensors[i]);
    if (convert == nullptr || !is_dense(tensors[i], geometry)) {
      results[i] = cast_memory_by_aten(tensors[i], dtype);
      continue;
    }
    results[i] = empty_strided(geometry, code, cpu, /*device_index=*/0);
    if (geometry.numel > 0) {
      runs.push_back({{data_of(results[i]), data_of(tensors[i]), geometry.numel, to_size,
                       static_cast<int64_t>(aoti_torch_dtype_element_size(from))},
                      convert});
    }
  }
  run_all(runs);
  stack[0] = give_list(std::move(results));
}

void multi_cast_out_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const ArgumentList tensors(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const ArgumentList out(stack[2]);
  check_multi_cast_out(*tensors, dtype, *out);
  const auto to_size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_code(dtype)));
  FindConvert find(dtype);
  std::vector<CastRun> runs;
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int32_t from = dtype_of(tensors[i]);
    const ConvertFunction convert = find(from);
    const Geometry geometry(tensors[i]);
    if (convert == nullptr || !is_dense(tensors[i], geometry) ||
        !same_strides(geometry, Geometry(out[i]))) {
      copy_by_aten(out[i], tensors[i]);
    } else if (geometry.numel > 0) {
      runs.push_back({{data_of(out[i]), data_of(tensors[i]), geometry.numel, to_size,
                       static_cast<int64_t>(aoti_torch_dtype_element_size(from))},
                      convert});
    }
  }
  run_all(runs);
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("multi_cast", &smart_autocast::multi_cast_cpu);
  m.impl("multi_cast.out", &smart_autocast::multi_cast_out_cpu);
}
