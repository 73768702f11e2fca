// Work divided among the calling thread and XLA's pool.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ferrum {

// What a call shares with its helpers. Items are taken from the front, fewer at a time as fewer are left (Polychronopoulos
// and Kuck 1987, "Guided Self-Scheduling"), so that all end at once, and so that a caller whose helpers never come does all
// of them itself: a busy pool is no deadlock. Helpers may come when all is done and the call has returned, so a record goes
// back to the store with the last of those who hold it.
struct Shared {
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> holders{0};  // 0: the record is free
  int64_t items = 0, threads = 1;
  void (*run)(const void*, int64_t first, int64_t last) = nullptr;
  const void* work = nullptr;

  void take() {
    for (int64_t first = next.load(std::memory_order_relaxed); first < items;) {
      const int64_t share = (items - first) / (2 * threads), count = share < 1 ? 1 : share;
      if (!next.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) continue;
      run(work, first, first + count);
      done.fetch_add(count, std::memory_order_release);
      first = next.load(std::memory_order_relaxed);
    }
  }
  void leave() { holders.fetch_sub(1, std::memory_order_release); }
};

inline Shared* find_record(int holders) {
  static Shared store[256];
  for (Shared& record : store) {
    int free = 0;
    if (record.holders.compare_exchange_strong(free, holders, std::memory_order_acquire)) return &record;
  }
  return nullptr;
}

inline int64_t threads_of(const xla::ffi::ThreadPool& pool) {
  const int64_t found = pool.num_threads();
  return found < 1 ? 1 : found;
}

// Calls f with ranges that make up 0 to items - 1, in any order and on any thread of the pool; returns when all calls have.
template <class F> void in_parallel(xla::ffi::ThreadPool& pool, int64_t items, const F& f) {
  const int64_t threads = threads_of(pool) < items ? threads_of(pool) : items;
  Shared* shared = threads > 1 ? find_record(static_cast<int>(threads)) : nullptr;
  if (shared == nullptr) {
    f(0, items);
    return;
  }
  shared->next.store(0, std::memory_order_relaxed);
  shared->done.store(0, std::memory_order_relaxed);
  shared->items = items;
  shared->threads = threads;
  shared->run = [](const void* work, int64_t first, int64_t last) { (*static_cast<const F*>(work))(first, last); };
  shared->work = &f;
  for (int64_t helper = 1; helper < threads; helper++)
    pool.Schedule([shared] {
      shared->take();
      shared->leave();
    });
  shared->take();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < items; spins++)
    if (spins > 1000) std::this_thread::yield();
  shared->leave();
}

}  // namespace ferrum
