// All elements of many tensors as one range, shared out among the threads.

#pragma once

#include "new_memory.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace smart_autocast {

// Tensors are cut at multiples of this many elements, whole lines of the cache.
constexpr int64_t kBlock = 64;
// Blocks that a thread takes at a time, 65536 elements; with fewer than two such pieces to do, it
// is not worth waking.
constexpr int64_t kPiece = 1024;
// Read and written by a call, from which on huge pages are worth asking for, however large the
// cache is: a virtual machine may be shown that of a whole chip.
constexpr int64_t kManyBytes = int64_t{42} << 20;

// The elements of a tensor, side by side in memory, and where their results go.
struct Run {
  void* to;
  const void* from;
  int64_t count;
  int64_t to_size, from_size;  // of an element
  int64_t first_block = 0;     // in the range of all runs
  bool stream = false;         // with stores that go around the caches
};

// A stretch of one, which begins with the element `first`.
struct Stretch {
  char* to;
  const char* from;
  int64_t first, count;
  bool stream;
};

// How the results of a large call are stored. To memory that nobody has written to: plainly, in
// huge pages. To other memory, where `around` says so: around the caches, so that they need not
// push out what is in them; far below their size a plain store is up to twice as fast.
template <typename AnyRun>
void choose_stores(std::vector<AnyRun>& runs, bool around) {
  NewMemory fresh;
  for (AnyRun& run : runs) {
    auto* to = static_cast<char*>(run.to);
    const bool written = is_written(to + run.count / 2 * run.to_size);
    run.stream = around && written;
    if (!written) {
      fresh.add(to, to + run.count * run.to_size);
    }
  }
  fresh.ask_for_huge_pages();
}

// The pieces that a worker begins with, on a line of the cache of their own.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// Calls work(run, stretch) until all of `runs` are done; each of them is, or begins with, a Run.
template <typename AnyRun, typename Work>
void share_out(std::vector<AnyRun>& runs, const Work& work) {
  int64_t blocks = 0, bytes = 0, read = 0;
  for (AnyRun& run : runs) {
    run.first_block = blocks;
    blocks += (run.count + kBlock - 1) / kBlock;
    bytes += run.count * (run.to_size + run.from_size);
    read += run.count * run.from_size;
  }
  const int64_t pieces = (blocks + kPiece - 1) / kPiece;
  const int64_t workers =
      std::clamp<int64_t>(pieces / 2, 1, std::max<int64_t>(1, torch::stable::get_num_threads()));
  // From here on results would push each other out of the cache, and what is read as well. Several
  // threads do not store around it faster than one, but read faster: where most is written, plain
  // stores pay for longer.
  const int64_t cache = last_level_cache_bytes(), most = cache / 3 * 2;
  if (bytes > std::min(most, kManyBytes)) {
    const bool much_read = workers == 1 || read > cache / 9 * 4;
    choose_stores(runs, /*around=*/bytes > most && (much_read || bytes > kManyBytes));
  }
  // Each has the same share at every call, for what is left of it in its core's caches. But a
  // thread that touches new memory is many times slower there, and others may be using its core:
  // whoever is done takes pieces of the next one's share.
  std::vector<Share> shares(workers);
  for (int64_t i = 0; i < workers; ++i) {
    shares[i].next = pieces * i / workers;
    shares[i].end = pieces * (i + 1) / workers;
  }
  const auto do_piece = [&](int64_t piece) {
    const int64_t begin = piece * kPiece, end = std::min(begin + kPiece, blocks);
    const auto run =
        std::upper_bound(runs.cbegin(), runs.cend(), begin,
                         [](int64_t block, const Run& r) { return block < r.first_block; }) -
        1;
    for (auto part = run; part != runs.cend() && part->first_block < end; ++part) {
      const int64_t from = std::max<int64_t>(begin - part->first_block, 0) * kBlock;
      const int64_t to = std::min((end - part->first_block) * kBlock, part->count);
      work(*part, Stretch{static_cast<char*>(part->to) + from * part->to_size,
                          static_cast<const char*>(part->from) + from * part->from_size, from,
                          to - from, part->stream});
    }
  };
  const auto take_pieces = [&](int64_t worker, int64_t) {
    for (int64_t turn = 0; turn < workers; ++turn) {
      Share& share = shares[(worker + turn) % workers];
      for (int64_t piece;
           (piece = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        do_piece(piece);
      }
    }
  };
  if (workers > 1) {
    torch::stable::parallel_for(0, workers, 1, take_pieces);
  } else {
    take_pieces(0, 1);
  }
}

}  // namespace smart_autocast
