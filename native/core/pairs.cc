#include "pairs.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace clickfleet {
namespace {

constexpr uint32_t kScoreEvery = 16;  // one window in this many is scored

const Sigmoid& sigmoid() {
  static const Sigmoid table;
  return table;
}

double log_loss(float logit, bool wanted) {  // -log σ(±x), without overflow or loss of precision for small values
  const double x = wanted ? logit : -logit;
  return x > 0 ? std::log1p(std::exp(-x)) : std::log1p(std::exp(x)) - x;
}

void prefetch_row(const float* row, int dim) {
  const char* const from = reinterpret_cast<const char*>(row);
  for (int at = 0; at < 4 * (1 + dim); at += 64) prefetch(from + at);
}

}  // namespace

Sigmoid::Sigmoid() {
  for (int i = 0; i < 514; ++i) values[i] = static_cast<float>(1 / (1 + std::exp(8 - std::min(i, 512) / 32.0)));
}

Pairs::Pairs(const Words& words, uint32_t window, uint32_t negatives)
    : vocabulary_(words), window_(window), group_(1 + negatives) {
  for (auto& places : place_) places.assign(words.size(), 0);
  for (auto& counts : counts_) counts.assign(words.size(), 0);
}

void Pairs::draw(const uint64_t* keys, const int64_t* offsets, size_t sentences, size_t stride, uint64_t seed) {
  Random random{seed};
  words_seen_ = 0;
  fresh_ = false;
  targets_.clear();
  centres_.clear();
  for (size_t r = 0; r < sentences; ++r) {
    sentence_.clear();
    for (int64_t i = offsets[r * stride]; i < offsets[r * stride + 1]; ++i) {
      const uint32_t id = vocabulary_.find(keys[i]);
      if (id == Words::kNone) continue;
      ++words_seen_;
      if (vocabulary_.keeps(id, random())) sentence_.push_back(id);
    }
    const auto length = static_cast<uint32_t>(sentence_.size());
    for (uint32_t i = 0; i < length; ++i) {
      const uint32_t reach = 1 + Random::below(random(), window_);
      const uint32_t first = i > reach ? i - reach : 0, last = std::min(length - 1, i + reach);
      if (first == last) continue;
      for (uint32_t j = first; j <= last; ++j) {
        if (j == i) continue;
        const uint32_t wanted = sentence_[j];
        targets_.push_back(wanted);
        for (uint32_t k = 1; k < group_; ++k) {
          uint32_t noise = vocabulary_.draw(random());
          for (int again = 0; noise == wanted && again < 8; ++again) noise = vocabulary_.draw(random());
          targets_.push_back(noise == wanted ? Words::kNone : noise);
        }
      }
      if (targets_.size() > UINT32_MAX) throw std::length_error("too many pairs in one batch; use a smaller batch");
      centres_.push_back({sentence_[i], static_cast<uint32_t>(targets_.size())});
    }
  }
}

// ---- training by pull and push ----

size_t Pairs::gather() {
  for (const uint32_t row : gathered_) place_[row % 2][row / 2] = 0;
  gathered_.clear();
  show_.clear();
  const auto take = [&](uint32_t slot, uint32_t id, uint32_t pairs) {
    uint32_t& place = place_[slot][id];
    if (place == 0) {
      gathered_.push_back(2 * id + slot);
      show_.push_back(0);
      place = static_cast<uint32_t>(gathered_.size());
    }
    show_[place - 1] += static_cast<float>(pairs);
  };
  uint32_t begin = 0;
  for (const Centre& centre : centres_) {
    take(0, centre.id, (centre.end - begin) / group_);
    for (; begin < centre.end; ++begin)
      if (targets_[begin] != Words::kNone) take(1, targets_[begin], 1);
  }
  fresh_ = true;
  return gathered_.size();
}

void Pairs::rows(uint64_t* keys, float* show, uint16_t* slots) const {
  for (size_t i = 0; i < gathered_.size(); ++i) {
    const uint32_t id = gathered_[i] / 2, slot = gathered_[i] % 2;
    keys[i] = slot == 0 ? vocabulary_.in(id) : vocabulary_.out(id);
    show[i] = show_[i];
    slots[i] = static_cast<uint16_t>(slot);
  }
}

StepSettings Pairs::step_settings(int dim, float lr, bool bias, Bounds bounds, Bounds bias_bounds, bool shared) {
  const auto n = static_cast<size_t>(dim + 15) / 16 * 16;
  scratch_.resize(3 * n + 16);
  true_.clear();
  noise_.clear();
  loss_ = 0;
  scored_ = 0;
  return {
      dim,       lr, bounds, bias_bounds, bias, shared, scratch_.data(), scratch_.data() + n, scratch_.data() + 2 * n,
      &sigmoid()};
}

