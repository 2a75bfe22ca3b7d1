#include "frozen_rows.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "bind.h"
#include "pool.h"
#include "unique.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

using Keys = Array<const uint64_t>;
using Weights = Array<const float>;
using Factors = Array<const float, 2>;

// A layer and the arrays that hold its rows.
struct Layer {
  std::shared_ptr<const FrozenLayer> rows;
  size_t factors;  // of its full rows, if any
  std::vector<nb::object> memory;
};

template <class T>
nb::object array(std::vector<T>&& values, size_t columns = 0) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  if (columns == 0) return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(owned->data(), {owned->size() / columns, columns}, owner));
}

Layers row_layers(const std::vector<const Layer*>& layers, size_t factors) {
  Layers out;
  for (const Layer* layer : layers) {
    need(layer != nullptr, "None is not a layer");
    need(layer->rows->full.size() == 0 || layer->factors == factors, "a layer has a different number of factors");
    out.push_back(layer->rows);
  }
  return out;
}

void check_lengths(bool same) { need(same, "columns have different lengths"); }

// The rows of several layers, and the layers themselves.
struct Rows {
  FrozenRows rows;
  nb::tuple layers;
};

// Reads and pools the rows of keys. Each thread reuses its scratch memory.
void inputs(const FrozenRows& rows, const Keys& keys, const Ragged& ragged, const Array<float, 2>& first,
            const Array<float, 3>& factors) {
  thread_local std::vector<uint64_t> distinct;
  thread_local std::vector<uint32_t> where;
  thread_local std::vector<float> found;
  const size_t n = keys.size(), width = 1 + rows.factors();
  if (where.size() < n) where.resize(n);
  Ragged cells = ragged;
  cells.where = where.data();
  const uint64_t* wanted = keys.data();
  size_t count = n;
  // The keys of one row are distinct, and for few keys reading a row twice is cheaper than deduplicating.
  constexpr size_t kFew = 128;
  if (n > kFew) {
    if (distinct.size() < n) distinct.resize(n);
    count = unique(keys.data(), n, distinct.data(), where.data());
    wanted = distinct.data();
  } else {
    std::iota(where.begin(), where.begin() + static_cast<std::ptrdiff_t>(n), 0U);
  }
  if (found.size() < count * width) found.resize(count * width);
  rows.read(wanted, count, found.data());
  pool(cells, found.data(), static_cast<int>(rows.factors()), first.data(), factors.data());
}

}  // namespace

