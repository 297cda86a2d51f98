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
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_section(Section& section) {
  section_ = &section;
  gate_.store(0, std::memory_order_release);
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
  drain(section, 0);
  // Nobody may enter any more; those inside still use the section, which is about to go out of scope.
  std::uint32_t gate = gate_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
  while (gate != kClosed) {
    wait_while(gate_, gate);
    gate = gate_.load(std::memory_order_acquire);
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  while (true) {
    wait_while(calls_, seen);
    seen = calls_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    // Whichever section is open will do, be it a later one than the call that woke this thread.
    std::uint32_t gate = gate_.load(std::memory_order_acquire);
    bool entered = false;
    while (!(gate & kClosed) && !entered)
      entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel);
    if (!entered) continue;
    drain(*section_, thread);
    if (gate_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) gate_.notify_one();
  }
}

void ThreadPool::drain(Section& section, int thread) noexcept {
  try {
    for (std::int64_t item; (item = section.next.fetch_add(1, std::memory_order_relaxed)) < section.count;)
      section.call(section.self, item, thread);
  } catch (...) {
    section.next.store(section.count, std::memory_order_relaxed);
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace outrider
