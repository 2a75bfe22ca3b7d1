// Draws the skip-gram pairs of some sentences, afresh for every batch: which words to keep, the width of each window,
// and the noise words. It then either collects the rows they need, for training by pull and push, or trains the rows of
// the table in place.
#pragma once
#include <vector>

#include "in_place.h"
#include "kernels.h"
#include "words.h"

namespace clickfleet {

class Pairs {
 public:
  struct Centre {
    uint32_t id, end;  // end: the end of its targets
  };

  Pairs(const Words& words, uint32_t window, uint32_t negatives);

  // Sentence r has the keys from offsets[r * stride] up to the next offset. Unknown keys are dropped before windows are
  // made.
  void draw(const uint64_t* keys, const int64_t* offsets, size_t sentences, size_t stride, uint64_t seed);
  size_t words() const { return words_seen_; }  // words of the vocabulary, kept or not
  size_t size() const { return targets_.size() / group_; }
  const std::vector<Centre>& centres() const { return centres_; }
  const std::vector<uint32_t>& targets() const { return targets_; }  // each neighbour, followed by its noise words

  // Collects each row of the pairs once and returns their number. `rows` gives their keys, the number of pairs each is
  // part of, and their slots.
  size_t gather();
  size_t gathered() const { return gathered_.size(); }
  bool is_gathered() const { return fresh_; }  // whether gather was called since the last draw
  const Words& vocabulary() const { return vocabulary_; }
  void rows(uint64_t* keys, float* show, uint16_t* slots) const;

  // Trains the pairs one after the other by plain gradient descent, on a copy of those rows [., 1 + dim]. Writes to
  // `grads` the gradients with which a rule of learning rate `rule_lr` makes the same update to the rows.
  void move(const float* rows, int dim, float lr, float rule_lr, bool bias, Bounds bounds, Bounds bias_bounds,
            float* grads);
  // Writes the gradient of the summed loss of all pairs at those rows.
  void gradient(const float* rows, int dim, bool bias, float* grads);
  // Runs gradient descent on the rows of the table, without a gather.
  void train(InPlace& held, float lr, bool bias, bool shared);
  // Returns and resets the number of pairs that `train` trained each word's rows with.
  void take_counts(float* in, float* out);

  // A sample of the last pairs: the logits of the neighbours and of their first noise words, and the summed loss.
  const std::vector<float>& true_logits() const { return true_; }
  const std::vector<float>& noise_logits() const { return noise_; }
  double loss() const { return loss_; }

 private:
  template <class Visit>
  void each_window(const Visit& visit);  // visit(id of the centre, its targets, their number)
  StepSettings step_settings(int dim, float lr, bool bias, Bounds bounds, Bounds bias_bounds, bool shared);
  void score(const Window& window);

  const Words& vocabulary_;
  const uint32_t window_, group_;
  size_t words_seen_ = 0;
  std::vector<uint32_t> sentence_, targets_;
  std::vector<Centre> centres_;
  std::vector<uint32_t> place_[2];  // 1 + the position of a word's input or output row in gathered_; 0: none
  std::vector<uint32_t> gathered_;  // 2·id + slot
  std::vector<float> show_, copy_, scratch_, logits_, true_, noise_;
  std::vector<float*> pointers_, gradients_;
  std::vector<uint32_t> counts_[2];
  double loss_ = 0;
  uint32_t scored_ = 0;
  bool fresh_ = true;
};

}  // namespace clickfleet
