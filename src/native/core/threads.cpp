#include "outrider/threads.h"

#include <stdexcept>

namespace outrider {
namespace {

// About 50 us: longer than the serial stretches inside a forward pass, far shorter than the time between two.
constexpr int kSpins = 1500;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) throw std::invalid_argument("a thread pool needs at least 1 thread");
  workers_.reserve(static_cast<std::size_t>(threads) - 1);
  for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Section section, void* self) {
  if (workers_.empty()) return section(self, 0, 1);
  section_ = section;
  self_ = self;
  running_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  execute(0);
  for (std::uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;) wait_while(running_, left);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  while (true) {
    wait_while(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    execute(thread);
    if (running_.fetch_sub(1, std::memory_order_release) == 1) running_.notify_one();
  }
}

void ThreadPool::execute(int thread) noexcept {
  try {
    section_(self_, thread, size());
  } catch (...) {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace outrider
