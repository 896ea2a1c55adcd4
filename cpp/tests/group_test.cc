// Several tables in one call: results do not depend on threads, a table may come twice, a full one
// does not stop the others, and calls on the same tables at once get through.
#include "cpp/core/cpu/group.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

std::unique_ptr<CpuTable> MakeTable(int i, int64_t max_capacity = 0) {
  TableOptions options;
  options.name = "table" + std::to_string(i);
  options.dim = 4 + 4 * (i % 3);
  options.max_capacity = max_capacity;
  return std::make_unique<CpuTable>(options);
}

// Features with the memory they write to. Feature f reads table f % num_tables.
struct Features {
  std::vector<std::vector<uint64_t>> keys, unique;
  std::vector<std::vector<int64_t>> row_splits;
  std::vector<std::vector<int32_t>> inverse;
  std::vector<std::vector<float>> out;
  std::vector<FeatureLookup> lookups;

  Features(const std::vector<std::unique_ptr<CpuTable>>& tables, int num_features, int seed) {
    constexpr Combiner kCombiners[] = {Combiner::kMean, Combiner::kSum, Combiner::kNone};
    std::mt19937_64 random(seed);
    constexpr int64_t kBatch = 60;
    for (int f = 0; f < num_features; ++f) {
      row_splits.push_back({0});
      for (int64_t s = 0; s < kBatch; ++s) row_splits[f].push_back(row_splits[f][s] + random() % 9);
      const int64_t num_keys = row_splits[f].back();
      keys.emplace_back();
      for (int64_t k = 0; k < num_keys; ++k) keys[f].push_back(random() % 300);
      const int64_t dim = tables[f % tables.size()]->dim();
      unique.emplace_back(num_keys);
      inverse.emplace_back(num_keys);
      const Combiner combiner = kCombiners[f % 3];
      out.emplace_back((combiner == Combiner::kNone ? num_keys : kBatch) * dim);
      FeatureLookup lookup;
      lookup.table = tables[f % tables.size()].get();
      lookup.samples.num_keys = num_keys;
      lookup.samples.batch = kBatch;
      lookup.samples.combiner = combiner;
      lookups.push_back(lookup);
    }
    for (int f = 0; f < num_features; ++f) {
      lookups[f].keys = keys[f].data();
      lookups[f].samples.row_splits = row_splits[f].data();
      lookups[f].inverse = inverse[f].data();
      lookups[f].unique_keys = unique[f].data();
      lookups[f].out = out[f].data();
    }
  }
};

std::vector<std::unique_ptr<CpuTable>> MakeTables(int n) {
  std::vector<std::unique_ptr<CpuTable>> tables;
  for (int i = 0; i < n; ++i) tables.push_back(MakeTable(i));
  return tables;
}

void TestOneTableIsOneCall() {
  const auto tables = MakeTables(3);
  CpuTable *a = tables[0].get(), *b = tables[1].get(), *c = tables[2].get();
  for (int num_threads : {1, 2, 4}) {
    ThreadPool pool(num_threads);
    const TableGroup group({b, a, c, a, b});
    CHECK(group.repeated() == a || group.repeated() == b);
    std::vector<std::vector<int64_t>> seen(5);
    std::vector<int64_t> num_keys(5, 1000);
    group.ForEach(pool, group.PerTable(num_keys),
                  [&](Executor&, const int64_t* members, int64_t count) {
                    seen[members[0]].assign(members, members + count);
                  });
    CHECK((seen == std::vector<std::vector<int64_t>>{{0, 4}, {1, 3}, {2}, {}, {}}));
  }
  CHECK(TableGroup({a, b, c}).repeated() == nullptr);
}

// Items run exactly once, side by side or not; the lowest that throws is the one heard of.
void TestForEachOf() {
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    for (int64_t largest : {10, 1000, 1000000}) {
      std::vector<int64_t> num_keys(40, 1000);
      num_keys[7] = largest;
      std::vector<std::atomic<int>> calls(40);
      const auto count = [&](Executor& inner, int64_t i) {
        ++calls[i];
        const bool side_by_side = num_threads > 1 && largest <= 1000;
        CHECK_EQ(inner.num_threads(), side_by_side ? 1 : num_threads);
        if (i == 31 || i == 22 || i == 38) throw std::length_error("item " + std::to_string(i));
      };
      CHECK_THROWS(ForEachOf(pool, num_keys, count), std::length_error, "item 22");
      for (const auto& c : calls) CHECK_EQ(c.load(), 1);
    }
  }
}

