#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "lanes.h"
#include "memory.h"

namespace clickfleet {
namespace {

constexpr size_t kLanes = 8;
constexpr int64_t kAhead = 3;  // events between a prefetch and its use
constexpr int kRows = 4;       // sequences that advance together and share the loads of the weights

size_t padded(size_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// x P(x²)/Q(x²), fitted to tanh on [-8, 8]; the relative error is below 4e-7.
CLICKFLEET_INLINE float tanh_of(float x) {
  const float bounded = std::min(std::max(x, -8.0F), 8.0F);
  const float s = bounded * bounded;
  const float p =
      (((1.5230378736e-08F * s + 2.1894635211e-05F) * s + 3.5715964623e-03F) * s + 1.3444496691e-01F) * s + 1.0F;
  const float q =
      (((8.5224309032e-07F * s + 3.4112893627e-04F) * s + 2.6164436713e-02F) * s + 4.6777823567e-01F) * s + 1.0F;
  return x == x ? bounded * p / q : x;
}

CLICKFLEET_INLINE float sigmoid_of(float x) { return 0.5F + 0.5F * tanh_of(0.5F * x); }

// Vectors that consist of `count` parts of `width` floats, each padded with zeros to `wide`.
struct Parts {
  size_t count, width, wide;
  size_t size() const { return count * wide; }

  // Calls visit for the places that are not padding.
  template <class Visit>
  CLICKFLEET_INLINE void each(const Visit& visit) const {
    for (size_t part = 0; part < count; ++part)
      for (size_t k = part * wide; k < part * wide + width; ++k) visit(k);
  }
};

// out[row] = Σ_k x[row, k] · weights[k] for R rows and the columns [at, at + 8·C).
template <int R, int C>
CLICKFLEET_INLINE void product_columns(const float* x, const Parts& parts, const float* weights, size_t columns,
                                       size_t at, float* out) {
  Lanes<8> sums[R][C];
  for (auto& row : sums)
    for (auto& sum : row) sum = Lanes<8>::all(0);
  parts.each([&](size_t k) {
    Lanes<8> w[C];
    for (int c = 0; c < C; ++c) w[c] = Lanes<8>::load(weights + k * columns + at + kLanes * c);
    for (int r = 0; r < R; ++r) {
      const auto value = Lanes<8>::all(x[r * parts.size() + k]);
      for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] + value * w[c];
    }
  });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c].store(out + r * columns + at + kLanes * c);
}

template <int R>
CLICKFLEET_INLINE void product(const float* x, const Parts& parts, const float* weights, size_t columns, float* out) {
  size_t at = 0;
  for (; at + 3 * kLanes <= columns; at += 3 * kLanes) product_columns<R, 3>(x, parts, weights, columns, at, out);
  for (; at < columns; at += kLanes) product_columns<R, 1>(x, parts, weights, columns, at, out);
}

// sums[k] += Σ_row z[row, k] · h[row] for R rows, and the columns [at, at + 8·C) of h.
template <int R, int C>
CLICKFLEET_INLINE void outer_columns(const float* z, const Parts& parts, const float* h, size_t columns, size_t at,
                                     float* sums) {
  Lanes<8> rows[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) rows[r][c] = Lanes<8>::load(h + r * columns + at + kLanes * c);
  parts.each([&](size_t k) {
    float* const to = sums + k * columns + at;
    Lanes<8> total[C];
    for (int c = 0; c < C; ++c) total[c] = Lanes<8>::load(to + kLanes * c);
    for (int r = 0; r < R; ++r) {
      const auto value = Lanes<8>::all(z[r * parts.size() + k]);
      for (int c = 0; c < C; ++c) total[c] = total[c] + value * rows[r][c];
    }
    for (int c = 0; c < C; ++c) total[c].store(to + kLanes * c);
  });
}

template <int R>
CLICKFLEET_INLINE void add_outer(const float* z, const Parts& parts, const float* h, size_t columns, float* sums) {
  size_t at = 0;
  for (; at + 3 * kLanes <= columns; at += 3 * kLanes) outer_columns<R, 3>(z, parts, h, columns, at, sums);
  for (; at < columns; at += kLanes) outer_columns<R, 1>(z, parts, h, columns, at, sums);
}

CLICKFLEET_INLINE void prefetch_floats(const float* from, size_t n) {
  for (size_t i = 0; i < n; i += 16) prefetch(from + i);
}

CLICKFLEET_INLINE void copy_floats(const float* from, size_t n, float* to) {
  by_lanes(static_cast<int>(n), [&]<class L>(int i, L) { L::load(from + i).store(to + i); });
}

CLICKFLEET_INLINE void add_floats(const float* from, size_t n, float* to) {
  by_lanes(static_cast<int>(n), [&]<class L>(int i, L) { (L::load(to + i) + L::load(from + i)).store(to + i); });
}

CLICKFLEET_INLINE void add_scaled(const float* from, float by, size_t n, float* to) {
  by_lanes(static_cast<int>(n),
           [&]<class L>(int i, L) { (L::load(to + i) + L::all(by) * L::load(from + i)).store(to + i); });
}

// Sequences from the longest to the shortest, so that those that advance together have similar lengths.
std::vector<size_t> by_length(const Sequences& sequences) {
  std::vector<size_t> order(sequences.size);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sequences.length[a] > sequences.length[b]; });
  return order;
}