template <class Visit>
void Pairs::each_window(const Visit& visit) {
  uint32_t begin = 0;
  for (const Centre& centre : centres_) {
    const uint32_t size = centre.end - begin;
    if (pointers_.size() < size) {
      pointers_.resize(size);
      gradients_.resize(size);
      logits_.resize(size);
    }
    visit(centre.id, targets_.data() + begin, size);
    begin = centre.end;
  }
}

void Pairs::score(const Window& window) {
  if (scored_++ % kScoreEvery != 0) return;
  for (uint32_t first = 0; first < window.size; first += group_) {
    true_.push_back(window.logits[first]);
    loss_ += log_loss(window.logits[first], true);
    if (group_ > 1 && window.targets[first + 1] != nullptr) noise_.push_back(window.logits[first + 1]);
    for (uint32_t t = first + 1; t < first + group_; ++t)
      if (window.targets[t] != nullptr) loss_ += log_loss(window.logits[t], false);
  }
}

void Pairs::move(const float* rows, int dim, float lr, float rule_lr, bool bias, Bounds bounds, Bounds bias_bounds,
                 float* grads) {
  const StepSettings m = step_settings(dim, lr, bias, bounds, bias_bounds, false);
  const auto width = static_cast<size_t>(1 + dim);
  const size_t floats = gathered_.size() * width;
  copy_.assign(rows, rows + floats);
  const auto run = kernels().move_pairs;
  each_window([&](uint32_t id, const uint32_t* targets, uint32_t size) {
    for (uint32_t t = 0; t < size; ++t)
      pointers_[t] = targets[t] == Words::kNone ? nullptr : copy_.data() + (place_[1][targets[t]] - 1) * width;
    const Window window{
        copy_.data() + (place_[0][id] - 1) * width, nullptr, pointers_.data(), nullptr, size, group_, logits_.data()};
    run(window, m);
    score(window);
  });
  for (size_t i = 0; i < floats; ++i) grads[i] = (rows[i] - copy_[i]) / rule_lr;
}

void Pairs::gradient(const float* rows, int dim, bool bias, float* grads) {
  const StepSettings m = step_settings(dim, 0, bias, {}, {}, false);
  const auto width = static_cast<size_t>(1 + dim);
  std::fill_n(grads, gathered_.size() * width, 0.0F);
  const auto run = kernels().sum_pairs;
  auto* const from = const_cast<float*>(rows);  // read only: this kernel does not update rows
  each_window([&](uint32_t id, const uint32_t* targets, uint32_t size) {
    for (uint32_t t = 0; t < size; ++t) {
      const bool none = targets[t] == Words::kNone;
      const size_t at = none ? 0 : (place_[1][targets[t]] - 1) * width;
      pointers_[t] = none ? nullptr : from + at;
      gradients_[t] = none ? nullptr : grads + at;
    }
    const size_t at = (place_[0][id] - 1) * width;
    const Window window{from + at, grads + at, pointers_.data(), gradients_.data(), size, group_, logits_.data()};
    run(window, m);
    score(window);
  });
}

// ---- training in place ----

void Pairs::train(InPlace& held, float lr, bool bias, bool shared) {
  const Config& config = held.table().config();
  const StepSettings m = step_settings(config.factors, lr, bias, config.embedx.bounds, config.embed.bounds, shared);
  const auto run = kernels().move_pairs;
  const uint32_t n = vocabulary_.size();
  held.with([&](float* const* rows) {
    each_window([&](uint32_t id, const uint32_t* targets, uint32_t size) {
      counts_[0][id] += size / group_;
      for (uint32_t t = 0; t < size; ++t) {
        pointers_[t] = targets[t] == Words::kNone ? nullptr : rows[n + targets[t]];
        if (pointers_[t] == nullptr) continue;
        prefetch_row(pointers_[t], m.dim);
        ++counts_[1][targets[t]];
      }
      const Window window{rows[id], nullptr, pointers_.data(), nullptr, size, group_, logits_.data()};
      run(window, m);
      score(window);
    });
  });
}

void Pairs::take_counts(float* in, float* out) {
  float* const to[2] = {in, out};
  for (int slot = 0; slot < 2; ++slot)
    for (size_t id = 0; id < counts_[slot].size(); ++id) {
      to[slot][id] = static_cast<float>(counts_[slot][id]);
      counts_[slot][id] = 0;
    }
}

}  // namespace clickfleet
