// cast_with_stats on the CPU: blocks that fit in the nearest cache are cast into a buffer there,
// counted, and written out from it.

#include "../cast_with_stats.h"
#include "../tensor_list.h"
#include "convert.h"
#include "loops.h"
#include "last_level_cache.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/bit_cast.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <mutex>

namespace smart_autocast {
namespace {

constexpr int64_t kBlock = 2048;   // elements cast at a time: 4 KiB of them, and 8 KiB of float32
constexpr int64_t kPiece = 65536;  // elements that a thread takes at a time
static_assert(kBlock <= kMostLooped);

struct Cast {
  ConvertFunction to_float;  // null: it is float32 already, or float64
  ConvertFunction convert;
  ConvertFunction copy;
  const Loops& loops;
  uint16_t infinity;
  bool is_double;
  int64_t from_size;
};

// float64 cannot pass through float32 here: what is beyond that would count as infinite before.
void count_double(Stats& stats, double& amax, const double* from, const uint16_t* to, int64_t count,
                  uint16_t infinity) {
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = std::fabs(from[i]);
    const int result = to[i] & 0x7fff;
    if (magnitude != magnitude) {
      ++stats.nans;
    } else {
      amax = std::max(amax, magnitude);
      stats.overflows += magnitude < HUGE_VAL && result == infinity;
      stats.underflows += magnitude > 0 && result == 0;
    }
  }
}

// The cast and the count of `count` elements.
void cast_piece(const Cast& cast, Stats& stats, double& amax, char* to, const char* from,
                int64_t count, bool stream) {
  alignas(64) uint16_t results[kBlock];
  alignas(64) uint32_t floats[kBlock];
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t now = std::min(kBlock, count - done);
    const char* block = from + done * cast.from_size;
    cast.convert(results, block, now, /*stream=*/false);
    if (cast.is_double) {
      count_double(stats, amax, reinterpret_cast<const double*>(block), results, now,
                   cast.infinity);
    } else if (cast.to_float == nullptr) {
      cast.loops.count(stats, reinterpret_cast<const uint32_t*>(block), results, now,
                       cast.infinity);
    } else {
      cast.to_float(floats, block, now, /*stream=*/false);
      cast.loops.count(stats, floats, results, now, cast.infinity);
    }
    cast.copy(to + done * 2, results, now, stream);
  }
}

std::tuple<Tensor, Tensor> cast_with_stats(const Tensor& self, ScalarType dtype) {
  check_cast_with_stats(self, dtype);
  const ScalarType from = self.scalar_type();
  OwnedTensor tensor = owned_tensor(self);
  if (!is_dense(tensor, Geometry(tensor))) {
    // A dense one with the strides that the result has.
    tensor = cast_by_aten(tensor, from);
  }
  const Geometry geometry(tensor);
  const int32_t code = dtype_code(dtype);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(geometry.dim, geometry.sizes, geometry.strides,
                                                  code, aoti_torch_device_type_cpu(), 0, &handle));
  const OwnedTensor result(handle);

  const Cast cast{
      .to_float = from == ScalarType::Float || from == ScalarType::Double
                      ? nullptr
                      : find_convert(ScalarType::Float, from),
      .convert = find_convert(dtype, from),
      .copy = find_convert(dtype, dtype),
      .loops = find_loops(),
      .infinity = static_cast<uint16_t>(dtype == ScalarType::Half ? 0x7c00 : 0x7f80),
      .is_double = from == ScalarType::Double,
      .from_size = static_cast<int64_t>(self.element_size()),
  };
  const int64_t pieces = (geometry.numel + kPiece - 1) / kPiece;
  char* to_data = data_of(result);
  const bool stream = geometry.numel * (cast.from_size + 2) > last_level_cache_bytes() / 2 &&
                      is_written(to_data + geometry.numel);
  const char* from_data = data_of(tensor);
  Stats total;
  double total_amax = 0;
  std::mutex mutex;
  std::atomic<int64_t> next_piece = 0;
  const auto work = [&](int64_t, int64_t) {
    Stats stats;
    double amax = 0;
    for (int64_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      const int64_t begin = piece * kPiece, count = std::min(kPiece, geometry.numel - begin);
      cast_piece(cast, stats, amax, to_data + begin * 2, from_data + begin * cast.from_size, count,
                 stream);
    }
    const std::lock_guard lock(mutex);
    total.amax_bits = std::max(total.amax_bits, stats.amax_bits);
    total.overflows += stats.overflows;
    total.underflows += stats.underflows;
    total.nans += stats.nans;
    total_amax = std::max(total_amax, amax);
  };
  const int64_t workers = std::min<int64_t>(pieces / 2, torch::stable::get_num_threads());
  if (workers > 1) {
    torch::stable::parallel_for(0, workers, 1, work);
  } else {
    work(0, 1);
  }

  Tensor numbers = torch::stable::empty({4}, ScalarType::Double);
  auto* number = static_cast<double*>(numbers.mutable_data_ptr());
  const auto amax = torch::headeronly::bit_cast<float>(total.amax_bits);
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
