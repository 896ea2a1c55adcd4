// What a table is: its name, its shape, where its initial rows come from.
#ifndef SOK_CORE_TABLE_OPTIONS_H_
#define SOK_CORE_TABLE_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/policy.h"

namespace sok {

enum class KeyType { kInt64, kInt32, kUint64, kUint32 };
enum class RowType { kFloat32, kFloat16, kBfloat16 };

enum class InitializerKind {
  kConstant,         // a
  kUniform,          // [a, b)
  kNormal,           // mean a, stddev b
  kTruncatedNormal,  // mean a, stddev b of the untruncated normal, redrawn beyond two stddevs
  kDefaultRows,      // row of key = default_rows[uint64(key) % num_default_rows]
};

struct InitializerOptions {
  InitializerKind kind = InitializerKind::kUniform;
  float a = -0.05f;
  float b = 0.05f;
  std::vector<float> default_rows;  // [num_default_rows, dim], kDefaultRows only
};

// Rows are in a file; those in use are also in memory (cpu/row_cache.h).
struct StorageOptions {
  std::string path;          // directory of the file; empty: all rows are in memory
  int64_t memory_bytes = 0;  // of rows in memory
  int64_t file_bytes = 0;    // limit of the file's size; 0: the disk is the only limit
  bool lfu = true;           // rows used least often leave memory first; false: least recently

  bool is_used() const { return !path.empty(); }
};

// Statistics of rows on disk (cpu/row_cache.h).
struct StorageStats {
  int64_t resident_bytes = 0;  // of rows in memory of the process
  int64_t file_bytes = 0;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;  // upper bound: some blocks counted as written had not changed
  int64_t blocks_evicted = 0;
};

inline constexpr int64_t kMaxNarrowDim = 4096;  // largest dim of 16-bit rows

struct TableOptions {
  std::string name;
  int64_t dim = 0;                     // floats in a row's embedding, >= 1
  KeyType key_type = KeyType::kInt64;  // range check and dtype of exports; keys are held as uint64
  RowType row_type = RowType::kFloat32;  // other types: host memory only
  int64_t initial_capacity = 0;          // keys to make room for at creation; 0: none
  int64_t max_capacity = 0;              // most keys of this shard; 0: memory is the only limit
  bool use_hashtable =
      true;          // false: row = key / world_size, keys in [0, max_capacity * world_size)
  int64_t rank = 0;  // this shard's place; used when use_hashtable is false
  int64_t world_size = 1;
  uint64_t seed = 0;
  InitializerOptions initializer;
  PolicyOptions policy;    // which keys get a row and which lose it
  StorageOptions storage;  // host memory only

  // Throws std::invalid_argument naming the field, the requirement and the value.
  void Validate() const;
};

KeyType ParseKeyType(const std::string& name);  // "int64", "int32", "uint64", "uint32"
const char* KeyTypeName(KeyType type);
RowType ParseRowType(const std::string& name);  // "float32", "bfloat16", "float16"
const char* RowTypeName(RowType type);
InitializerKind ParseInitializerKind(
    const std::string&
        name);  // "constant", "uniform", "normal", "truncated_normal", "default_rows"

}  // namespace sok

#endif  // SOK_CORE_TABLE_OPTIONS_H_
