// Work divided among the calling thread and XLA's pool.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ferrum {

// What a call shares with its helpers. Items are taken one by one, so that a caller whose helpers never come does all of
// them itself: a busy pool is no deadlock. Helpers may come when all is done and the call has returned, so a record goes
// back to the store with the last of those who hold it.
struct Shared {
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> holders{0};  // 0: the record is free
  int64_t items = 0;
  void (*run)(const void*, int64_t) = nullptr;
  const void* work = nullptr;

  void take() {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      run(work, item);
      done.fetch_add(1, std::memory_order_release);
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

// Calls f with 0 to items - 1, in any order and on any thread of the pool; returns when all calls have.
template <class F> void in_parallel(xla::ffi::ThreadPool& pool, int64_t items, const F& f) {
  const int64_t threads = threads_of(pool) < items ? threads_of(pool) : items;
  Shared* shared = threads > 1 ? find_record(static_cast<int>(threads)) : nullptr;
  if (shared == nullptr) {
    for (int64_t item = 0; item < items; item++) f(item);
    return;
  }
  shared->next.store(0, std::memory_order_relaxed);
  shared->done.store(0, std::memory_order_relaxed);
  shared->items = items;
  shared->run = [](const void* work, int64_t item) { (*static_cast<const F*>(work))(item); };
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
