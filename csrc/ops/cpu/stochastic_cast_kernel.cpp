// stochastic_cast on the CPU: blocks that fit in the nearest cache are made float32 in a buffer
// there, rounded to what `dtype` has, and cast on their way out, which then changes nothing.

#include "../stochastic_cast.h"
#include "convert.h"
#include "loops.h"
#include "runs.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

constexpr int64_t kElements = 1024;  // in a buffer: 4 KiB
static_assert(kElements % 4 == 0 && kElements <= kMostLooped && kBlock % 4 == 0);

struct StochasticRun : Run {
  ConvertFunction to_float;
  uint64_t counter;  // the first
};

// What is the same for all tensors.
struct Stochastic {
  const Loops& loops;
  Grid grid;
  uint64_t seed;
  ConvertFunction finish;  // from float32 to dtype
};

void round(const Stochastic& how, const StochasticRun& run, const Stretch& part) {
  alignas(64) uint32_t bits[kElements];
  for (int64_t done = 0; done < part.count; done += kElements) {
    const int64_t now = std::min(kElements, part.count - done);
    run.to_float(bits, part.from + done * run.from_size, now, /*stream=*/false);
    how.loops.round(bits, now, how.grid, how.seed, run.counter + (part.first + done) / 4);
    how.finish(part.to + done * run.to_size, bits, now, part.stream);
  }
}

void stochastic_cast_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const auto seed = torch::stable::detail::to<int64_t>(stack[2]);
  const auto offset = torch::stable::detail::to<int64_t>(stack[3]);
  check_stochastic_cast(tensors, dtype, offset);
  const int32_t code = dtype_code(dtype);
  const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(code));

  TensorList results, cast;  // cast: by ATen, which makes them dense
  std::vector<StochasticRun> runs;
  results.reserve(tensors.size());
  cast.reserve(tensors.size());
  runs.reserve(tensors.size());
  auto counter = static_cast<uint64_t>(offset);
  for (const OwnedTensor& tensor : tensors) {
    const OwnedTensor* source = &tensor;
    int32_t from = dtype_of(tensor);
    ConvertFunction to_float = find_convert(ScalarType::Float, scalar_type(from));
    if (to_float == nullptr || !is_dense(tensor, Geometry(tensor))) {
      source = &cast.emplace_back(cast_by_aten(tensor, ScalarType::Float));
      from = dtype_code(ScalarType::Float);
      to_float = find_convert(ScalarType::Float, ScalarType::Float);
    }
    const Geometry geometry(*source);
    AtenTensorHandle result = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(geometry.dim, geometry.sizes, geometry.strides,
                                                    code, aoti_torch_device_type_cpu(),
                                                    /*device_index=*/0, &result));
    results.emplace_back(result);
    if (geometry.numel > 0) {
      runs.push_back({{data_of(results.back()), data_of(*source), geometry.numel, size,
                       static_cast<int64_t>(aoti_torch_dtype_element_size(from))},
                      to_float,
                      counter});
    }
    counter += static_cast<uint64_t>(geometry.numel + 3) / 4;
  }

  const Stochastic how{.loops = find_loops(),
                       .grid = find_grid(dtype),
                       .seed = static_cast<uint64_t>(seed),
                       .finish = find_convert(dtype, ScalarType::Float)};
  share_out(runs, [&](const StochasticRun& run, const Stretch& part) { round(how, run, part); });
  stack[0] = give_list(std::move(results));
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("stochastic_cast", &smart_autocast::stochastic_cast_cpu);
}
