// A small pool of threads that stays warm between the many short parallel sections of a forward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace outrider {

// The calling thread takes part as thread 0. One section at a time; sections do not nest.
// What a section computes must not depend on the number of threads: split work over outputs, never over a sum.
class ThreadPool {
 public:
  // threads: including the caller; at least 1. Throws std::invalid_argument otherwise.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn(thread, threads) once on every thread and returns when all are done. Rethrows the first exception.
  template <typename F>
  void parallel(F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run([](void* self, int thread, int threads) { (*static_cast<Fn*>(self))(thread, threads); },
        const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
  }

  // Runs fn(item) for every item in [0, count). Items are handed out one by one, so that a thread which the system
  // has put aside for a while does not hold up the rest.
  template <typename F>
  void parallel_for(std::int64_t count, F&& fn) {
    parallel_for(count, [&](std::int64_t item, int) { fn(item); }, WithThread{});
  }

  // The same, with fn(item, thread): for scratch memory of each thread's own.
  struct WithThread {};
  template <typename F>
  void parallel_for(std::int64_t count, F&& fn, WithThread) {
    if (count <= 1 || workers_.empty()) {
      for (std::int64_t item = 0; item < count; ++item) fn(item, 0);
      return;
    }
    std::atomic<std::int64_t> next{0};
    parallel([&](int thread, int) {
      for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(item, thread);
    });
  }

 private:
  using Section = void (*)(void* self, int thread, int threads);

  void run(Section section, void* self);
  void work(int thread);
  void execute(int thread) noexcept;

  std::vector<std::thread> workers_;
  Section section_ = nullptr;
  void* self_ = nullptr;
  // Apart from each other: the workers spin on one while the caller spins on the other.
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> running_{0};
  std::atomic<bool> stop_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace outrider