// Calls visit(first, R) for groups of at most kRows sequences in `order`, as long as they have events.
template <class Visit>
void by_group(const Sequences& sequences, const std::vector<size_t>& order, const Visit& visit) {
  for (size_t first = 0; first < order.size() && sequences.length[order[first]] > 0; first += kRows)
    visit(order.data() + first, static_cast<int>(std::min<size_t>(kRows, order.size() - first)));
}

// Returns how many of the sequences, which do not grow longer, have an event t.
int active(const Sequences& sequences, const size_t* group, int rows, int64_t t) {
  while (rows > 0 && sequences.length[group[rows - 1]] <= t) --rows;
  return rows;
}

template <class Work>
CLICKFLEET_INLINE void for_rows(int rows, const Work& work) {
  switch (rows) {
    case 1:
      return work.template operator()<1>();
    case 2:
      return work.template operator()<2>();
    case 3:
      return work.template operator()<3>();
    default:
      return work.template operator()<kRows>();
  }
}

// One pass through a recurrence. Vectors of `width` floats are padded with zeros to `wide`.
class Forward {
 public:
  Forward(const Gru& gru, const Sequences& sequences)
      : gru_(gru),
        sequences_(sequences),
        width_(gru.width),
        wide_(padded(gru.width)),
        weights_(width_ * 3 * wide_),
        h_(kRows * wide_),
        z_(kRows * 3 * wide_),
        x_(3 * wide_),
        unused_(4 * wide_) {
    for (size_t gate = 0; gate < 3; ++gate)  // transposed
      for (size_t j = 0; j < width_; ++j)
        for (size_t k = 0; k < width_; ++k)
          weights_[k * 3 * wide_ + gate * wide_ + j] = gru.recurrent[(gate * width_ + j) * width_ + k];
  }

  void group(const size_t* group, int rows, float* states, float* kept) {
    std::fill(h_.begin(), h_.end(), 0.0F);
    for (int64_t t = 0; (rows = active(sequences_, group, rows, t)) > 0; ++t) {
      for_rows(rows,
               [&]<int R>() { product<R>(h_.data(), {1, width_, wide_}, weights_.data(), 3 * wide_, z_.data()); });
      for (int row = 0; row < rows; ++row) {
        const int64_t event = sequences_.from[group[row]] + t, place = sequences_.to[group[row]] + t;
        for (size_t gate = 0; gate < 3; ++gate)
          copy_floats(gru_.gates + event * 3 * width_ + gate * width_, width_, x_.data() + gate * wide_);
        if (t + kAhead < sequences_.length[group[row]]) {
          prefetch_floats(gru_.gates + (event + kAhead) * 3 * width_, 3 * width_);
          if (kept != nullptr) prefetch_floats(kept + (place + kAhead) * 4 * wide_, 4 * wide_);
        }
        const float a = gru_.factors == nullptr ? 1.0F : gru_.factors[place];
        float* const keep = kept == nullptr ? unused_.data() : kept + place * 4 * wide_;
        step(z_.data() + row * 3 * wide_, a, h_.data() + row * wide_, keep);
        copy_floats(h_.data() + row * wide_, width_, states + place * width_);
      }
    }
  }

 private:
  void step(const float* __restrict z, float a, float* __restrict h, float* __restrict kept) const {
    const float* __restrict x = x_.data();
    const size_t wide = wide_;
    for (size_t i = 0; i < 2 * wide; ++i) kept[i] = sigmoid_of(x[i] + z[i]);
    for (size_t i = 0; i < wide; ++i) {
      const float before = z[2 * wide + i];
      const float p = tanh_of(x[2 * wide + i] + kept[wide + i] * before);
      kept[2 * wide + i] = p;
      kept[3 * wide + i] = before;
      h[i] += a * kept[i] * (p - h[i]);
    }
  }

  const Gru& gru_;
  const Sequences& sequences_;
  size_t width_, wide_;
  std::vector<float> weights_, h_, z_, x_, unused_;
};

