#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cpp/core/cuda/device/aggregated_increment.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/policies/select_lowest.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;
using Word = unsigned long long;  // what 64-bit atomics take

constexpr int kDigits = 256;
constexpr int kCopies = 32;
constexpr int kLaneDigits = kDigits / kWarp;
constexpr int64_t kSurveyThreads = 1 << 15;  // enough to keep the memory busy; each ends in atomics
constexpr int64_t kCountThreads = 1 << 17;   // a block counts in shared memory what it reads
constexpr int64_t kFewRows = 1 << 14;        // may be listed even if fewer are wanted

struct Candidates {
  const DeviceRecord* records;
  const uint32_t* kept;
  ScoreKind kind;
  const uint32_t* list;  // rows, or null for all of them
  Count num_rows;        // of the list, or of the table

  SOK_DEVICE uint32_t Row(int64_t i) const {
    return list == nullptr ? static_cast<uint32_t>(i) : list[i];
  }
  // Null if the row holds no key or must stay.
  SOK_DEVICE const DeviceRecord* Get(int64_t i) const {
    if (list != nullptr) return records + list[i];
    if (records[i].last_step < 0 || (kept[i / 32] >> (i % 32) & 1) != 0) return nullptr;
    return records + i;
  }
};

// Bits that are set in all candidates, and in any; the number of candidates up to the hint.
struct Survey {
  Word score_and, key_and, score_or, key_or;
  uint32_t num_listed;
  uint32_t unused;  // written too: initcheck reports unwritten bytes that are copied to the host
};
static_assert(std::has_unique_object_representations_v<Survey>, "no padding");

// Score and key as one number of 128 bits.
struct Ceiling {
  uint64_t score, key;

  // Adds 2^bits; stops at the largest number.
  SOK_DEVICE void Add(int bits) {
    const uint64_t step = uint64_t{1} << (bits % 64);
    const uint64_t new_key = key + (bits < 64 ? step : 0);
    const uint64_t new_score = score + (bits < 64 ? 0 : step) + (new_key < key ? 1 : 0);
    const bool is_over = new_score < score;
    score = is_over ? ~uint64_t{0} : new_score;
    key = is_over ? ~uint64_t{0} : new_key;
  }
  SOK_DEVICE bool IsBelow(uint64_t other_score, uint64_t other_key) const {
    return score != other_score ? score < other_score : key < other_key;
  }
};

// The digits chosen so far: rows with (score & score_mask, key & key_mask) below are taken, rows
// above are not, and of equal rows `remaining`, or all if `done`.
struct Choice {
  uint64_t score, score_mask, key, key_mask;
  uint32_t remaining;
  uint32_t done;
};

__global__ void StartKernel(uint32_t count, Survey* survey, Choice* choice, uint32_t* num_taken) {
  if (GlobalThread() != 0) return;
  *survey = {~0ull, ~0ull, 0, 0, 0, 0};
  *choice = {0, 0, 0, 0, count, 0};
  *num_taken = 0;
}

// Null `end`: nothing is listed. `listed` [limit]
__global__ void __launch_bounds__(kThreads)
    SurveyKernel(Candidates candidates, Survey* survey, const uint64_t* end, int slack_bits,
                 uint32_t* listed, uint32_t limit) {
  Ceiling ceiling = {0, 0};
  if (end != nullptr) {
    ceiling = {end[0], end[1]};
    ceiling.Add(slack_bits);
  }
  Word score_and = ~0ull, key_and = ~0ull, score_or = 0, key_or = 0;
  bool any = false;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t count = candidates.num_rows.Get();
  for (int64_t i = GlobalThread(); i < count; i += num_threads) {
    const DeviceRecord* const record = candidates.Get(i);
    if (record == nullptr) continue;
    const Word score = OrderedScore(*record, candidates.kind);
    any = true;
    score_and &= score;
    score_or |= score;
    key_and &= record->key;
    key_or |= record->key;
    if (end == nullptr || ceiling.IsBelow(score, record->key)) continue;
    const uint32_t place = AggregatedIncrement(&survey->num_listed);
    if (place < limit) listed[place] = static_cast<uint32_t>(i);
  }
  if (!any) return;
  atomicAnd(&survey->score_and, score_and);
  atomicOr(&survey->score_or, score_or);
  atomicAnd(&survey->key_and, key_and);
  atomicOr(&survey->key_or, key_or);
}

