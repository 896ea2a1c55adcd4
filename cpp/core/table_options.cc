#include "cpp/core/table_options.h"

#include <cmath>
#include <stdexcept>

#include "cpp/core/names.h"

namespace sok {
namespace {

constexpr const char* kKeyTypes[] = {"int64", "int32", "uint64", "uint32"};
constexpr const char* kRowTypes[] = {"float32", "float16", "bfloat16"};
constexpr const char* kInitializers[] = {"constant", "uniform", "normal", "truncated_normal",
                                         "default_rows"};

[[noreturn]] void Fail(const TableOptions& options, const std::string& requirement,
                       const std::string& received) {
  throw std::invalid_argument(requirement + ". Received: " + received + " (table '" + options.name +
                              "')");
}

void Require(bool holds, const TableOptions& options, const char* requirement, int64_t received) {
  if (!holds) Fail(options, requirement, std::to_string(received));
}

// Row numbers are 32 bits wide and the last one means "no row".
constexpr int64_t kMaxRows = 0xFFFFFFFF;
constexpr float kMaxFloat16 = 65504.0f;

// Initial rows beyond the range of float16 would become infinite.
void RequireFits(float value, const TableOptions& options) {
  if (options.row_type != RowType::kFloat16 || !(std::fabs(value) > kMaxFloat16)) return;
  Fail(options, "Initial rows of dtype float16 must be within [-65504, 65504]",
       std::to_string(value));
}

void ValidateInitializer(const TableOptions& options) {
  const InitializerOptions& init = options.initializer;
  const std::string received = "a=" + std::to_string(init.a) + ", b=" + std::to_string(init.b);
  if (init.kind == InitializerKind::kDefaultRows) {
    if (init.default_rows.empty() || init.default_rows.size() % options.dim != 0) {
      Fail(options, "`default_rows` must hold one or more rows of `dim` values",
           std::to_string(init.default_rows.size()) +
               " values for dim=" + std::to_string(options.dim));
    }
    for (float value : init.default_rows) RequireFits(value, options);
    return;
  }
  if (!std::isfinite(init.a) || !std::isfinite(init.b)) {
    Fail(options, "The initializer's `a` and `b` must be finite", received);
  }
  RequireFits(init.a, options);
  RequireFits(init.b, options);
  if (init.kind == InitializerKind::kUniform && !(init.a <= init.b)) {
    Fail(options, "The uniform initializer needs `a` <= `b`", received);
  }
  if (init.kind == InitializerKind::kUniform && !std::isfinite(init.b - init.a)) {
    Fail(options, "The uniform initializer needs a finite `b` - `a`", received);
  }
  if ((init.kind == InitializerKind::kNormal || init.kind == InitializerKind::kTruncatedNormal) &&
      init.b < 0) {
    Fail(options, "The initializer's standard deviation `b` must not be negative", received);
  }
}

}  // namespace

void TableOptions::Validate() const {
  Require(dim >= 1 && dim <= (int64_t{1} << 30), *this, "`dim` must be between 1 and 2^30", dim);
  Require(row_type == RowType::kFloat32 || dim <= kMaxNarrowDim, *this,
          "`dim` must be at most 4096 if rows have 16 bits", dim);
  Require(max_capacity >= 0, *this, "`max_capacity` must not be negative", max_capacity);
  Require(max_capacity <= kMaxRows, *this, "`max_capacity` must be below 2^32", max_capacity);
  Require(initial_capacity >= 0, *this, "`initial_capacity` must not be negative",
          initial_capacity);
  Require(initial_capacity <= (max_capacity > 0 ? max_capacity : kMaxRows), *this,
          "`initial_capacity` must not exceed `max_capacity`", initial_capacity);
  Require(world_size >= 1 && world_size <= (int64_t{1} << 31), *this,
          "`world_size` must be between 1 and 2^31", world_size);
  Require(rank >= 0 && rank < world_size, *this, "`rank` must be in [0, world_size)", rank);
  Require(use_hashtable || max_capacity >= 1, *this,
          "`max_capacity` must be positive when `use_hashtable` is false", max_capacity);
  Require(!storage.is_used() || storage.memory_bytes > 0, *this,
          "The first value of `storage_size`, the bytes of rows in memory, must be positive",
          storage.memory_bytes);
  Require(storage.file_bytes >= 0, *this, "`storage_size` must not be negative",
          storage.file_bytes);
  ValidateInitializer(*this);
  policy.Validate(name, max_capacity, use_hashtable);
}

KeyType ParseKeyType(const std::string& name) {
  return ValueNamed<KeyType>(name, kKeyTypes,
                             "The key type must be one of 'int64', 'int32', 'uint64', 'uint32'");
}

const char* KeyTypeName(KeyType type) { return kKeyTypes[static_cast<int>(type)]; }

RowType ParseRowType(const std::string& name) {
  return ValueNamed<RowType>(name, kRowTypes,
                             "A row's dtype must be one of 'float32', 'bfloat16', 'float16'");
}

const char* RowTypeName(RowType type) { return kRowTypes[static_cast<int>(type)]; }

InitializerKind ParseInitializerKind(const std::string& name) {
  return ValueNamed<InitializerKind>(
      name, kInitializers,
      "The initializer must be one of 'constant', 'uniform', 'normal', 'truncated_normal', "
      "'default_rows'");
}

}  // namespace sok