void bind_frozen(nb::module_& m) {
  nb::class_<Layer>(m, "FrozenLayer", "The rows and deleted keys of one published entry, sorted by hash.")
      .def(
          "__init__",
          [](Layer* self, const std::vector<std::tuple<Keys, Weights, Factors>>& full,
             const std::vector<std::tuple<Keys, Weights>>& brief, const Keys& deleted, nb::object memory) {
            std::vector<Segment> whole, some;
            const size_t width = full.empty() ? 0 : std::get<2>(full[0]).shape(1);
            for (const auto& [keys, weights, factors] : full) {
              check_lengths(weights.size() == keys.size() && factors.shape(0) == keys.size());
              need(factors.shape(1) == width && width > 0, "full rows need factors, the same number in every part");
              whole.push_back({keys.data(), weights.data(), factors.data(), keys.size()});
            }
            for (const auto& [keys, weights] : brief) {
              check_lengths(weights.size() == keys.size());
              some.push_back({keys.data(), weights.data(), nullptr, keys.size()});
            }
            std::vector<Segment> gone;
            for (size_t at = 0; at < deleted.size(); at += kSegmentRows)
              gone.push_back({deleted.data() + at, nullptr, nullptr, std::min(kSegmentRows, deleted.size() - at)});
            auto layer = std::make_shared<FrozenLayer>();
            {
              const nb::gil_scoped_release nogil;
              layer->full = FrozenSet(std::move(whole));
              layer->brief = FrozenSet(std::move(some));
              layer->deleted = FrozenSet(std::move(gone));
              layer->check();
            }
            new (self) Layer{std::move(layer), width, {std::move(memory)}};
          },
          nb::arg("full").noconvert(), nb::arg("brief").noconvert(), nb::arg("deleted").noconvert(),
          nb::arg("memory").none(),
          "The arrays are neither copied nor converted; `memory` keeps them alive. Never truncate a mapped file.")
      .def_prop_ro("full_rows", [](const Layer& self) { return self.rows->full.size(); })
      .def_prop_ro("short_rows", [](const Layer& self) { return self.rows->brief.size(); })
      .def_prop_ro("deleted", [](const Layer& self) { return self.rows->deleted.size(); });

  nb::class_<Rows>(m, "FrozenRows", "The rows of a model at one sequence number: layers, newest first.")
      .def(
          "__init__",
          [](Rows* self, nb::tuple layers, size_t factors) {
            const Layers found = row_layers(nb::cast<std::vector<const Layer*>>(layers), factors);
            new (self) Rows{FrozenRows(found, factors), std::move(layers)};
          },
          nb::arg("layers"), nb::arg("factors"))
      .def_prop_ro("factors", [](const Rows& self) { return self.rows.factors(); })
      .def(
          "read",
          [](const Rows& self, const Keys& keys, const Array<float, 2>& out) {
            if (out.shape(0) != keys.size() || out.shape(1) != 1 + self.rows.factors())
              throw nb::value_error("out does not match the keys");
            const nb::gil_scoped_release nogil;
            self.rows.read(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys"), nb::arg("out").noconvert(),
          "Write embed_w and embedx of every key to `out`; zeros for unknown keys.")
      .def(
          "known",
          [](const Rows& self, const Keys& keys, const Array<uint8_t>& out) {
            if (out.size() != keys.size()) throw nb::value_error("out does not match the keys");
            const nb::gil_scoped_release nogil;
            self.rows.known(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys"), nb::arg("out").noconvert(),
          "Write 1 to `out` for every key that has a row, 0 for the others.")
      .def(
          "inputs",
          [](const Rows& self, const Keys& keys, const Array<const int64_t>& offsets,
             const std::optional<Weights>& values, const std::optional<Array<const uint8_t>>& mean,
             const Array<float, 2>& first, const Array<float, 3>& factors) {
            const size_t batch = first.shape(0), slots = first.shape(1), cells = batch * slots;
            if (offsets.size() != cells + 1 || factors.shape(0) != batch || factors.shape(1) != slots ||
                factors.shape(2) != self.rows.factors() || !fits(values, keys.size()) || !fits(mean, slots) ||
                offsets.data()[0] != 0 || static_cast<size_t>(offsets.data()[cells]) != keys.size() ||
                keys.size() >= size_t{1} << 31)
              throw nb::value_error("array shapes do not match");
            need(ascending(offsets.data(), offsets.size(), keys.size()), "offsets must not decrease");
            const nb::gil_scoped_release nogil;
            inputs(self.rows, keys,
                   {batch, slots, offsets.data(), nullptr, values ? values->data() : nullptr, data_or_null(mean)},
                   first, factors);
          },
          nb::arg("keys"), nb::arg("offsets"), nb::arg("values").none(), nb::arg("mean").none(),
          nb::arg("first").noconvert(), nb::arg("factors").noconvert(), "Read the rows of `keys` and pool them.");

  m.def(
      "merge_frozen",
      [](const std::vector<const Layer*>& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted) {
        MergedRows merged;
        {
          const Layers rows = row_layers(layers, factors);
          const nb::gil_scoped_release nogil;
          merged = merge(rows, factors, low, high, keep_deleted);
        }
        return nb::make_tuple(array(std::move(merged.full_keys)), array(std::move(merged.full_weights)),
                              array(std::move(merged.full_factors), factors == 0 ? 1 : factors),
                              array(std::move(merged.brief_keys)), array(std::move(merged.brief_weights)),
                              array(std::move(merged.deleted)));
      },
      nb::arg("layers"), nb::arg("factors"), nb::arg("low"), nb::arg("high"), nb::arg("keep_deleted"),
      "Merge layers, newest first: the newest state of every key whose hash is in [low, high].");
}

}  // namespace clickfleet
