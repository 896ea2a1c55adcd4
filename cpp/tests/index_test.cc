// Index and buckets against std::unordered_map.
#include "cpp/core/cpu/index.h"

#include <random>
#include <unordered_map>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

uint32_t Insert(Index* index, uint64_t key, uint32_t row) {
  index->MakeRoom(1);
  return index->FindOrInsert(HashKey(key), key, row);
}

// Random inserts and erases over few keys, so that slots are erased and reused all the time.
void AgreesWithAMap(const std::vector<uint64_t>& keys, int num_steps,
                    uint64_t multiplier = ProcessMultiplier()) {
  std::mt19937 random(2);
  Index index(multiplier);
  std::unordered_map<uint64_t, uint32_t> expected;
  for (int step = 0; step < num_steps; ++step) {
    const uint64_t key = keys[random() % keys.size()];
    const uint32_t row = static_cast<uint32_t>(step);
    const auto found = expected.find(key);
    CHECK_EQ(index.Find(HashKey(key), key),
             found == expected.end() ? Index::kMissing : found->second);
    if (random() % 5 < 3) {
      CHECK_EQ(Insert(&index, key, row), expected.emplace(key, row).first->second);
    } else {
      CHECK_EQ(index.Erase(HashKey(key), key),
               found == expected.end() ? Index::kMissing : found->second);
      expected.erase(key);
    }
    CHECK_EQ(static_cast<size_t>(index.size()), expected.size());
  }
  size_t visited = 0;
  index.ForEach([&](uint64_t key, uint32_t row) {
    CHECK_EQ(expected.at(key), row);
    ++visited;
  });
  CHECK_EQ(visited, expected.size());
  CHECK(index.size() <= index.capacity());
}

void RandomKeys() {
  std::vector<uint64_t> keys = {0, 1, ~0ull, ~0ull - 1, 1ull << 63, (1ull << 63) - 1};
  std::mt19937_64 random(3);
  while (keys.size() < 3000) keys.push_back(random());
  AgreesWithAMap(keys, 200000);
}

// 300 keys of one home bucket: every probe runs over most of the index.
void CollidingKeys() {
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < 300; ++key) {
    const uint64_t hash = HashKey(key);
    if (HashShard(hash) == 63) keys.push_back(key);
  }
  AgreesWithAMap(keys, 50000, /*multiplier=*/1);  // the home is the top bits of the hash
}

// A sliding window of keys must neither grow the index nor slow it down for good.
void ErasedSlotsDoNotPileUp() {
  Index index;
  for (uint64_t key = 0; key < 200000; ++key) {
    Insert(&index, key, static_cast<uint32_t>(key));
    if (key >= 1000) CHECK_EQ(index.Erase(HashKey(key - 1000), key - 1000), key - 1000);
  }
  CHECK_EQ(index.size(), 1000);
  CHECK(index.num_buckets() <= 512);
}

void GrowsInDoublings() {
  Index index;
  CHECK_EQ(index.bytes(), 0);
  CHECK_EQ(index.Find(HashKey(5), 5), Index::kMissing);
  for (uint64_t key = 0; key < 3; ++key) Insert(&index, key, 0);
  CHECK_EQ(index.num_buckets(), 1);
  Insert(&index, 3, 0);
  CHECK_EQ(index.num_buckets(), 2);
  index.MakeRoom(1000);
  CHECK_EQ(index.num_buckets(), 512);
  CHECK_EQ(index.size(), 4);
  int64_t total = 0, longest = 0;
  index.AddProbeLengths(&total, &longest);
  CHECK_EQ(total, 4);
  CHECK_EQ(longest, 1);
  index.Clear();
  CHECK_EQ(index.bytes(), 0);
  CHECK_EQ(index.Find(HashKey(5), 5), Index::kMissing);
}

// As the shards of a table do. What was asked for in advance fits without growing.
void GrowsAtItsLoad() {
  int64_t grown_at[2];
  for (int half = 0; half < 2; ++half) {
    Index index;
    index.GrowAt(half == 0 ? Index::kLoadParts * 3 / 4 : Index::kLoadParts * 5 / 8);
    uint64_t key = 0;
    for (; index.num_buckets() < 2048; ++key) Insert(&index, key, 0);
    grown_at[half] = index.size() - 1;
    index.Clear();
    index.MakeRoom(3500);
    CHECK_EQ(index.num_buckets(), 1024);
    CHECK_EQ(index.capacity(), half == 0 ? 3840 : 3500);
    for (key = 0; key < 3500; ++key) Insert(&index, key, 0);
    CHECK_EQ(index.num_buckets(), 1024);
  }
  CHECK_EQ(grown_at[0], 1024 * 5 * 3 / 4);
  CHECK_EQ(grown_at[1], 1024 * 5 * 5 / 8);
  Index large;
  large.GrowAt(Index::kLoadParts * 5 / 8);
  for (uint64_t key = 0; large.num_buckets() <= 1 << 14; ++key) Insert(&large, key, 0);
  CHECK_EQ(large.size() - 1, (1 << 14) * 5 * 9 / 16);
}

