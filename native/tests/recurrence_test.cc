#include "recurrence.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"

namespace clickfleet {
namespace {

using Floats = std::vector<float>;

constexpr size_t kWidth = 5;

// Two sequences share the first history. One history is empty.
class Example {
  std::mt19937 generator_{7};  // before the members it fills

 public:
  std::vector<int64_t> from{0, 0, 3, 3, 4}, to{0, 3, 6, 6, 7}, length{3, 3, 0, 1, 6};
  size_t events = 10, places = 13;
  Floats gates = random(events * 3 * kWidth), recurrent = random(3 * kWidth * kWidth), factors = random(places);
  Floats weights = random(places * kWidth);  // of all states in the sum that is derived

  Sequences sequences() const { return {from.data(), to.data(), length.data(), length.size()}; }
  Gru gru() const { return {gates.data(), recurrent.data(), factors.data(), kWidth}; }

  double sum(Floats* states, Floats* kept) const {
    states->assign(places * kWidth, 0.0F);
    kept->assign(places * gru_kept(kWidth), 0.0F);
    gru_forward(gru(), sequences(), states->data(), kept->data());
    double total = 0;
    for (size_t i = 0; i < states->size(); ++i) total += static_cast<double>(weights[i]) * (*states)[i];
    return total;
  }

 private:
  Floats random(size_t n) {
    Floats values(n);
    std::normal_distribution<float> normal(0.0F, 0.5F);
    for (float& value : values) value = normal(generator_);
    return values;
  }
};

void check_by_differences(Example& example, Floats& values, const Floats& gradient) {
  Floats states, kept;
  constexpr float kStep = 1e-2F;
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    values[i] = value + kStep;
    const double above = example.sum(&states, &kept);
    values[i] = value - kStep;
    const double slope = (above - example.sum(&states, &kept)) / (2 * kStep);
    values[i] = value;
    CHECK(std::abs(slope - gradient[i]) < 2e-3);
  }
}

TEST(the_gradients_of_a_recurrence_are_its_differences) {
  Example example;
  Floats states, kept;
  static_cast<void>(example.sum(&states, &kept));
  Floats d_gates(example.gates.size()), d_recurrent(example.recurrent.size()), d_factors(example.factors.size());
  gru_backward(example.gru(), example.sequences(),
               {states.data(), kept.data(), example.weights.data(), nullptr, d_gates.data(), d_recurrent.data(),
                d_factors.data(), true});
  check_by_differences(example, example.gates, d_gates);
  check_by_differences(example, example.recurrent, d_recurrent);
  check_by_differences(example, example.factors, d_factors);
}

TEST(attention_weights_of_a_sequence_sum_to_one) {
  const Example example;
  Floats weights(example.places);
  const Floats& queries = example.gates;
  attend(example.weights.data(), queries.data(), example.sequences(), kWidth, weights.data());
  for (size_t i = 0; i < example.length.size(); ++i) {
    float sum = 0;
    for (int64_t l = 0; l < example.length[i]; ++l) sum += weights[static_cast<size_t>(example.to[i] + l)];
    CHECK(example.length[i] == 0 || std::abs(sum - 1.0F) < 1e-5F);
  }
}

}  // namespace
}  // namespace clickfleet
