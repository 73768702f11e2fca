// What `in_parallel` promises on pools that are busy in every way. Takes a number of rounds; exits with 1, and names the
// line, where a promise is broken. A thread sanitizer finds more: the counts are plain numbers that die with their call.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

#define CHECK(holds) \
  if (!(holds)) std::printf("line %d: %s does not hold\n", __LINE__, #holds), std::fflush(stdout), std::_Exit(1)

namespace {

// A thread pool as XLA hands it to a kernel. Tasks wait in a queue until somebody calls run_next, or run at once.
class Pool {
 public:
  explicit Pool(int64_t threads, bool at_once = false) : threads_(threads), at_once_(at_once) {
    api_.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      of(args->ctx)->schedule({args->task, args->data});
      return nullptr;
    };
    api_.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = of(args->ctx)->threads_;
      return nullptr;
    };
  }
  xla::ffi::ThreadPool handle() {
    auto* context = reinterpret_cast<XLA_FFI_ExecutionContext*>(this);
    return *xla::ffi::CtxDecoding<xla::ffi::ThreadPool>::Decode(&api_, context, diagnostics_);
  }
  bool run_next() {
    Task task;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (waiting_.empty()) return false;
      task = waiting_.front();
      waiting_.pop_front();
    }
    task.run(task.data);
    return true;
  }
  size_t waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.size();
  }

 private:
  struct Task {
    XLA_FFI_Task* run;
    void* data;
  };
  static Pool* of(XLA_FFI_ExecutionContext* context) { return reinterpret_cast<Pool*>(context); }
  void schedule(Task task) {
    if (at_once_) return task.run(task.data);
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(task);
  }

  XLA_FFI_Api api_{};
  xla::ffi::DiagnosticEngine diagnostics_;
  int64_t threads_;
  bool at_once_;
  std::mutex mutex_;
  std::deque<Task> waiting_;
};

// Threads that run a pool's tasks until nobody adds any and none is left.
class Workers {
 public:
  Workers(Pool& pool, int count) {
    for (int i = 0; i < count; i++)
      threads_.emplace_back([this, &pool] {
        while (pool.run_next() || !stopped_) std::this_thread::yield();
      });
  }
  ~Workers() {
    stopped_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stopped_{false};
  std::vector<std::thread> threads_;
};

// One call, each item of which is computed once. Returns the number of ranges it came in.
int call(Pool& pool, int64_t items) {
  std::vector<int> counts(items, 0);
  std::atomic<int> ranges{0};
  xla::ffi::ThreadPool handle = pool.handle();
  ferrum::in_parallel(handle, items, [&](int64_t first, int64_t last) {
    ranges++;
    if (first % 3 == 1) std::this_thread::yield();
    for (int64_t i = first; i < last; i++) counts[i]++;
  });
  for (int count : counts) CHECK(count == 1);
  return ranges;
}

void call_from_many(Pool& pool, int callers, int rounds) {
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; i++)
    threads.emplace_back([&pool, i, rounds] {
      for (int round = 0; round < rounds; round++) call(pool, (round + i) % 50);
    });
  for (std::thread& thread : threads) thread.join();
}

int free_records() {
  std::vector<ferrum::Shared*> taken;
  while (ferrum::Shared* record = ferrum::find_record(1)) taken.push_back(record);
  for (ferrum::Shared* record : taken) record->leave();
  return static_cast<int>(taken.size());
}

void a_pool_of_one_thread_gets_no_tasks() {
  for (int64_t threads : {0, 1}) {  // 0: XLA does not know
    Pool pool(threads);
    CHECK(call(pool, 100) == 1);
    CHECK(pool.waiting() == 0);
  }
}

void a_call_shares_its_items_with_a_helper_and_waits_for_it() {
  Pool pool(2);
  Workers workers(pool, 1);
  xla::ffi::ThreadPool handle = pool.handle();
  const auto caller = std::this_thread::get_id();
  std::atomic<int> begun{0};
  int counts[2] = {0, 0};
  ferrum::in_parallel(handle, 2, [&](int64_t first, int64_t last) {
    CHECK(last == first + 1);
    for (begun++; begun < 2;) std::this_thread::yield();  // each of the two threads has one
    if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    counts[first]++;
  });
  CHECK(counts[0] == 1 && counts[1] == 1);
}

void helpers_that_run_before_the_caller_leave_it_nothing() {
  Pool pool(4, true);
  for (int64_t items = 0; items < 50; items++) call(pool, items);
}

void late_helpers_find_nothing_and_free_the_record(int all) {
  Pool pool(4);
  call(pool, 100);
  CHECK(pool.waiting() == 3);
  for (int left = 3; left > 0; left--) {
    CHECK(free_records() == all - 1);  // no other call gets the record while a helper may still come
    CHECK(pool.run_next());
  }
  CHECK(free_records() == all);
}

void with_a_full_store_a_call_computes_everything_itself(int all) {
  Pool pool(2);
  for (int i = 0; i < all; i++) CHECK(call(pool, 100) > 1);
  CHECK(free_records() == 0);
  CHECK(call(pool, 100) == 1);
  CHECK(pool.waiting() == static_cast<size_t>(all));
  while (pool.run_next()) continue;
  CHECK(free_records() == all);
}

void many_callers_fill_the_store_and_all_helpers_are_late(int all, int rounds) {
  Pool pool(4);
  call_from_many(pool, 8, all);  // nobody runs a task
  CHECK(free_records() == 0);
  {
    Workers workers(pool, 3);
    call_from_many(pool, 8, rounds);
  }
  CHECK(pool.waiting() == 0);
  CHECK(free_records() == all);
}

}  // namespace

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]), all = free_records();
  CHECK(rounds > 0 && all > 0);
  a_pool_of_one_thread_gets_no_tasks();
  a_call_shares_its_items_with_a_helper_and_waits_for_it();
  CHECK(free_records() == all);
  helpers_that_run_before_the_caller_leave_it_nothing();
  CHECK(free_records() == all);
  late_helpers_find_nothing_and_free_the_record(all);
  with_a_full_store_a_call_computes_everything_itself(all);
  many_callers_fill_the_store_and_all_helpers_are_late(all, rounds);
  std::printf("all hold\n");
}
