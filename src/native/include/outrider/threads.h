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
//
// Items are handed out one by one, and a section ends when they are done, not when every thread has turned up: a thread
// that the system has put aside holds nobody up unless it holds an item.
class ThreadPool {
 public:
  // threads: including the caller; at least 1. Throws std::invalid_argument otherwise.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn(item) for every item in [0, count) and returns when all are done. Rethrows the first exception; items not
  // yet begun are then left out.
  template <typename F>
  void parallel_for(std::int64_t count, F&& fn) {
    run(count, [&](std::int64_t item, int) { fn(item); });
  }

  // The same, with fn(item, thread): for scratch memory of each thread's own.
  struct WithThread {};
  template <typename F>
  void parallel_for(std::int64_t count, F&& fn, WithThread) {
    run(count, fn);
  }

  // Runs fn(part, parts) once for each part in [0, parts), parts being the number of threads. No two calls share a
  // part, but one thread may run several.
  template <typename F>
  void parallel(F&& fn) {
    run(size(), [&, parts = size()](std::int64_t part, int) { fn(static_cast<int>(part), parts); });
  }

 private:
  struct Section {
    void (*call)(void* self, std::int64_t item, int thread);
    void* self;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};
  };

  template <typename F>
  void run(std::int64_t count, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    if (count <= 1 || workers_.empty()) {
      for (std::int64_t item = 0; item < count; ++item) fn(item, 0);
      return;
    }
    Section section{[](void* self, std::int64_t item, int thread) { (*static_cast<Fn*>(self))(item, thread); },
                    const_cast<void*>(static_cast<const void*>(std::addressof(fn))), count};
    run_section(section);
  }

  void run_section(Section&);
  void work(int thread);
  void drain(Section&, int thread) noexcept;

  std::vector<std::thread> workers_;
  Section* section_ = nullptr;
  // How many workers are in the section, and whether it still lets any in. Apart from what sleeping workers look at.
  static constexpr std::uint32_t kClosed = 1u << 31;
  alignas(64) std::atomic<std::uint32_t> gate_{kClosed};
  alignas(64) std::atomic<std::uint32_t> calls_{0};  // counts sections; workers wait for it to change
  std::atomic<bool> stop_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace outrider