class Backward {
 public:
  Backward(const Gru& gru, const Sequences& sequences, const GruGradients& gradients)
      : gru_(gru),
        sequences_(sequences),
        g_(gradients),
        width_(gru.width),
        wide_(padded(gru.width)),
        weights_(3 * wide_ * wide_),
        d_weights_(3 * wide_ * wide_),
        earlier_(kRows * wide_),
        d_h_(kRows * wide_),
        d_z_(kRows * 3 * wide_),
        later_(kRows * wide_),
        d_p_(wide_) {
    for (size_t gate = 0; gate < 3; ++gate)
      for (size_t j = 0; j < width_; ++j)
        copy_floats(gru.recurrent + (gate * width_ + j) * width_, width_, &weights_[(gate * wide_ + j) * wide_]);
  }

  void group(const size_t* group, int size) {
    const Parts gates{3, width_, wide_};
    std::fill(d_h_.begin(), d_h_.end(), 0.0F);
    for (int64_t t = sequences_.length[group[0]] - 1; t >= 0; --t) {
      const int rows = active(sequences_, group, size, t);
      for (int row = 0; row < rows; ++row) {
        const size_t sequence = group[row];
        const int64_t event = sequences_.from[sequence] + t, place = sequences_.to[sequence] + t;
        if (t >= kAhead) {
          prefetch_floats(g_.kept + (place - kAhead) * 4 * wide_, 4 * wide_);
          prefetch_floats(g_.d_gates + (event - kAhead) * 3 * width_, 3 * width_);
          prefetch_floats(g_.states + (place - kAhead) * width_, width_);
          if (g_.d_states != nullptr) prefetch_floats(g_.d_states + (place - kAhead) * width_, width_);
        }
        float* const d_h = d_h_.data() + row * wide_;
        float* const d_z = d_z_.data() + row * 3 * wide_;
        float* const earlier = earlier_.data() + row * wide_;
        if (g_.d_states != nullptr) add_floats(g_.d_states + place * width_, width_, d_h);
        if (g_.d_last != nullptr && t == sequences_.length[sequence] - 1)
          add_floats(g_.d_last + sequence * width_, width_, d_h);
        if (t > 0)
          copy_floats(g_.states + (place - 1) * width_, width_, earlier);
        else
          std::fill_n(earlier, wide_, 0.0F);
        const float a = gru_.factors == nullptr ? 1.0F : gru_.factors[place];
        step(g_.kept + place * 4 * wide_, a, earlier, d_h, d_z);
        if (g_.d_factors != nullptr) g_.d_factors[place] = sum_;
        float* const d_gates = g_.d_gates + event * 3 * width_;
        const float* const parts[] = {d_z, d_z + wide_, d_p_.data()};
        for (size_t gate = 0; gate < 3; ++gate)
          if (g_.shared)
            add_floats(parts[gate], width_, d_gates + gate * width_);
          else
            copy_floats(parts[gate], width_, d_gates + gate * width_);
      }
      for_rows(rows, [&]<int R>() {
        add_outer<R>(d_z_.data(), gates, earlier_.data(), wide_, d_weights_.data());
        product<R>(d_z_.data(), gates, weights_.data(), wide_, later_.data());
      });
      for (size_t i = 0; i < rows * wide_; ++i) d_h_[i] += later_[i];
    }
  }

  void finish() {
    for (size_t gate = 0; gate < 3; ++gate)
      for (size_t j = 0; j < width_; ++j)
        copy_floats(&d_weights_[(gate * wide_ + j) * wide_], width_, g_.d_recurrent + (gate * width_ + j) * width_);
  }

 private:
  // Turns d_h, the gradient by h after an event, into the part by h before it that does not pass the weights.
  void step(const float* __restrict kept, float a, const float* __restrict earlier, float* __restrict d_h,
            float* __restrict d_z) {
    float* __restrict d_p = d_p_.data();
    const size_t wide = wide_;
    float lanes[kLanes] = {};
    for (size_t i = 0; i < wide; i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const size_t k = i + lane;
        const float u = kept[k], r = kept[wide + k], p = kept[2 * wide + k], before = kept[3 * wide + k];
        const float d = d_h[k], moved = d * (p - earlier[k]);
        const float by_p = d * (a * u) * (1.0F - p * p);
        d_p[k] = by_p;
        d_z[k] = a * moved * u * (1.0F - u);
        d_z[wide + k] = by_p * before * r * (1.0F - r);
        d_z[2 * wide + k] = by_p * r;
        d_h[k] = d * (1.0F - a * u);
        lanes[lane] += moved * u;
      }
    sum_ = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  }

  const Gru& gru_;
  const Sequences& sequences_;
  const GruGradients& g_;
  size_t width_, wide_;
  std::vector<float> weights_, d_weights_, earlier_, d_h_, d_z_, later_, d_p_;
  float sum_ = 0;  // the gradient by the factor of the last event of `step`
};

