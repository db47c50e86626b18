// stochastic_cast on the CPU: blocks that fit in the nearest cache are made float32 in a buffer
// there, rounded to what `dtype` has, and cast on their way out, which then changes nothing.

#include "../stochastic_cast.h"
#include "argument_list.h"
#include "convert.h"
#include "dense_list.h"
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
  const ArgumentList tensors(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const auto seed = torch::stable::detail::to<int64_t>(stack[2]);
  const auto offset = torch::stable::detail::to<int64_t>(stack[3]);
  check_stochastic_cast(*tensors, dtype, offset);
  DenseList list(/*read_as=*/ScalarType::Float, dtype, /*out=*/nullptr);
  std::vector<StochasticRun> runs;
  runs.reserve(tensors.size());
  auto counter = static_cast<uint64_t>(offset);
  list.for_each(*tensors, [&](const Run& run, ConvertFunction to_float, ScalarType) {
    runs.push_back({run, to_float, counter});
    counter += static_cast<uint64_t>(run.count + 3) / 4;
  });

  const Stochastic how{.loops = find_loops(),
                       .grid = find_grid(dtype),
                       .seed = static_cast<uint64_t>(seed),
                       .finish = find_convert(dtype, ScalarType::Float)};
  share_out(runs, [&](const StochasticRun& run, const Stretch& part) { round(how, run, part); });
  stack[0] = give_list(list.finish());
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("stochastic_cast", &smart_autocast::stochastic_cast_cpu);
}