__global__ void __launch_bounds__(kThreads)
    CountDigitsKernel(Candidates candidates, const Choice* choice, bool of_key, int shift,
                      uint32_t* counters) {
  static_assert(kThreads == kDigits, "a thread for each digit");
  SOK_SHARED(uint32_t, of_block, kDigits);
  if (choice->done != 0) return;  // the whole block
  of_block[threadIdx.x] = 0;
  __syncthreads();
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t count = candidates.num_rows.Get();
  for (int64_t i = GlobalThread(); i < count; i += num_threads) {
    const DeviceRecord* const record = candidates.Get(i);
    if (record == nullptr) continue;
    const uint64_t score = OrderedScore(*record, candidates.kind);
    if ((score & choice->score_mask) != choice->score) continue;
    if ((record->key & choice->key_mask) != choice->key) continue;
    const uint32_t digit = static_cast<uint32_t>((of_key ? record->key : score) >> shift & 0xFF);
    atomicAdd(&of_block[digit], 1u);
  }
  __syncthreads();
  const uint32_t found = of_block[threadIdx.x];
  if (found == 0) return;
  atomicAdd(&counters[blockIdx.x % kCopies * kDigits + threadIdx.x], found);
}

// One warp; lane l has the digits 8 l .. 8 l + 7. Leaves the counters at 0.
__global__ void __launch_bounds__(kThreads)
    ChooseDigitKernel(Choice* choice, bool of_key, int shift, uint32_t* counters) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  if (threadIdx.x >= kWarp || choice->done != 0) return;  // whole warps
  const uint32_t remaining = choice->remaining;
  const uint32_t lane = warp.thread_rank();
  uint32_t counts[kLaneDigits] = {};
  for (int copy = 0; copy < kCopies; ++copy) {
#pragma unroll
    for (int d = 0; d < kLaneDigits; ++d) {
      uint32_t* const counter = &counters[copy * kDigits + lane * kLaneDigits + d];
      counts[d] += *counter;
      *counter = 0;
    }
  }
  uint32_t total = 0;
#pragma unroll
  for (int d = 0; d < kLaneDigits; ++d) total += counts[d];
  uint32_t up_to = total;  // of this lane's digits and those below
  for (uint32_t step = 1; step < kWarp; step *= 2) {
    const uint32_t other = warp.shfl(up_to, lane >= step ? lane - step : lane);
    if (lane >= step) up_to += other;
  }
  uint32_t before = up_to - total;
#pragma unroll
  for (int d = 0; d < kLaneDigits; ++d) {
    if (before < remaining && remaining <= before + counts[d]) {  // true for one digit of one lane
      const uint64_t digit = static_cast<uint64_t>(lane * kLaneDigits + d) << shift;
      (of_key ? choice->key : choice->score) |= digit;
      (of_key ? choice->key_mask : choice->score_mask) |= uint64_t{0xFF} << shift;
      choice->remaining = remaining - before;
      choice->done = counts[d] == remaining - before ? 1 : 0;
    }
    before += counts[d];
  }
}

__global__ void __launch_bounds__(kThreads)
    TakeKernel(Candidates candidates, const Choice* choice, uint32_t* rows, uint32_t* num_taken) {
  const int64_t i = GlobalThread();
  if (i >= candidates.num_rows.Get()) return;
  const DeviceRecord* const record = candidates.Get(i);
  if (record == nullptr) return;
  const uint64_t score = OrderedScore(*record, candidates.kind) & choice->score_mask;
  if (score > choice->score) return;
  if (score == choice->score && (record->key & choice->key_mask) > choice->key) return;
  rows[AggregatedIncrement(num_taken)] = candidates.Row(i);
}

// Digits without a round are the same in all candidates, or did not matter.
__global__ void EndKernel(const Survey* survey, const Choice* choice, uint64_t* end) {
  if (GlobalThread() != 0) return;
  end[0] = choice->score | (survey->score_or & ~choice->score_mask);
  end[1] = choice->key | (survey->key_or & ~choice->key_mask);
}

