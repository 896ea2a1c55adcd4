// Tables on several streams that run late: calls on streams drawn at random, whose results are read
// much later, agree with the CPU's table. All arrays are in device memory.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/device_array.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr int64_t kDim = 4;
using Keys = std::vector<uint64_t>;
using Rows = std::vector<float>;

struct Trial {
  OptimizerKind rule = OptimizerKind::kAdagrad;
  bool use_hashtable = true;
  int64_t max_capacity = 0;
  int filter_freq = 0;
};

TableOptions Options(const Trial& trial, int number) {
  TableOptions options;
  options.name = "t" + std::to_string(number);
  options.dim = kDim;
  options.seed = 5;
  options.use_hashtable = trial.use_hashtable;
  options.max_capacity = trial.max_capacity;
  options.policy.filter_freq = trial.filter_freq;
  return options;
}

// Tables, their twins in host memory, and what is still to be compared.
class Drawn {
 public:
  Drawn(const Trial& trial, unsigned seed) : trial_(trial), random_(seed) {
    optimizer_.kind = trial.rule;
    for (int t = 0; t < 2; ++t) {
      device_.push_back(std::make_unique<cuda::CudaTable>(Options(trial, t), 0.875, AnyStream()));
      cpu_.push_back(std::make_unique<CpuTable>(Options(trial, t)));
    }
  }

  void Call() {
    const int t = random_() % 2;
    const cuda::Stream stream = AnyStream();
    const Keys keys = SomeKeys();
    const auto n = static_cast<int64_t>(keys.size());
    const DeviceArray<uint64_t> device_keys(keys, stream);
    switch (random_() % 8) {
      case 0:
      case 1:
        return Lookup(t, stream, keys, device_keys, random_() % 2 == 0);
      case 2: {
        const Rows rows = SomeRows(n);
        cpu_[t]->Assign(ex_, keys.data(), n, rows.data());
        return device_[t]->Assign(stream, device_keys, n, DeviceArray<float>(rows, stream));
      }
      case 3:
        if (!trial_.use_hashtable) return;
        CHECK_EQ(device_[t]->Erase(stream, device_keys, std::min<int64_t>(n, 5)),
                 cpu_[t]->Erase(ex_, keys.data(), std::min<int64_t>(n, 5)));
        return;
      case 4:
        CHECK_EQ(device_[t]->Size(stream), cpu_[t]->Size(ex_));
        if (random_() % 4 == 0) Compare(t, stream);
        return;
      default:
        return Step(stream);
    }
  }

  void End() {
    for (const auto& check : later_) check();
    later_.clear();
    for (int t = 0; t < 2; ++t) Compare(t, AnyStream());
  }

 private:
  cuda::Stream AnyStream() {
    return emulator::StreamOfNumber(random_() % 3);  // with the default stream
  }
  Keys SomeKeys() {
    Keys keys(1 + random_() % 60);
    for (uint64_t& key : keys) key = random_() % 500;
    return keys;
  }
  Rows SomeRows(int64_t n) {
    Rows rows(n * kDim);
    for (float& x : rows) x = static_cast<float>(static_cast<int>(random_() % 200) - 100) / 64;
    return rows;
  }

  // Dense Adam brings rows up at other times than the CPU's table, which rounds otherwise.
  bool Agree(const Rows& found, const Rows& expected) const {
    if (trial_.rule != OptimizerKind::kAdam) return found == expected;
    bool agree = found.size() == expected.size();
    for (size_t i = 0; agree && i < found.size(); ++i) {
      agree = std::abs(found[i] - expected[i]) <= 1e-6f * std::max(1.0f, std::abs(expected[i]));
    }
    return agree;
  }

  void Lookup(int t, cuda::Stream stream, const Keys& keys,
              const DeviceArray<uint64_t>& device_keys, bool insert) {
    const auto n = static_cast<int64_t>(keys.size());
    Rows expected(n * kDim);
    const auto rows = std::make_shared<DeviceArray<float>>(n * kDim, -7.0f, stream);
    if (insert) {
      cpu_[t]->FindOrInsert(ex_, keys.data(), n, expected.data(), nullptr);
      device_[t]->FindOrInsert(stream, device_keys, n, *rows, nullptr);
    } else {
      cpu_[t]->Find(ex_, keys.data(), n, expected.data(), nullptr);
      device_[t]->Find(stream, device_keys, n, *rows, nullptr);
    }
    later_.push_back([this, rows, expected] { CHECK(Agree(rows->Get(), expected)); });
    if (later_.size() > 8) {
      later_.front()();
      later_.erase(later_.begin());
    }
  }

  // Of both tables, together on the device.
  void Step(cuda::Stream stream) {
    ++step_;
    std::vector<DeviceArray<uint64_t>> keys;
    std::vector<DeviceArray<float>> grads;
    std::vector<cuda::TableGradients> batches;
    for (int t = 0; t < 2; ++t) {
      const Keys some = SomeKeys();
      const auto n = static_cast<int64_t>(some.size());
      const Rows grad = SomeRows(n);
      ApplyGradients(ex_, *cpu_[t], optimizer_, 0.05f, step_, some.data(), grad.data(), n);
      keys.emplace_back(some, stream);
      grads.emplace_back(grad, stream);
      batches.push_back({device_[t].get(), keys.back(), grads.back(), n});
    }
    if (trial_.filter_freq > 0) {  // tables with policies are called one at a time
      for (const auto& batch : batches) {
        cuda::ApplyGradients(stream, {batch}, optimizer_, 0.05f, step_);
      }
    } else {
      cuda::ApplyGradients(stream, batches, optimizer_, 0.05f, step_);
    }
  }

  void Compare(int t, cuda::Stream stream) {
    const TableSnapshot expected = cpu_[t]->Export(ex_, true);
    const TableSnapshot found = device_[t]->Export(stream, true);
    CHECK(found.keys == expected.keys);
    CHECK(Agree(found.rows, expected.rows));
    CHECK(Agree(found.slot_rows, expected.slot_rows));
  }

  const Trial trial_;
  std::mt19937 random_;
  InlineExecutor ex_;
  OptimizerOptions optimizer_;
  std::vector<std::unique_ptr<cuda::CudaTable>> device_;
  std::vector<std::unique_ptr<CpuTable>> cpu_;
  std::vector<std::function<void()>> later_;
  int64_t step_ = 0;
};

void AgreesWithTheCpu(const Trial& trial) {
  for (unsigned round = 0; round < 3; ++round) {
    Drawn drawn(trial, 10 * emulator::first_seed + round);
    for (int call = 0; call < 60; ++call) drawn.Call();
    drawn.End();
  }
}

}  // namespace
}  // namespace sok

int main() {
  using sok::AgreesWithTheCpu;
  using sok::OptimizerKind;
  AgreesWithTheCpu({});
  AgreesWithTheCpu({OptimizerKind::kAdam});
  AgreesWithTheCpu({OptimizerKind::kAdam, true, 500});
  AgreesWithTheCpu({OptimizerKind::kAdagrad, false, 500});
  AgreesWithTheCpu({OptimizerKind::kAdam, true, 0, 2});
  emulator::Streams::Get().FinishAll();
  CHECK_EQ(emulator::bytes_allocated, 0);
  return 0;
}
