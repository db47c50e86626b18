// cast_with_stats on the CPU: blocks that fit in the nearest cache are cast, and what that loses is
// counted while they are there.

#include "../cast_with_stats.h"
#include "../tensor_list.h"
#include "convert.h"
#include "loops.h"
#include "runs.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/bit_cast.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <vector>

namespace smart_autocast {
namespace {

constexpr int64_t kElements = 2048;  // cast at a time: 8 KiB of float32
static_assert(kElements <= kMostLooped);

using torch::headeronly::bit_cast;

struct Cast {
  ConvertFunction to_float;  // null: it is float32 already, or float64
  ConvertFunction convert;
  const Loops& loops;
  Losses losses;
  bool is_double;
};

// Half a unit beyond the largest number, and half of the smallest one: both go to even.
Losses find_losses(ScalarType dtype) {
  if (dtype == ScalarType::Half) {
    return {.overflow = bit_cast<uint32_t>(65520.0F), .underflow = bit_cast<uint32_t>(0x1p-25F)};
  }
  return {.overflow = 0x7f7f8000, .underflow = 0x8000};
}

// float64 is rounded to float32 first, in which what lies beyond would count as infinite before.
void count_double(Stats& stats, double& amax, const double* from, int64_t count, Losses losses) {
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = std::fabs(from[i]);
    if (magnitude != magnitude) {
      ++stats.nans;
      continue;
    }
    const auto bits = bit_cast<uint32_t>(static_cast<float>(magnitude));
    amax = std::max(amax, magnitude);
    stats.overflows += magnitude < HUGE_VAL && bits >= losses.overflow;
    stats.underflows += magnitude > 0 && bits <= losses.underflow;
  }
}

void cast_stretch(const Cast& cast, const Run& run, const Stretch& part, Stats& stats,
                  double& amax) {
  alignas(64) uint32_t floats[kElements];
  for (int64_t done = 0; done < part.count; done += kElements) {
    const int64_t now = std::min(kElements, part.count - done);
    const char* block = part.from + done * run.from_size;
    cast.convert(part.to + done * run.to_size, block, now, part.stream);
    if (cast.is_double) {
      count_double(stats, amax, reinterpret_cast<const double*>(block), now, cast.losses);
    } else if (cast.to_float == nullptr) {
      cast.loops.count(stats, reinterpret_cast<const uint32_t*>(block), now, cast.losses);
    } else {
      cast.to_float(floats, block, now, /*stream=*/false);
      cast.loops.count(stats, floats, now, cast.losses);
    }
  }
}

std::tuple<Tensor, Tensor> cast_with_stats(const Tensor& self, ScalarType dtype) {
  check_cast_with_stats(self, dtype);
  const ScalarType from = scalar_type_of(self);
  OwnedTensor tensor = owned_tensor(self);
  const bool misaligned = reinterpret_cast<uintptr_t>(data_of(tensor)) % self.element_size() != 0;
  if (misaligned || !is_dense(tensor, Geometry(tensor))) {
    // A dense one with the strides that the result has.
    tensor = cast_by_aten(tensor, from);
  }
  const Geometry geometry(tensor);
  const int32_t code = dtype_code(dtype);
  const OwnedTensor result =
      empty_strided(geometry, code, aoti_torch_device_type_cpu(), /*device_index=*/0);

  const Cast cast{
      .to_float = from == ScalarType::Float || from == ScalarType::Double
                      ? nullptr
                      : find_convert(ScalarType::Float, from),
      .convert = find_convert(dtype, from),
      .loops = find_loops(),
      .losses = find_losses(dtype),
      .is_double = from == ScalarType::Double,
  };
  std::vector<Run> runs;
  if (geometry.numel > 0) {
    runs.push_back({data_of(result), data_of(tensor), geometry.numel, /*to_size=*/2,
                    static_cast<int64_t>(self.element_size())});
  }
  Stats total;
  double total_amax = 0;
  std::mutex mutex;
  share_out(runs, [&](const Run& run, const Stretch& part) {
    Stats stats;
    double amax = 0;
    cast_stretch(cast, run, part, stats, amax);
    const std::lock_guard lock(mutex);
    total.amax_bits = std::max(total.amax_bits, stats.amax_bits);
    total.overflows += stats.overflows;
    total.underflows += stats.underflows;
    total.nans += stats.nans;
    total_amax = std::max(total_amax, amax);
  });

  Tensor numbers = torch::stable::empty({4}, ScalarType::Double);
  auto* number = static_cast<double*>(numbers.mutable_data_ptr());
  const auto amax = bit_cast<float>(total.amax_bits);
  number[0] = std::max(total_amax, static_cast<double>(amax));
  number[1] = static_cast<double>(total.overflows);
  number[2] = static_cast<double>(total.underflows);
  number[3] = static_cast<double>(total.nans);
  return {stable_tensor(result), numbers};
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("cast_with_stats", TORCH_BOX(&smart_autocast::cast_with_stats));
}