__global__ void __launch_bounds__(kThreads)
    SortKeysKernel(const DeviceRecord* records, ScoreKind kind, bool of_key, const uint32_t* rows,
                   int64_t count, uint64_t* out) {
  const int64_t i = GlobalThread();
  if (i >= count) return;
  const DeviceRecord& record = records[rows[i]];
  out[i] = of_key ? record.key : OrderedScore(record, kind);
}

// Sorts by key, then by score; the sort is stable.
void SortRows(Stream stream, Workspace& workspace, const DeviceRecord* records, ScoreKind kind,
              int64_t count, uint32_t* rows) {
  uint64_t* const keys = workspace.Take<uint64_t>(count);
  uint64_t* const sorted_keys = workspace.Take<uint64_t>(count);
  uint32_t* const by_key = workspace.Take<uint32_t>(count);
  Launch(SortKeysKernel, count, stream, records, kind, true, rows, count, keys);
  SortPairs(stream, workspace, keys, sorted_keys, rows, by_key, count, 64);
  Launch(SortKeysKernel, count, stream, records, kind, false, by_key, count, keys);
  SortPairs(stream, workspace, keys, sorted_keys, by_key, rows, count, 64);
}

}  // namespace

void SelectLowest(Stream stream, Workspace& workspace, const DeviceRecord* records, ScoreKind kind,
                  Count num_rows, const uint32_t* kept, int64_t count, bool in_order,
                  LowestHint* hint, uint32_t* rows) {
  const Workspace::Scope scope(workspace, stream);
  Candidates candidates{records, kept, kind, nullptr, num_rows};
  Survey* const survey = workspace.Take<Survey>(1);
  Choice* const choice = workspace.Take<Choice>(1);
  uint32_t* const counters = workspace.Take<uint32_t>(kCopies * kDigits);
  uint32_t* const num_taken = workspace.Take<uint32_t>(1);
  const int64_t limit =
      hint == nullptr ? 0 : std::min(num_rows.most, std::max(kFewRows, 16 * count));
  uint32_t* const listed = workspace.Take<uint32_t>(limit);
  uint64_t* const end = hint == nullptr ? nullptr : hint->end.as<uint64_t>();
  FillWithZeros(stream, counters, kCopies * kDigits * sizeof(uint32_t));
  Launch(StartKernel, 1, stream, static_cast<uint32_t>(count), survey, choice, num_taken);
  Launch(SurveyKernel, std::min(num_rows.most, kSurveyThreads), stream, candidates, survey, end,
         hint == nullptr ? 0 : hint->slack_bits, listed, static_cast<uint32_t>(limit));
  Survey bits;
  CopyToHost(stream, &bits, survey, sizeof(bits));
  if (hint != nullptr) {
    const int64_t num_listed = bits.num_listed;
    hint->was_used = num_listed >= count && num_listed <= limit;
    if (hint->was_used) {
      candidates.list = listed;
      candidates.num_rows = num_listed;
    }
    // Large steps if the list could not be used, small ones if it could be shorter.
    const int change = num_listed < count       ? 4
                       : num_listed > limit     ? -8
                       : num_listed > 4 * count ? -1
                                                : 0;
    hint->slack_bits = std::clamp(hint->slack_bits + change, 0, 127);
  }
  for (const bool of_key : {false, true}) {
    const uint64_t varying = of_key ? bits.key_and ^ bits.key_or : bits.score_and ^ bits.score_or;
    for (int shift = 56; shift >= 0; shift -= 8) {
      if ((varying >> shift & 0xFF) == 0) continue;
      Launch(CountDigitsKernel, std::min(candidates.num_rows.most, kCountThreads), stream,
             candidates, choice, of_key, shift, counters);
      Launch(ChooseDigitKernel, kWarp, stream, choice, of_key, shift, counters);
    }
  }
  Launch(TakeKernel, candidates.num_rows.most, stream, candidates, choice, rows, num_taken);
  if (hint != nullptr) Launch(EndKernel, 1, stream, survey, choice, end);
  if (in_order) SortRows(stream, workspace, records, kind, count, rows);
}

}  // namespace cuda
}  // namespace sok
