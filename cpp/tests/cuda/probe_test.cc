// The bucket's state machine (probe.h) in host memory: alone, with another thread acted out between
// any two steps, and with real threads.
#include "cpp/core/cuda/index/probe.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cpp/core/cuda/index/size_bound.h"
#include "cpp/tests/check.h"

namespace sok {
namespace cuda {
namespace {

// `step` runs before every access: a test acts a second thread out there.
struct HostMemory {
  std::function<void(const char*)>* step = nullptr;
  bool late_keys = false;  // a key without its order behind the row reads as it was before: 0

  void Step(const char* what) const {
    if (step != nullptr && *step) (*step)(what);
  }
  DigestWords Digests(const Bucket* bucket) const {
    Step("digests");
    DigestWords words;
    words.low = __atomic_load_n(&bucket->digests[0], __ATOMIC_RELAXED) |
                uint64_t{__atomic_load_n(&bucket->digests[1], __ATOMIC_RELAXED)} << 32;
    words.high = __atomic_load_n(&bucket->digests[2], __ATOMIC_RELAXED) |
                 uint64_t{__atomic_load_n(&bucket->digests[3], __ATOMIC_RELAXED)} << 32;
    return words;
  }
  uint32_t Row(const Bucket* bucket, int slot) const {
    Step("row");
    return __atomic_load_n(&bucket->rows[slot], __ATOMIC_RELAXED);
  }
  uint64_t Key(const Bucket* bucket, int slot) const {
    const uint64_t key = __atomic_load_n(&bucket->keys[slot], __ATOMIC_RELAXED);
    return late_keys ? 0 : key;
  }
  uint64_t PublishedKey(const Bucket* bucket, int slot) const {
    CHECK(__atomic_load_n(&bucket->rows[slot], __ATOMIC_ACQUIRE) != 0);
    return __atomic_load_n(&bucket->keys[slot], __ATOMIC_RELAXED);
  }
  bool Claim(Bucket* bucket, int word, uint32_t expected, uint32_t desired) const {
    Step("claim");
    return __atomic_compare_exchange_n(&bucket->digests[word], &expected, desired, false,
                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void Publish(Bucket* bucket, int slot, uint64_t key, uint32_t row) const {
    Step("publish");
    __atomic_store_n(&bucket->keys[slot], key, __ATOMIC_RELAXED);
    __atomic_store_n(&bucket->rows[slot], row, __ATOMIC_RELEASE);
  }
  uint32_t TakeRow(Bucket* bucket, int slot) const {
    Step("take");
    return __atomic_exchange_n(&bucket->rows[slot], 0u, __ATOMIC_RELAXED);
  }
  void MarkErased(Bucket* bucket, int slot) const {
    const int shift = slot % 4 * 8;
    __atomic_fetch_or(&bucket->digests[slot / 4], uint32_t{kErasedDigest} << shift,
                      __ATOMIC_RELAXED);
    Step("half erased");
    __atomic_fetch_and(&bucket->digests[slot / 4], ~(uint32_t{0xFE} << shift), __ATOMIC_RELAXED);
  }
};

struct Table {
  explicit Table(int num_buckets) : buckets(num_buckets, Bucket{}) {
    index = IndexRef(buckets.data(), num_buckets);
  }
  uint32_t Insert(const HostMemory& memory, uint64_t key, bool* is_new) {
    return FindOrInsertRow(
        memory, index, HashKey(key), key, [this] { return __atomic_fetch_add(&next, 1u, 5); },
        is_new);
  }
  uint32_t Find(uint64_t key) const { return FindRow(HostMemory(), index, HashKey(key), key); }

  std::vector<Bucket> buckets;
  IndexRef index;
  uint32_t next = 0;
};

const uint64_t kExtremes[] = {0,
                              1,
                              2,
                              ~uint64_t{0},
                              ~uint64_t{0} - 1,
                              uint64_t{1} << 63,
                              (uint64_t{1} << 63) - 1,
                              0xFFFFFFFF,
                              0x100000000};

// Keys whose probes begin in one bucket and share a digest.
std::vector<uint64_t> CollidingKeys(int count) {
  std::vector<uint64_t> keys;
  const uint64_t wanted = HashKey(12345);
  for (uint64_t key = 0; static_cast<int>(keys.size()) < count; ++key) {
    const uint64_t hash = HashKey(key);
    if (HashDigest(hash) == HashDigest(wanted) &&
        ProbeHome::Of(4)(hash) == ProbeHome::Of(4)(wanted)) {
      keys.push_back(key);
    }
  }
  return keys;
}

void DigestsMatchByteByByte() {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 1000; ++trial) {
    const DigestWords words{random() & random(), random() | random()};
    const uint8_t digest = static_cast<uint8_t>(random() % 4 == 0 ? 0 : random());
    uint32_t expected = 0;
    for (int i = 0; i < 16; ++i) {
      const uint64_t half = i < 8 ? words.low : words.high;
      if (static_cast<uint8_t>(half >> (i % 8 * 8)) == digest) expected |= 1u << i;
    }
    CHECK_EQ(MatchDigests(words, digest), expected);
  }
}

void AProbeComesToEveryBucket() {
  for (const uint64_t num_buckets : {1, 2, 64, 1024}) {
    std::vector<Bucket> buckets(num_buckets);
    const IndexRef index(buckets.data(), static_cast<int64_t>(num_buckets));
    std::set<Bucket*> visited;
    Bucket* bucket = index.Home(HashKey(7));
    uint64_t step = 0;
    for (uint64_t i = 0; i < num_buckets; ++i) {
      visited.insert(bucket);
      bucket = index.Next(bucket, &step);
    }
    CHECK_EQ(visited.size(), num_buckets);
  }
}

void EveryKeyIsLegal() {
  Table table(4);
  std::map<uint64_t, uint32_t> expected;
  for (uint64_t key : kExtremes) {
    bool is_new = false;
    CHECK_EQ(table.Find(key), kNoRow);
    expected[key] = table.Insert(HostMemory(), key, &is_new);
    CHECK(is_new);
  }
  for (uint64_t key : kExtremes) {
    bool is_new = true;
    CHECK_EQ(table.Insert(HostMemory(), key, &is_new), expected[key]);
    CHECK(!is_new);
    CHECK_EQ(table.Find(key), expected[key]);
  }
}

// Another thread's row number may be seen before its key is.
void AKeyThatIsSeenLateIsReadAgain() {
  HostMemory late;
  late.late_keys = true;
  for (const uint64_t other : {uint64_t{0}, CollidingKeys(2)[1]}) {
    // Keys of one home and digest as `other`, and `other` itself.
    Table table(4);
    const uint64_t hash = HashKey(other);
    std::vector<uint64_t> keys = {other};
    for (uint64_t key = 1; keys.size() < 30; ++key) {
      const uint64_t h = HashKey(key);
      if (key != other && HashDigest(h) == HashDigest(hash) &&
          ProbeHome::Of(4)(h) == ProbeHome::Of(4)(hash)) {
        keys.push_back(key);
      }
    }
    std::reverse(keys.begin(), keys.end());
    for (int round = 0; round < 2; ++round) {
      for (size_t i = 0; i < keys.size(); ++i) {
        bool is_new;
        CHECK_EQ(table.Insert(late, keys[i], &is_new), static_cast<uint32_t>(i));
        CHECK_EQ(is_new, round == 0);
      }
    }
  }
}

void ErasedSlotsDoNotStopAProbe() {
  Table table(4);
  const std::vector<uint64_t> keys = CollidingKeys(40);  // over three buckets
  bool is_new;
  for (uint64_t key : keys) table.Insert(HostMemory(), key, &is_new);
  for (size_t i = 0; i < keys.size(); i += 2) {
    CHECK_EQ(EraseRow(HostMemory(), table.index, HashKey(keys[i]), keys[i]), i);
    CHECK_EQ(EraseRow(HostMemory(), table.index, HashKey(keys[i]), keys[i]), kNoRow);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK_EQ(table.Find(keys[i]), i % 2 == 0 ? kNoRow : static_cast<uint32_t>(i));
  }
}

// While one thread inserts `key`, another does something at its n-th step, for every n.
void AnotherThreadInBetween() {
  const std::vector<uint64_t> keys = CollidingKeys(34);
  for (int present = 0; present < 34; ++present) {
    for (int at = 0; at < 40; ++at) {
      for (const bool same_key : {true, false}) {
        Table table(4);
        bool is_new;
        for (int i = 0; i < present; ++i) table.Insert(HostMemory(), keys[i], &is_new);
        const uint64_t key = keys[present];
        const uint64_t other = same_key ? key : 1000003;
        int count = 0;
        bool claimed = false, other_is_new = false, ran = false;
        uint32_t other_row = kNoRow;
        std::function<void(const char*)> step = [&](const char* what) {
          // Between claim and publication the other would wait for this very thread.
          claimed = claimed || std::string(what) == "publish";
          if (count++ != at || claimed) return;
          ran = true;
          other_row = table.Insert(HostMemory(), other, &other_is_new);
        };
        const uint32_t row = table.Insert(HostMemory{&step}, key, &is_new);
        CHECK_EQ(table.Find(key), row);
        if (!ran) continue;
        CHECK_EQ(table.Find(other), other_row);
        if (same_key) {
          CHECK_EQ(row, other_row);
          CHECK_EQ(is_new + other_is_new, 1);  // inserted once
        } else {
          CHECK(row != other_row && is_new && other_is_new);
        }
        CHECK_EQ(table.next, static_cast<uint32_t>(present + (same_key ? 1 : 2)));
      }
    }
  }
}

// A thread that stopped after its claim: one that inserts the same key waits, others do not.
void OnlyTheSameDigestWaits() {
  Table table(4);
  const uint64_t key = 7;
  Bucket* const home = table.index.Home(HashKey(key));
  home->digests[0] = HashDigest(HashKey(key));  // claimed, not published
  bool is_new = false;
  CHECK(table.Insert(HostMemory(), 8, &is_new) != kNoRow && is_new);
  int looks = 0;
  std::function<void(const char*)> step = [&](const char*) {
    if (++looks == 50) HostMemory().Publish(home, 0, key, 100);
  };
  CHECK_EQ(table.Insert(HostMemory{&step}, key, &is_new), 99u);
  CHECK(!is_new && looks >= 50);
}

void ThreadsInsertEachKeyOnce() {
  const int kThreads = 4;
  const uint64_t kKeys = 20000;
  Table table(2048);  // 32768 slots
  std::vector<std::vector<uint32_t>> rows(kThreads, std::vector<uint32_t>(kKeys));
  std::vector<int> num_new(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kKeys; ++i) {
        const uint64_t key = (i ^ (t & 1)) * 0x9E3779B97F4A7C15ull;
        bool is_new;
        rows[t][i ^ (t & 1)] = table.Insert(HostMemory(), key, &is_new);
        num_new[t] += is_new;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int total = 0;
  for (int n : num_new) total += n;
  CHECK_EQ(total, static_cast<int>(kKeys));
  CHECK_EQ(table.next, kKeys);
  const std::set<uint32_t> distinct(rows[0].begin(), rows[0].end());
  CHECK_EQ(distinct.size(), kKeys);
  for (int t = 1; t < kThreads; ++t) CHECK(rows[t] == rows[0]);
  // Erased by all at once, each row comes back once.
  std::vector<std::multiset<uint32_t>> erased(kThreads);
  threads.clear();
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kKeys; ++i) {
        const uint64_t key = i * 0x9E3779B97F4A7C15ull;
        const uint32_t row = EraseRow(HostMemory(), table.index, HashKey(key), key);
        if (row != kNoRow) erased[t].insert(row);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::multiset<uint32_t> all;
  for (const auto& part : erased) all.insert(part.begin(), part.end());
  CHECK(all == std::multiset<uint32_t>(distinct.begin(), distinct.end()));
}

// Counts on a device that is late, for random batches and copies.
void TheBoundNeverFallsShort() {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    SizeBound bound;
    int64_t count = 0, copied = 0;
    for (int i = 0; i < 50; ++i) {
      const int64_t num_keys = random() % 100;
      bound.Add(num_keys);
      count += num_keys * (random() % 3) / 2;
      count = std::min(count, bound.bound());
      if (!bound.copy_under_way() && random() % 2 == 0) {
        bound.CopyStarted();
        copied = count;
      } else if (bound.copy_under_way() && random() % 3 == 0) {
        bound.CopyArrived(copied);
      }
      CHECK(bound.bound() >= count);
    }
  }
  SizeBound bound;
  bound.Add(10);
  bound.CopyStarted();
  bound.Add(5);
  bound.CopyArrived(3);
  CHECK_EQ(bound.bound(), 8);
  CHECK(!bound.exact());
}

}  // namespace
}  // namespace cuda
}  // namespace sok

int main() {
  using namespace sok::cuda;
  DigestsMatchByteByByte();
  AProbeComesToEveryBucket();
  EveryKeyIsLegal();
  AKeyThatIsSeenLateIsReadAgain();
  ErasedSlotsDoNotStopAProbe();
  AnotherThreadInBetween();
  OnlyTheSameDigestWaits();
  ThreadsInsertEachKeyOnce();
  TheBoundNeverFallsShort();
}
