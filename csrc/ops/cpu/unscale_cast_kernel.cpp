// unscale_cast on the CPU: blocks that fit in the nearest cache are cast into a buffer there, and
// multiplied and looked through on their way out.

#include "../unscale_cast.h"
#include "argument_list.h"
#include "convert.h"
#include "dense_list.h"
#include "loops.h"
#include "runs.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace smart_autocast {
namespace {

constexpr int64_t kElements = 1024;  // in a buffer: 4 KiB of float32
static_assert(kElements <= kMostLooped);

struct UnscaleRun : Run {
  ConvertFunction narrow;  // into dtype; null: it is that already, and aligned
};

// What is the same for all gradients.
struct Unscale {
  const Loops& loops;
  double factor;
  bool is_double;          // computed in; else in float32
  ConvertFunction widen;   // from dtype to what is computed in; null: it is that already
  ConvertFunction finish;  // and back
};

// Whether a number was infinite or NaN.
bool unscale(const Unscale& how, const UnscaleRun& run, const Stretch& part) {
  alignas(64) char narrow[kElements * sizeof(double)];
  alignas(64) char wide[kElements * sizeof(double)];
  alignas(64) char product[kElements * sizeof(double)];
  // Straight to the result where nothing is left to do, and the loop can store there.
  const bool aligned = reinterpret_cast<uintptr_t>(part.to) % run.to_size == 0;
  const bool finish = how.widen != nullptr || part.stream || !aligned;
  bool found = false;
  for (int64_t done = 0; done < part.count; done += kElements) {
    const int64_t now = std::min(kElements, part.count - done);
    const void* block = part.from + done * run.from_size;
    for (const auto& [step, buffer] : {std::pair{run.narrow, narrow}, {how.widen, wide}}) {
      if (step != nullptr) {
        step(buffer, block, now, /*stream=*/false);
        block = buffer;
      }
    }
    char* to = part.to + done * run.to_size;
    void* into = finish ? product : to;
    if (how.is_double) {
      found |= how.loops.scale_double(static_cast<double*>(into), static_cast<const double*>(block),
                                      now, how.factor);
    } else {
      found |= how.loops.scale(static_cast<float*>(into), static_cast<const float*>(block), now,
                               static_cast<float>(how.factor));
    }
    if (finish) {
      how.finish(to, product, now, part.stream);
    }
  }
  return found;
}

// The new results, none with `out`, and found_inf.
std::pair<TensorList, Tensor> run_all(const TensorList& grads, const OwnedTensor& scale,
                                      ScalarType dtype, const TensorList* out) {
  DenseList list(/*read_as=*/dtype, dtype, out);
  std::vector<UnscaleRun> runs;
  runs.reserve(grads.size());
  list.for_each(grads, [&](const Run& run, ConvertFunction narrow, ScalarType from) {
    const bool aligned = reinterpret_cast<uintptr_t>(run.from) % run.from_size == 0;
    const bool in_place = run.from == run.to;  // which the loops do not take
    runs.push_back({run, from == dtype && aligned && !in_place ? nullptr : narrow});
  });

  const bool is_double = dtype == ScalarType::Double;
  const ScalarType wide = is_double ? ScalarType::Double : ScalarType::Float;
  float scale_value = 0;
  std::memcpy(&scale_value, data_of(scale), sizeof(scale_value));
  const Unscale how{
      .loops = find_loops(),
      .factor = static_cast<float>(1.0 / static_cast<double>(scale_value)),
      .is_double = is_double,
      .widen = dtype == wide ? nullptr : find_convert(wide, dtype),
      .finish = find_convert(dtype, wide),
  };
  std::atomic<bool> found = false;
  share_out(runs, [&](const UnscaleRun& run, const Stretch& part) {
    if (unscale(how, run, part)) {
      found.store(true, std::memory_order_relaxed);
    }
  });

  Tensor found_inf = torch::stable::empty({}, ScalarType::Float);
  *static_cast<float*>(found_inf.mutable_data_ptr()) = found ? 1.0F : 0.0F;
  return {list.finish(), found_inf};
}

void unscale_cast_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const ArgumentList grads(stack[0]);
  const OwnedTensor scale(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[2]);
  check_unscale_cast(*grads, scale, dtype);
  auto [results, found_inf] = run_all(*grads, scale, dtype, /*out=*/nullptr);
  stack[0] = give_list(std::move(results));
  stack[1] = torch::stable::detail::from(found_inf);
}

void unscale_cast_out_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const ArgumentList grads(stack[0]);
  const OwnedTensor scale(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[2]);
  const ArgumentList out(stack[3]);
  check_unscale_cast_out(*grads, scale, dtype, *out);
  stack[0] = torch::stable::detail::from(run_all(*grads, scale, dtype, &*out).second);
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("unscale_cast", &smart_autocast::unscale_cast_cpu);
  m.impl("unscale_cast.out", &smart_autocast::unscale_cast_out_cpu);
}