void TestThreadCountDoesNotShow() {
  for (int num_tables : {5, 24}) {  // 24 features: some tables come several times, or none
    std::vector<std::vector<std::vector<float>>> outs;
    std::vector<std::vector<std::vector<uint64_t>>> keys;
    for (int num_threads : {1, 2, 5}) {
      ThreadPool pool(num_threads);
      const auto tables = MakeTables(num_tables);
      outs.emplace_back();
      keys.emplace_back();
      for (int step = 0; step < 3; ++step) {
        Features features(tables, 24, step);
        LookupGroup(pool, &features.lookups, /*insert=*/true);
        outs.back().insert(outs.back().end(), features.out.begin(), features.out.end());
        for (FeatureLookup& f : features.lookups) {
          keys.back().emplace_back(f.unique_keys, f.unique_keys + f.num_unique);
        }
      }
      CHECK(outs.back() == outs.front() && keys.back() == keys.front());
    }
  }
}

// A group, with a table named several times, against rows found key by key and summed here.
void TestAgainstRowsByKey() {
  ThreadPool pool(3);
  const auto tables = MakeTables(7);
  for (bool insert : {false, true, false}) {
    Features features(tables, 24, 11);
    for (FeatureLookup& lookup : features.lookups) {
      // Written for a gradient only: an inserting lookup prepares it.
      if (!insert) lookup.inverse = nullptr, lookup.unique_keys = nullptr;
    }
    LookupGroup(pool, &features.lookups, insert);
    for (size_t f = 0; f < features.lookups.size(); ++f) {
      const FeatureLookup& lookup = features.lookups[f];
      CpuTable& table = *lookup.table;
      const int64_t dim = table.dim(), num_keys = lookup.samples.num_keys;
      std::vector<float> rows(num_keys * dim);
      table.Find(pool, lookup.keys, num_keys, rows.data(), nullptr);
      const bool none = lookup.samples.combiner == Combiner::kNone;
      for (int64_t s = 0; s < (none ? num_keys : lookup.samples.batch); ++s) {
        const int64_t begin = none ? s : lookup.samples.row_splits[s];
        const int64_t end = none ? s + 1 : lookup.samples.row_splits[s + 1];
        for (int64_t d = 0; d < dim; ++d) {
          double sum = 0;
          for (int64_t k = begin; k < end; ++k) sum += rows[k * dim + d];
          if (lookup.samples.combiner == Combiner::kMean && begin < end) sum /= end - begin;
          CHECK(std::abs(lookup.out[s * dim + d] - sum) < 1e-6);
        }
      }
      if (!insert) continue;
      const std::set<uint64_t> distinct(lookup.keys, lookup.keys + num_keys);
      CHECK_EQ(lookup.num_unique, static_cast<int64_t>(distinct.size()));
      for (int64_t k = 0; k < num_keys; ++k) {
        CHECK_EQ(lookup.unique_keys[lookup.inverse[k]], lookup.keys[k]);
      }
    }
    for (const auto& table : tables) CHECK_EQ(table->size() > 0, insert || table->size() > 0);
  }
  for (const auto& table : tables) CHECK(table->size() > 200);
}

void TestFullTableInTheMiddle() {
  for (int num_threads : {1, 4}) {
    ThreadPool pool(num_threads);
    auto tables = MakeTables(24);
    tables[9] = MakeTable(9, /*max_capacity=*/5);
    tables[17] = MakeTable(17, /*max_capacity=*/6);
    Features features(tables, 24, 3);
    CHECK_THROWS(LookupGroup(pool, &features.lookups, true), std::length_error,
                 "max_capacity=5. Received: ");
    for (int i = 0; i < 24; ++i) CHECK_EQ(tables[i]->size() == 0, i == 9 || i == 17);
    LookupGroup(pool, &features.lookups, false);  // and all locks are free
  }
}

// A table's features are one training lookup to its policies.
void TestPoliciesSeeOneLookup() {
  ThreadPool pool(3);
  auto tables = MakeTables(6);
  TableOptions options = tables[2]->options();
  options.policy.filter_freq = 2;
  options.policy.no_permission = 0.5f;
  tables[2] = std::make_unique<CpuTable>(options);
  for (int step = 1; step <= 2; ++step) {
    Features features(tables, 24, 5);
    LookupGroup(pool, &features.lookups, true);
    const PolicyCounts statistics = tables[2]->Statistics(pool);
    CHECK_EQ(statistics.step, step);
    std::set<uint64_t> distinct;
    for (int f = 2; f < 24; f += 6) {
      distinct.insert(features.keys[f].begin(), features.keys[f].end());
    }
    CHECK_EQ(tables[2]->size(), step == 1 ? 0 : static_cast<int64_t>(distinct.size()));
    if (step == 1) {
      for (float x : features.out[2]) CHECK_EQ(x, 0.5f);  // feature 2 combines nothing
    }
  }
}