// A step adds as many keys to each shard. While their large arrays double, few do at a time.
void ShardsGrowOneAfterTheOther() {
  constexpr int64_t kFrom = 62000, kStep = 2000;
  std::vector<Index> shards(64);
  for (int s = 0; s < 64; ++s) shards[s].GrowAsShard(s);
  std::vector<int64_t> before(64);
  int64_t num_grown = 0;
  for (uint64_t key = 0; key < 2 * kFrom; key += kStep) {
    int64_t at_once = 0;
    for (int s = 0; s < 64; ++s) {
      for (uint64_t k = key; k < key + kStep; ++k) Insert(&shards[s], k, 0);
      at_once += shards[s].num_buckets() != before[s];
      before[s] = shards[s].num_buckets();
    }
    if (key < kFrom) continue;
    num_grown += at_once;
    CHECK(at_once <= 3);
  }
  CHECK_EQ(num_grown, 64);
  CHECK_EQ(shards[0].num_buckets(), 1 << 16);
  CHECK_EQ(shards[1].num_buckets(), 3 << 14);
}

// Keys that come and go at the load where it grows are no reason to rehash it each time.
void ErasedSlotsUseTheRestOfTheLoad() {
  Index index;
  index.GrowAt(Index::kLoadParts * 5 / 8);
  for (uint64_t key = 0; key < 200000; ++key) {
    Insert(&index, key, static_cast<uint32_t>(key));
    if (key >= 3199) CHECK_EQ(index.Erase(HashKey(key - 3199), key - 3199), key - 3199);
  }
  CHECK_EQ(index.num_buckets(), 1024);
}

// The last sixteenth of the keys before a large array doubles brings the next one, in even pieces.
void MovesToTheNextArrayAhead() {
  BlockPool pool;
  Index index;
  index.UsePool(&pool);
  constexpr int64_t kBatch = 500;
  int64_t num_moved = 0;
  uint64_t key = 0;
  for (; key < 200000; key += kBatch) {
    const int64_t buckets = index.num_buckets(), array = buckets * 64,
                  moved = index.bytes() - array;
    const bool doubles = !index.HasRoom(kBatch);
    index.MakeRoom(kBatch);
    CHECK(doubles || index.num_buckets() == buckets);
    if (doubles && buckets >= 1 << 14) CHECK(moved > array && moved <= 2 * array);
    if (!index.IsAboutToDouble(kBatch)) {
      CHECK_EQ(index.bytes(), index.num_buckets() * 64);
    } else {
      index.MoveAhead(kBatch);
      ++num_moved;
      CHECK(index.num_buckets() >= 1 << 14 && index.bytes() > index.num_buckets() * 64);
      CHECK(index.bytes() - array - moved <= array / 2);  // no large piece at a time
    }
    for (uint64_t k = key; k < key + kBatch; ++k) index.FindOrInsert(HashKey(k), k, k & 0xffff);
  }
  CHECK(num_moved > 10);
  for (uint64_t k = 0; k < key; ++k) CHECK_EQ(index.Find(HashKey(k), k), k & 0xffff);
  index.Clear();
  CHECK_EQ(index.bytes(), 0);
}

// While keys move ahead, keys come, go and come back, in moved buckets and in others.
void KeysComeAndGoWhileOthersMove() {
  constexpr uint64_t kKeys = 170000;  // two arrays are outgrown
  std::mt19937 random(4);
  Index index;
  std::unordered_map<uint64_t, uint32_t> expected;
  int64_t num_moved = 0;
  for (uint64_t key = 0; key < kKeys; ++key) {
    index.MakeRoom(2);
    if (key % 100 == 0 && index.IsAboutToDouble(200)) {
      index.MoveAhead(200);
      ++num_moved;
    }
    for (const uint64_t k : {key, uint64_t{random()} % (key + 1)}) {
      const uint32_t row = static_cast<uint32_t>(random() % 1000);
      CHECK_EQ(index.FindOrInsert(HashKey(k), k, row), expected.emplace(k, row).first->second);
    }
    for (uint64_t i = 0; i < key % 2; ++i) {
      const uint64_t k = random() % (key + 1);
      const auto found = expected.find(k);
      CHECK_EQ(index.Erase(HashKey(k), k),
               found == expected.end() ? Index::kMissing : found->second);
      expected.erase(k);
    }
  }
  CHECK(num_moved > 50);
  CHECK_EQ(static_cast<size_t>(index.size()), expected.size());
  for (uint64_t k = 0; k < kKeys; ++k) {
    const auto found = expected.find(k);
    CHECK_EQ(index.Find(HashKey(k), k), found == expected.end() ? Index::kMissing : found->second);
  }
}

}  // namespace
}  // namespace sok

int main() {
  sok::MovesToTheNextArrayAhead();
  sok::KeysComeAndGoWhileOthersMove();
  sok::RandomKeys();
  sok::CollidingKeys();
  sok::ErasedSlotsDoNotPileUp();
  sok::GrowsInDoublings();
  sok::GrowsAtItsLoad();
  sok::ShardsGrowOneAfterTheOther();
  sok::ErasedSlotsUseTheRestOfTheLoad();
}