// The sum of ln(1 + eˣ) = max(x, 0) − ln σ(|x|). It takes the logarithm of a product of many σ.
class SoftplusSum {
 public:
  void add(float x, float sigmoid_of_size) {
    sum_ += std::max(x, 0.0F);
    product_ *= sigmoid_of_size;  // at least ½
    if (product_ < 1e-200) flush();
  }
  double value() {
    flush();
    return sum_;
  }

 private:
  void flush() {
    sum_ -= std::log(product_);
    product_ = 1;
  }
  double sum_ = 0, product_ = 1;
};

}  // namespace

size_t gru_kept(size_t width) { return 4 * padded(width); }

void gru_forward(const Gru& gru, const Sequences& sequences, float* states, float* kept) {
  Forward pass(gru, sequences);
  by_group(sequences, by_length(sequences),
           [&](const size_t* group, int rows) { pass.group(group, rows, states, kept); });
}

void gru_backward(const Gru& gru, const Sequences& sequences, const GruGradients& gradients) {
  Backward pass(gru, sequences, gradients);
  by_group(sequences, by_length(sequences), [&](const size_t* group, int rows) { pass.group(group, rows); });
  pass.finish();
}

void attend(const float* states, const float* queries, const Sequences& sequences, size_t width, float* weights) {
  for (size_t i = 0; i < sequences.size; ++i) {
    const auto length = static_cast<size_t>(sequences.length[i]);
    float* const a = weights + sequences.to[i];
    float most = -INFINITY, sum = 0;
    for (size_t l = 0; l < length; ++l) {
      a[l] = dot(states + (sequences.from[i] + l) * width, queries + i * width, static_cast<int>(width));
      most = a[l] > most ? a[l] : most;
    }
    for (size_t l = 0; l < length; ++l) sum += a[l] = std::exp(a[l] - most);
    for (size_t l = 0; l < length; ++l) a[l] /= sum;
  }
}

void attend_backward(const float* states, const float* queries, const Sequences& sequences, size_t width,
                     const float* weights, const float* d_weights, float* d_states, float* d_queries) {
  std::fill_n(d_queries, sequences.size * width, 0.0F);
  for (size_t i = 0; i < sequences.size; ++i) {
    const auto length = static_cast<size_t>(sequences.length[i]);
    const float *const a = weights + sequences.to[i], *const d_a = d_weights + sequences.to[i];
    float mean = 0;
    for (size_t l = 0; l < length; ++l) mean += a[l] * d_a[l];
    for (size_t l = 0; l < length; ++l) {
      const float d = a[l] * (d_a[l] - mean);
      const size_t event = sequences.from[i] + l;
      add_scaled(queries + i * width, d, width, d_states + event * width);
      add_scaled(states + event * width, d, width, d_queries + i * width);
    }
  }
}

double next_events(const float* states, const float* events, const int64_t* starts, const int64_t* lengths,
                   size_t histories, size_t width, float* d_states, float* d_events) {
  // Of the history u, the events 1 … shared(u) have one of another history at the same place.
  const auto before = [&](size_t u) { return u == 0 ? histories - 1 : u - 1; };
  const auto shared = [&](size_t u) {
    return histories > 1 ? std::max<int64_t>(std::min(lengths[u], lengths[before(u)]) - 1, 0) : 0;
  };
  int64_t known = 0, others = 0, last = 0;
  for (size_t u = 0; u < histories; ++u) {
    known += std::max<int64_t>(lengths[u] - 1, 0);
    others += shared(u);
    last = std::max(last, starts[u] + lengths[u]);
  }
  std::fill_n(d_states, last * width, 0.0F);
  std::fill_n(d_events, last * width, 0.0F);
  SoftplusSum positive, negative;
  const auto compare = [&](SoftplusSum& sum, int64_t state, int64_t event, float sign, float by) {
    const float *const h = states + state * width, *const e = events + event * width;
    const float logit = sign * dot(h, e, static_cast<int>(width));
    const float likely = sigmoid_of(std::abs(logit));
    const float slope = sign * by * (logit < 0 ? 1.0F - likely : likely);
    add_scaled(e, slope, width, d_states + state * width);
    add_scaled(h, slope, width, d_events + event * width);
    sum.add(logit, likely);
  };
  for (size_t u = 0; u < histories; ++u) {
    const int64_t start = starts[u], other = starts[before(u)];
    for (int64_t l = 0; l + 1 < lengths[u]; ++l)
      compare(positive, start + l, start + l + 1, -1.0F, 1.0F / static_cast<float>(known));
    for (int64_t l = 0; l < shared(u); ++l)
      compare(negative, start + l, other + l + 1, 1.0F, 1.0F / static_cast<float>(others));
  }
  return positive.value() / static_cast<double>(std::max<int64_t>(known, 1)) +
         negative.value() / static_cast<double>(std::max<int64_t>(others, 1));
}

}  // namespace clickfleet
