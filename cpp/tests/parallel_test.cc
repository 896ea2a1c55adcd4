#include "cpp/core/parallel.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

void CoversTheRangeOnce(Executor& ex) {
  for (int64_t n : {0, 1, 2, 7, 100, 1000, 4097}) {
    for (int64_t grain : {0, 1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> visits(n);
      ex.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
        CHECK(begin < end);
        CHECK(end - begin >= grain || end == n);
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (const auto& v : visits) CHECK_EQ(v.load(), 1);
    }
  }
}

void LowestExceptionWins(Executor& ex) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int64_t> visited{0};
    bool thrown = false;
    try {
      ex.ParallelFor(1000, 1, [&](int64_t begin, int64_t end) {
        visited += end - begin;
        throw std::runtime_error(std::to_string(begin));
      });
    } catch (const std::runtime_error& e) {
      thrown = std::string(e.what()) == "0";
    }
    CHECK(thrown);
    CHECK_EQ(visited.load(), 1000);
  }
}

void ServesSeveralCallers() {
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&pool] {
      for (int round = 0; round < 1000; ++round) {
        std::atomic<int64_t> sum{0};
        pool.ParallelFor(64, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        CHECK_EQ(sum.load(), 64 * 63 / 2);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace sok

int main() {
  sok::InlineExecutor inline_executor;
  sok::CoversTheRangeOnce(inline_executor);
  for (int num_threads : {1, 2, 5}) {
    sok::ThreadPool pool(num_threads);
    CHECK_EQ(pool.num_threads(), num_threads);
    sok::CoversTheRangeOnce(pool);
    sok::LowestExceptionWins(pool);
  }
  CHECK_THROWS(sok::ThreadPool(0), std::invalid_argument, "num_threads");
  sok::ServesSeveralCallers();
}
