// Rows in and out of a table, one warp per 32 rows.
//
// Each lane has probed for one row; then the warp copies the 32 rows together. The pieces of all
// rows, 16 bytes each, are numbered consecutively, and lane l copies the pieces l, l + 32, ...:
//
//     row 0             row 1             ...       dim 16: four pieces per row
//     p0  p1  p2  p3    p4  p5  p6  p7    ...       lanes 0..31 take p0..p31, then p32..p63, ...
//
// So all lanes work at any width, the dense side is read and written contiguously, and kInFlight
// loads are under way before the first is used. A row whose width or address does not allow 16
// bytes is copied in pieces of 4.
#ifndef SOK_CORE_CUDA_ROWS_ROW_ACCESS_CUH_
#define SOK_CORE_CUDA_ROWS_ROW_ACCESS_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cpp/core/adam_series.h"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/rows/table_ref.h"

namespace sok {
namespace cuda {

using Warp = cooperative_groups::thread_block_tile<kWarp>;

inline constexpr int kInFlight = 4;

// kWidth floats that are loaded and stored together: 4 or 1.
template <int kWidth>
struct alignas(4 * kWidth) Piece {
  float x[kWidth];
};

inline bool Aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// The pieces of 32 rows: piece number -> (row, piece of the row).
template <int kWidth>
struct Pieces {
  uint32_t per_row;
  int shift;  // log2(per_row), or -1

