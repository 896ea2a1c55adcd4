#include "cpp/core/cpu/combine.h"

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr Combiner kCombiners[] = {Combiner::kNone, Combiner::kSum, Combiner::kMean,
                                   Combiner::kSqrtn};

// A batch of samples of 0 to 6 keys, and everything the oracle needs, in double.
struct Problem {
  int64_t dim, num_unique;
  std::vector<float> table, weights, grad;
  std::vector<const float*> rows;
  std::vector<int32_t> inverse;
  std::vector<int64_t> row_splits = {0};
  Samples samples;

  Problem(int64_t dim, int64_t batch, bool one_key_each, bool weighted, Combiner combiner)
      : dim(dim), num_unique(batch / 2 + 1) {
    std::mt19937 generator(dim * 31 + batch);
    std::normal_distribution<float> normal;
    table.resize(num_unique * dim);
    for (float& x : table) x = normal(generator);
    for (int64_t u = 0; u < num_unique; ++u) rows.push_back(&table[u * dim]);
    for (int64_t s = 0; s < batch; ++s) {
      const int64_t hotness = one_key_each ? 1 : generator() % 7;
      for (int64_t k = 0; k < hotness; ++k) inverse.push_back(generator() % num_unique);
      row_splits.push_back(inverse.size());
    }
    weights.resize(inverse.size());
    for (float& w : weights) w = 0.25f + (generator() % 8) * 0.25f;
    grad.resize((combiner == Combiner::kNone ? inverse.size() : batch) * dim);
    for (float& g : grad) g = normal(generator);
    samples.inverse = inverse.data();
    samples.num_keys = inverse.size();
    samples.row_splits = combiner == Combiner::kNone ? nullptr : row_splits.data();
    samples.batch = batch;
    samples.weights = weighted ? weights.data() : nullptr;
    samples.combiner = combiner;
  }

  double Weight(int64_t k) const { return samples.weights == nullptr ? 1.0 : weights[k]; }
  int64_t NumSamples() const {
    return samples.combiner == Combiner::kNone ? samples.num_keys : samples.batch;
  }
  int64_t Begin(int64_t s) const { return samples.combiner == Combiner::kNone ? s : row_splits[s]; }
  int64_t End(int64_t s) const {
    return samples.combiner == Combiner::kNone ? s + 1 : row_splits[s + 1];
  }
  double Divisor(int64_t s) const {
    double sum = 0, squares = 0;
    for (int64_t k = Begin(s); k < End(s); ++k) {
      sum += Weight(k);
      squares += Weight(k) * Weight(k);
    }
    if (samples.combiner == Combiner::kMean) return sum;
    return samples.combiner == Combiner::kSqrtn ? std::sqrt(squares) : 1.0;
  }
  // sum over samples of out . grad, as a function of the weights of one key.
  double Loss(int64_t s, int64_t changed, double change) const {
    double loss = 0, sum = 0, squares = 0;
    for (int64_t k = Begin(s); k < End(s); ++k) {
      const double w = Weight(k) + (k == changed ? change : 0.0);
      sum += w;
      squares += w * w;
      for (int64_t d = 0; d < dim; ++d) loss += w * rows[inverse[k]][d] * grad[s * dim + d];
    }
    if (samples.combiner == Combiner::kMean) return loss / sum;
    return samples.combiner == Combiner::kSqrtn ? loss / std::sqrt(squares) : loss;
  }
};

void TestAgainstDouble(const Problem& p) {
  ThreadPool pool(3);
  const int64_t num_samples = p.NumSamples();
  std::vector<float> out(num_samples * p.dim, -1.0f), unique_grad(p.num_unique * p.dim, -1.0f);
  CombineRows(pool, p.samples, p.rows.data(), p.num_unique, p.dim, out.data());
  CombineGradient(pool, p.samples, p.grad.data(), p.num_unique, p.dim, unique_grad.data());
  std::vector<double> expected_grad(p.num_unique * p.dim, 0.0);
  for (int64_t s = 0; s < num_samples; ++s) {
    const double divisor = p.Divisor(s);
    for (int64_t d = 0; d < p.dim; ++d) {
      double expected = 0;
      for (int64_t k = p.Begin(s); k < p.End(s); ++k) {
        expected += p.Weight(k) * p.rows[p.inverse[k]][d] / divisor;
        expected_grad[p.inverse[k] * p.dim + d] += p.Weight(k) * p.grad[s * p.dim + d] / divisor;
      }
      CHECK(std::abs(out[s * p.dim + d] - expected) < 1e-5);
    }
  }
  for (size_t i = 0; i < expected_grad.size(); ++i) {
    CHECK(std::abs(unique_grad[i] - expected_grad[i]) < 2e-5);
  }

  std::vector<float> weight_grad(p.samples.num_keys, -1.0f);
  WeightGradient(pool, p.samples, p.rows.data(), p.grad.data(), p.dim, weight_grad.data());
  for (int64_t s = 0; s < num_samples; ++s) {
    for (int64_t k = p.Begin(s); k < p.End(s); ++k) {
      const double expected = (p.Loss(s, k, 1e-5) - p.Loss(s, k, -1e-5)) / 2e-5;
      CHECK(std::abs(weight_grad[k] - expected) < 1e-4 * (1 + std::abs(expected)));
    }
  }
}

