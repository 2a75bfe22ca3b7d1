// The pairs of some sentences, drawn afresh for every batch: which words are kept, how wide each window is, which words
// are noise. Then the rows they need, for the way by pull and push; or training them where they stand in the table.
#pragma once
#include <vector>

#include "in_place.h"
#include "kernels.h"
#include "words.h"

namespace clickfleet {

class Pairs {
 public:
  struct Centre {
    uint32_t id, end;  // end: of its targets
  };

  Pairs(const Words& words, uint32_t window, uint32_t negatives);

  // Sentence r has the keys from offsets[r * stride] to the offset after it; unknown keys are left out before windows
  // are made.
  void draw(const uint64_t* keys, const int64_t* offsets, size_t sentences, size_t stride, uint64_t seed);
  size_t words() const { return words_seen_; }  // of the vocabulary, kept or not
  size_t size() const { return targets_.size() / group_; }
  const std::vector<Centre>& centres() const { return centres_; }
  const std::vector<uint32_t>& targets() const { return targets_; }  // a neighbour, then its words of noise

  // Each row of the pairs once: how many there are, and their keys, how many pairs each is part of, and its slot.
  size_t gather();
  size_t gathered() const { return gathered_.size(); }
  bool is_gathered() const { return fresh_; }  // since the last draw
  const Words& vocabulary() const { return vocabulary_; }
  void rows(uint64_t* keys, float* show, uint16_t* slots) const;

  // Pairs one after the other on a copy of those rows [., 1 + dim], as plain gradient descent does; `grads` is what a
  // rule of rate `rule_lr` must learn to do the same to the rows themselves.
  void move(const float* rows, int dim, float lr, float rule_lr, bool bias, Bounds bounds, Bounds bias_bounds,
            float* grads);
  // The gradient of the sum of the pairs' losses, all at those rows.
  void gradient(const float* rows, int dim, bool bias, float* grads);
  // Gradient descent on the table's rows, which need not be gathered.
  void train(InPlace& held, float lr, bool bias, bool shared);
  // How many pairs each word's rows were trained with since the last time, by `train`.
  void take_counts(float* in, float* out);

  // Some of the last pairs: the logits of the word around and of the first one of noise, and the sum of the losses.
  const std::vector<float>& true_logits() const { return true_; }
  const std::vector<float>& noise_logits() const { return noise_; }
  double loss() const { return loss_; }

 private:
  template <class Visit>
  void each_window(const Visit& visit);  // (the centre's id, its targets, how many)
  Motion motion(int dim, float lr, bool bias, Bounds bounds, Bounds bias_bounds, bool shared);
  void score(const Window& window);

  const Words& vocabulary_;
  const uint32_t window_, group_;
  size_t words_seen_ = 0;
  std::vector<uint32_t> sentence_, targets_;
  std::vector<Centre> centres_;
  std::vector<uint32_t> place_[2];  // of a word's input and output row among the gathered ones, and one more
  std::vector<uint32_t> gathered_;  // 2·id + slot
  std::vector<float> show_, copy_, scratch_, logits_, true_, noise_;
  std::vector<float*> pointers_, gradients_;
  std::vector<uint32_t> counts_[2];
  double loss_ = 0;
  uint32_t scored_ = 0;
  bool fresh_ = true;
};

}  // namespace clickfleet