  explicit Pieces(int64_t dim = kWidth) : per_row(static_cast<uint32_t>(dim / kWidth)), shift(-1) {
    for (int s = 0; s < 32; ++s) {
      if (per_row == uint32_t{1} << s) shift = s;
    }
  }
  // Usually a power of two: a division takes longer than copying the 16 bytes.
  SOK_DEVICE uint32_t RowOf(uint32_t piece) const {
    return shift >= 0 ? piece >> shift : piece / per_row;
  }
  SOK_DEVICE int64_t LongRowOf(int64_t piece) const {
    return shift >= 0 ? piece >> shift : piece / per_row;
  }
};

template <typename T>
SOK_DEVICE T* ShuffleRow(const Warp& warp, T* row, uint32_t lane) {
  return reinterpret_cast<T*>(warp.shfl(reinterpret_cast<uint64_t>(row), lane));
}

// ---- what a row owes ----

struct Debt {
  uint32_t from = 0;      // the record of the history that the row starts from
  bool none = true;       // the row is up to date
  float row = 1.0f;       // P(from, now)
  float momentum = 1.0f;  // beta_1^(now - from)
  float velocity = 1.0f;  // beta_2^(now - from)
  double since = 1.0;     // P(from + window, now)
};

SOK_DEVICE uint32_t LastStep(const TableRef& table, const float* row) {
  return *reinterpret_cast<const uint32_t*>(row + table.last_step_offset);
}

SOK_DEVICE Debt DebtOf(const HistoryRef& history, uint32_t last_step) {
  Debt debt;
  debt.from = last_step > history.base ? last_step - history.base : 0;
  const uint32_t gap = history.now - debt.from;
  if (gap == 0) return debt;
  debt.none = false;
  debt.momentum = history.beta_1_power[gap];
  debt.velocity = history.beta_2_power[gap];
  if (history.decays) {
    const double now = history.log_decay[history.now];
    debt.row = static_cast<float>(exp(now - history.log_decay[debt.from]));
    if (gap > history.window) {
      debt.since = exp(now - history.log_decay[debt.from + history.window]);
    }
  }
  return debt;
}

SOK_DEVICE Debt ShuffleDebt(const Warp& warp, const Debt& debt, uint32_t lane) {
  Debt other;
  other.from = warp.shfl(debt.from, lane);
  other.none = warp.shfl(static_cast<int>(debt.none), lane) != 0;
  other.row = warp.shfl(debt.row, lane);
  other.momentum = warp.shfl(debt.momentum, lane);
  other.velocity = warp.shfl(debt.velocity, lane);
  other.since = warp.shfl(debt.since, lane);
  return other;
}

struct SeriesTerm {
  const double* terms;
  double since;
  SOK_HD float operator()(int i) const { return static_cast<float>(terms[i] * since); }
};

// Brings the elements `w` of a row up to date; `m` and `v` are still the old ones.
template <int kWidth>
SOK_DEVICE void Replay(const HistoryRef& history, const Debt& debt, const Piece<kWidth>& m,
                       const Piece<kWidth>& v, Piece<kWidth>* w) {
  if (debt.none) return;
  const SeriesTerm term{history.terms + int64_t{debt.from} * history.num_terms, debt.since};
  if (history.num_terms == 0) {
    for (int i = 0; i < kWidth; ++i) w->x[i] = w->x[i] * debt.row;
  } else if (history.kind == ReplayKind::kMomentum) {
    const float factor = history.momentum_scale * term(0);
    for (int i = 0; i < kWidth; ++i) w->x[i] = w->x[i] * debt.row + m.x[i] * factor;
  } else {
    ReplaySeries<kWidth>(debt.row, term, history.num_terms, history.epsilon, w->x, m.x, v.x, kWidth,
                         w->x);
  }
}

// Offset of the velocity that the replay reads, in multiples of dim floats.
SOK_DEVICE int VelocityRow(const HistoryRef& history) {
  return history.kind == ReplayKind::kAmsgrad ? 3 : 2;
}

template <int kWidth>
SOK_DEVICE Piece<kWidth> LoadPiece(const float* row, int64_t piece) {
  return reinterpret_cast<const Piece<kWidth>*>(row)[piece];
}

// One up-to-date piece of a row, without writing to the row.
template <int kWidth>
SOK_DEVICE Piece<kWidth> ReadPiece(const TableRef& table, const Debt& debt, const float* row,
                                   int64_t piece) {
  Piece<kWidth> w = LoadPiece<kWidth>(row, piece);
  if (debt.none) return w;
  Piece<kWidth> m = {}, v = {};
  if (table.history.num_terms > 0) {
    m = LoadPiece<kWidth>(row + table.dim, piece);
    if (table.history.kind != ReplayKind::kMomentum) {
      v = LoadPiece<kWidth>(row + VelocityRow(table.history) * table.dim, piece);
    }
  }
  Replay<kWidth>(table.history, debt, m, v, &w);
  return w;
}

// ---- initial rows ----

template <int kWidth>
SOK_DEVICE Piece<kWidth> InitialPiece(const TableRef& table, uint64_t key, uint32_t piece) {
  Piece<kWidth> out;
  if constexpr (kWidth == 4) {
    InitialQuad(table.initializer, key, piece, table.dim, out.x);
  } else {
    out.x[0] = InitialElement(table.initializer, key, piece, table.dim);
  }
  for (int i = 0; i < kWidth; ++i) out.x[i] *= table.initial_scale;
  return out;
}

// Writes piece `quad` of a new row: initial embedding, initial slot rows, then zeros.
SOK_DEVICE void WriteNewQuad(const TableRef& table, uint64_t key, uint32_t quad, float* row) {
  Piece<4> values = {};
  if (int64_t{4} * quad < table.dim) values = InitialPiece<4>(table, key, quad);
  for (int i = 0; i < 4; ++i) {
    const int64_t column = int64_t{4} * quad + i;
    if (column >= table.dim) {
      values.x[i] = column < table.row_floats ? table.slot_initial[column - table.dim] : 0.0f;
    }
  }
  reinterpret_cast<Piece<4>*>(row)[quad] = values;
}

// Writes the warp's new rows. `row`: this lane's, null for none. If many lanes have one, the pieces
// of all 32 rows are numbered consecutively, as in copying; if few have, row after row takes fewer
// turns.
SOK_DEVICE void WriteNewRows(const Warp& warp, const TableRef& table, uint64_t key, float* row) {
  uint32_t pending = warp.ballot(row != nullptr);
  if (pending == 0) return;
  const uint32_t num_quads = static_cast<uint32_t>((table.row_floats + 3) / 4);
  const uint32_t turns_one_by_one = SOK_POPC(pending) * ((num_quads + kWarp - 1) / kWarp);
  const bool together = num_quads < turns_one_by_one;
  const uint32_t num_turns = together ? num_quads : turns_one_by_one;
  uint32_t first = 0;  // piece of lane 0: of all rows together, or of the one row
  for (uint32_t turn = 0; turn < num_turns; ++turn) {
    uint32_t quad = first + warp.thread_rank();
    uint32_t lane;
    first += kWarp;
    if (together) {
      lane = quad / num_quads;
      quad -= lane * num_quads;
    } else {
      lane = SOK_CTZ(pending);
      if (first >= num_quads) {
        first = 0;
        pending &= pending - 1;
      }
    }
    const uint64_t new_key = warp.shfl(key, lane);
    float* const new_row = ShuffleRow(warp, row, lane);
    if (new_row != nullptr && quad < num_quads) WriteNewQuad(table, new_key, quad, new_row);
  }
}

// Copies the row of each of the warp's first `in_warp` lanes to its `to`. A lane without a row
// (null) reads the initial row of its key, or `no_permission`.
template <int kWidth, bool kOwes>
SOK_DEVICE void CopyRowsOut(const Warp& warp, const TableRef& table, const Pieces<kWidth>& pieces,
                            uint32_t in_warp, uint64_t key, const float* row, float* to) {
  Debt debt;
  if constexpr (kOwes) {
    if (row != nullptr) debt = DebtOf(table.history, LastStep(table, row));
  }
  const uint32_t in_table = warp.ballot(row != nullptr);
  const uint32_t num_pieces = in_warp * pieces.per_row;
  constexpr int kLoads = kOwes ? 1 : kInFlight;  // a Debt takes registers
  if (in_table != 0) {
    // Every lane loads without a condition, if need be a piece that it does not store. ptxas for
    // sm_90 waits for a conditional load before the next: 1 to 3 were under way, not kInFlight.
    const float* const some_row = ShuffleRow(warp, row, SOK_CTZ(in_table));
    const float* const readable = row != nullptr ? row : some_row;
    for (uint32_t start = 0; start < num_pieces; start += kLoads * kWarp) {
      Piece<kWidth> values[kLoads];
      bool has_value[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const uint32_t wanted = start + u * kWarp + warp.thread_rank();
        const uint32_t piece = wanted < num_pieces ? wanted : num_pieces - 1;
        const uint32_t lane = pieces.RowOf(piece);
        const float* const from = ShuffleRow(warp, readable, lane);
        const uint32_t column = piece - lane * pieces.per_row;
        has_value[u] = wanted < num_pieces && (in_table >> lane & 1) != 0;
        if constexpr (kOwes) {
          const Debt from_debt = ShuffleDebt(warp, debt, lane);
          if (has_value[u]) values[u] = ReadPiece<kWidth>(table, from_debt, from, column);
        } else {
          values[u] = LoadPiece<kWidth>(from, column);
        }
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const uint32_t piece = start + u * kWarp + warp.thread_rank();
        const uint32_t lane = pieces.RowOf(piece) % kWarp;
        float* const target = ShuffleRow(warp, to, lane);
        if (!has_value[u]) continue;
        reinterpret_cast<Piece<kWidth>*>(target)[piece - lane * pieces.per_row] = values[u];
      }
    }
  }
  if (SOK_POPC(in_table) == in_warp) return;
  for (uint32_t start = 0; start < num_pieces; start += kWarp) {
    const uint32_t piece = start + warp.thread_rank();
    const uint32_t lane = pieces.RowOf(piece) % kWarp;
    const uint64_t from_key = warp.shfl(key, lane);
    float* const target = ShuffleRow(warp, to, lane);
    if (piece >= num_pieces || (in_table >> lane & 1) != 0) continue;
    const uint32_t column = piece - lane * pieces.per_row;
    Piece<kWidth> value;
    if (table.filters) {
      for (int i = 0; i < kWidth; ++i) value.x[i] = table.no_permission;
    } else {
      value = InitialPiece<kWidth>(table, from_key, column);
      if constexpr (kOwes) {
        for (int i = 0; i < kWidth; ++i) value.x[i] *= table.history.initial_decay;
      }
    }
    reinterpret_cast<Piece<kWidth>*>(target)[column] = value;
  }
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_ROW_ACCESS_CUH_