// An owner: the keys of three ranks, each rank's rows in a place of its own. Every kind of table
// gives the rows that it gives key by key, and knows the unique keys' row numbers for the update.
void TestBlocksOfAnOwner() {
  ThreadPool pool(3);
  const std::vector<std::vector<uint64_t>> keys_of_rank = {{7, 3, 900}, {}, {3, 12, 7, 5}};
  const std::vector<uint64_t> keys = {7, 3, 900, 3, 12, 7, 5};
  for (int kind = 0; kind < 4; ++kind) {  // plain, bfloat16, rows that owe steps, policies
    TableOptions options;
    options.name = "owner" + std::to_string(kind);
    options.dim = 5;
    if (kind == 1) options.row_type = RowType::kBfloat16;
    if (kind == 3) {
      options.policy.filter_freq = 4;
      options.policy.count_occurrences = true;
      options.policy.no_permission = 0.5f;
    }
    CpuTable table(options);
    if (kind == 2) {
      OptimizerOptions adam;
      adam.kind = OptimizerKind::kAdam;
      const std::vector<uint64_t> trained = {3, 7}, other = {1000};
      const std::vector<float> grads(10, 0.25f);
      ApplyGradients(pool, table, adam, 0.1f, 1, trained.data(), grads.data(), 2);
      ApplyGradients(pool, table, adam, 0.1f, 2, other.data(), grads.data(), 1);
    }
    for (const bool insert : {false, true, true, false}) {
      const std::vector<int64_t> occurrences = {1, 1, 1, 3, 1, 1, 1};
      std::vector<std::vector<float>> rows(3);
      std::vector<int32_t> inverse(keys.size());
      std::vector<uint64_t> unique(keys.size());
      std::vector<FeatureLookup> lookups(1);
      lookups[0].table = &table;
      lookups[0].keys = keys.data();
      lookups[0].occurrences = occurrences.data();
      lookups[0].samples.num_keys = keys.size();
      lookups[0].samples.combiner = Combiner::kNone;
      lookups[0].inverse = inverse.data();
      lookups[0].unique_keys = unique.data();
      for (int r = 0; r < 3; ++r) {
        rows[r].assign(keys_of_rank[r].size() * 5, -1.0f);
        lookups[0].blocks.push_back({static_cast<int64_t>(keys_of_rank[r].size()), rows[r].data()});
      }
      const auto find = [&] {
        std::vector<float> found(keys.size() * 5);
        table.Find(pool, keys.data(), keys.size(), found.data(), nullptr);
        return found;
      };
      // A key reads its initial row before it has one. What gets a row is read from the next lookup.
      const std::vector<float> expected = find();
      LookupGroup(pool, &lookups, insert);
      std::vector<float> joined;
      for (const std::vector<float>& of_rank : rows) {
        joined.insert(joined.end(), of_rank.begin(), of_rank.end());
      }
      CHECK(joined == expected);
      CHECK(kind == 3 || find() == expected);
      for (size_t k = 0; insert && k < keys.size(); ++k) CHECK_EQ(unique[inverse[k]], keys[k]);
      if (!insert) continue;
      CHECK_EQ(lookups[0].num_unique, 5);
      std::vector<uint32_t> found(5);
      const Scratch<uint32_t> recalled = table.RecallRows(pool, unique.data(), 5);
      CHECK_EQ(static_cast<bool>(recalled), kind != 3);
      table.FindRows(pool, unique.data(), 5, found.data());
      if (kind != 3) CHECK(std::equal(found.begin(), found.end(), recalled.get()));
    }
    // In two lookups key 3 came eight times and key 7 four times, the others twice.
    CHECK_EQ(table.size(), kind == 3 ? 2 : kind == 2 ? 6 : 5);
  }
}

// Groups that overlap, in other orders, beside calls on single tables, all on one pool.
void TestCallsAtOnce() {
  ThreadPool pool(3);
  const auto tables = MakeTables(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 5; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 40; ++round) {
        Features features(tables, 20, t * 100 + round);
        std::vector<FeatureLookup> lookups = features.lookups;
        if (t % 2 == 1) std::reverse(lookups.begin(), lookups.end());
        if (t == 4) {
          std::vector<float> rows(4 * 12);
          const uint64_t keys[] = {1, 2, 3, 5000u + round};
          tables[round % 8]->FindOrInsert(pool, keys, 4, rows.data(), nullptr);
          tables[round % 8]->Erase(pool, keys, 2);
        } else {
          LookupGroup(pool, &lookups, /*insert=*/t != 3);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Features features(tables, 24, 1000);
  LookupGroup(pool, &features.lookups, true);
  for (size_t f = 0; f < 24; ++f) {
    const FeatureLookup& lookup = features.lookups[f];
    if (lookup.samples.combiner != Combiner::kNone) continue;
    std::vector<float> initial(lookup.table->dim());
    for (int64_t k = 0; k < lookup.samples.num_keys; ++k) {
      lookup.table->InitialRow(lookup.keys[k], initial.data());
      CHECK(std::equal(initial.begin(), initial.end(), lookup.out + k * lookup.table->dim()));
    }
  }
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestOneTableIsOneCall();
  sok::TestForEachOf();
  sok::TestThreadCountDoesNotShow();
  sok::TestAgainstRowsByKey();
  sok::TestFullTableInTheMiddle();
  sok::TestPoliciesSeeOneLookup();
  sok::TestBlocksOfAnOwner();
  sok::TestCallsAtOnce();
  return 0;
}