void TestThreadCountDoesNotShow() {
  const Problem p(16, 40000, false, true, Combiner::kSqrtn);
  InlineExecutor one;
  std::vector<float> expected(p.num_unique * p.dim), expected_out(p.samples.batch * p.dim);
  CombineGradient(one, p.samples, p.grad.data(), p.num_unique, p.dim, expected.data());
  CombineRows(one, p.samples, p.rows.data(), p.num_unique, p.dim, expected_out.data());
  for (int num_threads : {2, 3, 7}) {
    ThreadPool pool(num_threads);
    std::vector<float> grad(expected.size()), out(expected_out.size());
    CombineGradient(pool, p.samples, p.grad.data(), p.num_unique, p.dim, grad.data());
    CombineRows(pool, p.samples, p.rows.data(), p.num_unique, p.dim, out.data());
    CHECK(grad == expected);
    CHECK(out == expected_out);
  }
}

// Gradients in two pieces, as an owner gets them from two ranks.
void TestAddedGradient() {
  const Problem p(16, 20000, true, false, Combiner::kNone);
  InlineExecutor one;
  std::vector<float> expected(p.num_unique * p.dim);
  CombineGradient(one, p.samples, p.grad.data(), p.num_unique, p.dim, expected.data());
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<float> sums(expected.size(), -1.0f);
    Samples piece = p.samples;
    piece.num_keys = 7001;
    CombineGradient(pool, piece, p.grad.data(), p.num_unique, p.dim, sums.data());
    piece.inverse += piece.num_keys;
    piece.num_keys = p.samples.num_keys - piece.num_keys;
    AddGradient(pool, piece, p.grad.data() + 7001 * p.dim, p.num_unique, p.dim, sums.data());
    CHECK(sums == expected);
  }
}

void TestZeroDivisorAndNonFinite() {
  InlineExecutor ex;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const float table[] = {1.0f, nan, 3.0f, inf};
  const float* rows[] = {table, table + 2};  // dim 2
  const int32_t inverse[] = {0, 1, 0, 1};
  const int64_t row_splits[] = {0, 2, 2, 3, 4};  // sample 0 has weights 1, -1: mean divides by 0
  const float weights[] = {1.0f, -1.0f, 2.0f, 2.0f};
  Samples samples;
  samples.inverse = inverse;
  samples.num_keys = 4;
  samples.row_splits = row_splits;
  samples.batch = 4;
  samples.weights = weights;
  samples.combiner = Combiner::kMean;
  float out[8], grad_out[4], weight_grad[4];
  CombineRows(ex, samples, rows, 2, 2, out);
  const float grad[] = {inf, inf, inf, inf, 1.0f, 2.0f, 3.0f, nan};
  CombineGradient(ex, samples, grad, 2, 2, grad_out);
  WeightGradient(ex, samples, rows, grad, 2, weight_grad);
  for (int i = 0; i < 4; ++i) CHECK_EQ(out[i], 0.0f);  // zero divisor, then the empty sample
  CHECK_EQ(out[4], 1.0f);
  CHECK(std::isnan(out[5]));
  CHECK_EQ(out[6], 3.0f);
  CHECK(std::isinf(out[7]));
  CHECK_EQ(grad_out[0], 1.0f);
  CHECK_EQ(grad_out[1], 2.0f);
  CHECK_EQ(grad_out[2], 3.0f);
  CHECK(std::isnan(grad_out[3]));
  CHECK_EQ(weight_grad[0], 0.0f);
  CHECK_EQ(weight_grad[1], 0.0f);
}

// Samples of one key each, without weights, are copied; others keep their combiner.
void TestSimplified() {
  ThreadPool pool(3);
  const Problem one_key_each(2, 5, true, false, Combiner::kMean);
  CHECK(Simplified(pool, one_key_each.samples).combiner == Combiner::kNone);
  CHECK(Simplified(pool, Problem(2, 5, true, true, Combiner::kMean).samples).combiner ==
        Combiner::kMean);
  for (const std::vector<int64_t>& row_splits :
       {std::vector<int64_t>{0, 1, 2, 4, 4, 5}, {0, 0, 2, 3, 4, 5}, {0, 1, 2, 3, 5, 5}}) {
    Samples samples = one_key_each.samples;
    samples.row_splits = row_splits.data();
    CHECK(Simplified(pool, samples).combiner == Combiner::kMean);
  }
  Problem many(1, 100000, true, false, Combiner::kSum);
  CHECK(Simplified(pool, many.samples).combiner == Combiner::kNone);
  many.row_splits[99999] = 99998;
  CHECK(Simplified(pool, many.samples).combiner == Combiner::kSum);
}

void TestNames() {
  CHECK(ParseCombiner("Mean") == Combiner::kMean);
  CHECK(ParseCombiner("sqrtn") == Combiner::kSqrtn);
  CHECK(ParseCombiner("NONE") == Combiner::kNone);
  CHECK_THROWS(ParseCombiner("max"), std::invalid_argument, "Received: 'max'");
}

}  // namespace
}  // namespace sok

int main() {
  for (sok::Combiner combiner : sok::kCombiners) {
    for (int64_t dim : {1, 3, 4, 8, 16, 31, 64, 128}) {
      for (int variant = 0; variant < 4; ++variant) {
        sok::TestAgainstDouble(sok::Problem(dim, 500, variant & 1, variant & 2, combiner));
      }
    }
  }
  sok::TestThreadCountDoesNotShow();
  sok::TestAddedGradient();
  sok::TestZeroDivisorAndNonFinite();
  sok::TestSimplified();
  sok::TestNames();
  return 0;
}
