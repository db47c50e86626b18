// A list of any length as tables, one for each launch: the host's half of table.cuh, which needs no
// CUDA header either.

#pragma once

#include "table.cuh"

#include <algorithm>
#include <vector>

namespace smart_autocast {
namespace {

constexpr int64_t kSmallChunk = 256;

// One for each chunk. With as many blocks as run at once, each of which goes from chunk to chunk, a
// GPU's memory is 5 % slower.
template <int kCapacity>
unsigned count_blocks(const Table<kCapacity>& table) {
  return static_cast<unsigned>((table.total + table.chunk - 1) / table.chunk);
}

// Entries have their own numbers of elements, none 0, as their `end`; a block gets `chunk` of them,
// or fewer where that would leave processors without work.
template <int kCapacity>
Table<kCapacity> make_table(const Entry* entries, int size, int64_t chunk, int64_t blocks_at_once) {
  Table<kCapacity> table;
  table.size = size;
  table.total = 0;
  for (int i = 0; i < size; ++i) {
    table.total = next_begin(table.total) + entries[i].end;
    table.entries[i] = {entries[i].from, entries[i].to, table.total};
  }
  table.chunk = chunk;
  while (table.chunk > kSmallChunk && 2 * (table.total / table.chunk) < blocks_at_once) {
    table.chunk /= 2;
  }
  table.entries_per_block = static_cast<float>(size) / static_cast<float>(count_blocks(table));
  return table;
}

// start(table, blocks) for as many entries at a time as a table holds.
template <typename Start>
void for_each_table(const std::vector<Entry>& entries, bool large_tables, int64_t chunk,
                    int64_t blocks_at_once, const Start& start) {
  const int size = static_cast<int>(entries.size());
  const bool large = large_tables && size > kSmallTable;
  const int capacity = large ? kLargeTable : kSmallTable;
  for (int done = 0; done < size; done += capacity) {
    const int now = std::min(capacity, size - done);
    if (large) {
      const auto table = make_table<kLargeTable>(entries.data() + done, now, chunk, blocks_at_once);
      start(table, count_blocks(table));
    } else {
      const auto table = make_table<kSmallTable>(entries.data() + done, now, chunk, blocks_at_once);
      start(table, count_blocks(table));
    }
  }
}

}  // namespace
}  // namespace smart_autocast
