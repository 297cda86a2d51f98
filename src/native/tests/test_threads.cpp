// The thread pool: every item once, whatever the number of threads; exceptions; sections in quick succession.
#include <atomic>
#include <stdexcept>
#include <vector>

#include "outrider/checksum.h"
#include "outrider/threads.h"
#include "tests/check.h"

using outrider::ThreadPool;

namespace {

void every_item_runs_once(ThreadPool& pool) {
  for (int count : {0, 1, 2, 3, 17, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
    pool.parallel_for(count, [&](std::int64_t item) { ++runs[static_cast<std::size_t>(item)]; });
    for (const auto& n : runs) CHECK(n == 1);
  }
}

void every_part_runs_once(ThreadPool& pool) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(pool.size()));
  pool.parallel([&](int part, int parts) {
    CHECK(parts == pool.size());
    ++runs[static_cast<std::size_t>(part)];
  });
  for (const auto& n : runs) CHECK(n == 1);
}

void threads_are_told_apart(ThreadPool& pool) {
  std::vector<std::atomic<int>> inside(static_cast<std::size_t>(pool.size()));
  pool.parallel_for(
      500,
      [&](std::int64_t, int thread) {
        const bool only = ++inside[static_cast<std::size_t>(thread)] == 1;
        CHECK(only);
        --inside[static_cast<std::size_t>(thread)];
      },
      ThreadPool::WithThread{});
}

void sections_follow_one_another(ThreadPool& pool) {
  std::atomic<int> sum{0};
  for (int i = 0; i < 20000; ++i)
    pool.parallel_for(3, [&](std::int64_t) { sum.fetch_add(1, std::memory_order_relaxed); });
  CHECK(sum == 60000);
}

void exceptions_reach_the_caller(ThreadPool& pool) {
  for (int i = 0; i < 50; ++i) {
    bool caught = false;
    try {
      pool.parallel_for(8, [](std::int64_t item) {
        if (item == 5) throw std::runtime_error("five");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
    every_part_runs_once(pool);
  }
}

void checksum_ignores_threads(ThreadPool& pool) {
  std::vector<std::uint8_t> data(3'000'017);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(i * 2654435761u >> 13);
  ThreadPool single(1);
  const std::uint64_t expected = outrider::checksum(data, single);
  CHECK(outrider::checksum(data, pool) == expected);
  for (std::size_t place : {std::size_t{0}, std::size_t{1'500'000}, data.size() - 1}) {
    data[place] ^= 1;
    CHECK(outrider::checksum(data, pool) != expected);
    data[place] ^= 1;
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    every_item_runs_once(pool);
    every_part_runs_once(pool);
    threads_are_told_apart(pool);
    sections_follow_one_another(pool);
    exceptions_reach_the_caller(pool);
    checksum_ignores_threads(pool);
  }
  bool refused = false;
  try {
    ThreadPool none(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  return outrider::test::report();
}
