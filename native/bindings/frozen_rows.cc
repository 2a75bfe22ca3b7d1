#include "frozen_rows.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bind.h"
#include "pool.h"
#include "unique.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

using Keys = Array<const uint64_t>;
using Weights = Array<const float>;
using Factors = Array<const float, 2>;
using Records = Array<const uint8_t, 2>;

// A layer and the arrays that hold its rows.
struct Layer {
  std::shared_ptr<const FrozenLayer> rows;
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
    need(layer->rows->widest() <= factors, "a layer has rows with more factors");
    out.push_back(layer->rows);
  }
  return out;
}

constexpr std::array<const char*, 3> kFormats = {"float32", "float16", "int8"};

RowFormat row_format(const std::string& name) {
  const auto* const found = std::find(kFormats.begin(), kFormats.end(), name);
  need(found != kFormats.end(), "unknown format of rows");
  return static_cast<RowFormat>(found - kFormats.begin());
}

void check_lengths(bool same) { need(same, "columns have different lengths"); }

std::vector<RecordBatch> key_batches(const Keys& keys) {
  std::vector<RecordBatch> out;
  for (size_t at = 0; at < keys.size(); at += kBatchRows)
    out.push_back({keys.data() + at, nullptr, nullptr, std::min(kBatchRows, keys.size() - at)});
  return out;
}

// Makes a layer of rows in a small format.
Layer small_layer(const std::string& format_name, size_t factors, const std::vector<std::tuple<Keys, Records>>& full,
                  const std::vector<std::tuple<Keys, Records>>& brief, const Keys& deleted, nb::object memory) {
  const RowFormat format = row_format(format_name);
  need(format != RowFormat::kFloat32, "float32 is not a small format");
  std::map<size_t, std::vector<RecordBatch>> whole;  // by width
  std::vector<RecordBatch> some, gone = key_batches(deleted);
  for (const auto& [keys, records] : full) {
    check_lengths(records.shape(0) == keys.size());
    const size_t width = record_width(format, records.shape(1));
    need(width >= 1 && width <= factors && record_bytes(format, width) == records.shape(1),
         "records have another size");
    whole[width].push_back({keys.data(), nullptr, nullptr, keys.size(), records.data()});
  }
  for (const auto& [keys, records] : brief) {
    check_lengths(records.shape(0) == keys.size());
    need(records.shape(1) == record_bytes(format, 0), "records have another size");
    some.push_back({keys.data(), nullptr, nullptr, keys.size(), records.data()});
  }
  auto layer = std::make_shared<FrozenLayer>();
  {
    const nb::gil_scoped_release nogil;
    for (auto& [width, parts] : whole) layer->full.emplace_back(std::move(parts), width, format);
    layer->brief = FrozenSet(std::move(some), 0, format);
    layer->deleted = FrozenSet(std::move(gone));
    layer->check();
  }
  return {std::move(layer), {std::move(memory)}};
}

// Returns whether all rows of layers have the same small format.
bool same_records(const Layers& layers) {
  const FrozenSet* known = nullptr;
  bool same = true;
  for (const auto& layer : layers)
    layer->each_set([&](const FrozenSet& set) {
      if (!set.has_weights()) return;
      same = same && set.has_records() && (known == nullptr || known->format() == set.format());
      known = &set;
    });
  return same && known != nullptr;
}

// The rows of several layers, and the layers themselves.
struct Rows {
  FrozenRows rows;
  nb::tuple layers;
};

// The events of a history: which of the distinct ones each row has, their lengths, and their factors.
struct HistoryInputs {
  std::vector<int64_t> row, length;
  std::vector<float> factors;
  size_t longest = 0, columns = 0;
};

// Finds and gathers the events of one history.
HistoryInputs read_events(const Ragged& cells, size_t first, size_t columns, const float* rows, size_t factors,
                          size_t limit) {
  HistoryInputs out;
  Events events{first, columns};
  std::vector<int64_t> from(cells.batch);
  out.row.resize(cells.batch);
  out.length.resize(cells.batch);
  if (!find_events(cells, events, out.row.data(), from.data(), out.length.data()))
    throw std::invalid_argument("the columns of a history have different lengths");
  out.length.resize(events.distinct);
  out.longest = events.longest = std::max<size_t>(1, events.longest);  // no axis of a network may be empty
  out.columns = columns;
  if (events.longest > limit / std::max<size_t>(1, events.distinct * columns))
    throw std::invalid_argument("the longest history of the rows, padded for all of them, exceeds the limit of " +
                                std::to_string(limit) + " events");
  out.factors.resize(events.distinct * events.longest * columns * factors);
  gather(cells, events, rows, static_cast<int>(factors), out.factors.data());
  return out;
}

using Histories = std::vector<std::pair<size_t, size_t>>;  // the first column and the number of columns of each

// Pools the rows of the slots and gathers those of histories. `cells.where` refers to `rows`.
std::vector<HistoryInputs> assemble(const Ragged& cells, const float* rows, const Histories& histories, size_t limit,
                                    const Array<float, 2>& first, const Array<float, 3>& factors) {
  const size_t width = factors.shape(2);
  pool(cells, rows, static_cast<int>(width), first.data(), factors.data());
  std::vector<HistoryInputs> out;
  for (const auto& [begin, columns] : histories) out.push_back(read_events(cells, begin, columns, rows, width, limit));
  return out;
}

// Reads the rows of keys and assembles them. Each thread reuses its scratch memory.
std::vector<HistoryInputs> inputs(const FrozenRows& rows, const Keys& keys, Ragged cells, const Histories& histories,
                                  size_t limit, const Array<float, 2>& first, const Array<float, 3>& factors) {
  thread_local std::vector<uint64_t> distinct;
  thread_local std::vector<uint32_t> where;
  thread_local std::vector<float> found;
  const size_t n = keys.size(), width = 1 + rows.factors();
  if (where.size() < n) where.resize(n);
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
  return assemble(cells, found.data(), histories, limit, first, factors);
}

// Checks the cells of a batch: row b has the keys [starts[b·C + c], ends[b·C + c]) in column c, and rows may share
// them. The columns of histories follow the slots.
Ragged checked_cells(size_t keys, const Array<const int64_t>& starts, const Array<const int64_t>& ends,
                     const std::optional<Weights>& values, const std::optional<Array<const uint8_t>>& mean,
                     const Histories& histories, const Array<float, 2>& first, const Array<float, 3>& factors) {
  const size_t batch = first.shape(0), slots = first.shape(1);
  size_t columns = slots;
  for (const auto& [begin, count] : histories) {
    need(count >= 1 && begin == columns, "histories must follow the slots in order");
    columns += count;
  }
  need(starts.size() == batch * columns && ends.size() == batch * columns && factors.shape(0) == batch &&
           factors.shape(1) == slots && fits(values, keys) && fits(mean, slots) && keys < size_t{1} << 31,
       "array shapes do not match");
  const auto limit = static_cast<int64_t>(keys);
  bool inside = true;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t start = starts.data()[i], end = ends.data()[i];
    inside = inside && start >= 0 && start <= end && end <= limit;
  }
  need(inside, "a cell points outside the keys");
  return {batch, slots, starts.data(), nullptr, data_or_null(values), data_or_null(mean), columns, ends.data()};
}

nb::list hand_over(std::vector<HistoryInputs>&& histories, size_t factors) {
  nb::list out;
  for (HistoryInputs& history : histories) {
    auto* owned = new std::vector<float>(std::move(history.factors));
    const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    const size_t distinct = history.length.size();
    nb::object events = nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<4>>(
        owned->data(), {distinct, history.longest, history.columns, factors}, owner));
    out.append(nb::make_tuple(events, array(std::move(history.length)), array(std::move(history.row))));
  }
  return out;
}

}  // namespace

void bind_frozen(nb::module_& m) {
  nb::class_<Layer>(m, "FrozenLayer", "The rows and deleted keys of one published entry, sorted by hash.")
      .def(
          "__init__",
          [](Layer* self, const std::vector<std::tuple<Keys, Weights, Factors>>& full,
             const std::vector<std::tuple<Keys, Weights>>& brief, const Keys& deleted, nb::object memory) {
            std::map<size_t, std::vector<RecordBatch>> whole;  // by width
            std::vector<RecordBatch> some;
            for (const auto& [keys, weights, factors] : full) {
              check_lengths(weights.size() == keys.size() && factors.shape(0) == keys.size());
              need(factors.shape(1) > 0, "full rows need factors");
              whole[factors.shape(1)].push_back({keys.data(), weights.data(), factors.data(), keys.size()});
            }
            for (const auto& [keys, weights] : brief) {
              check_lengths(weights.size() == keys.size());
              some.push_back({keys.data(), weights.data(), nullptr, keys.size()});
            }
            std::vector<RecordBatch> gone = key_batches(deleted);
            auto layer = std::make_shared<FrozenLayer>();
            {
              const nb::gil_scoped_release nogil;
              for (auto& [width, parts] : whole) layer->full.emplace_back(std::move(parts), width);
              layer->brief = FrozenSet(std::move(some));
              layer->deleted = FrozenSet(std::move(gone));
              layer->check();
            }
            new (self) Layer{std::move(layer), {std::move(memory)}};
          },
          nb::arg("full").noconvert(), nb::arg("brief").noconvert(), nb::arg("deleted").noconvert(),
          nb::arg("memory").none(),
          "The arrays are neither copied nor converted; `memory` keeps them alive. Never truncate a mapped file.")
      .def_static("small", &small_layer, nb::arg("format"), nb::arg("factors"), nb::arg("full").noconvert(),
                  nb::arg("brief").noconvert(), nb::arg("deleted").noconvert(), nb::arg("memory").none(),
                  "Rows in a small format: pairs of keys and records.")
      .def_prop_ro("format", [](const Layer& self) { return kFormats.at(static_cast<size_t>(self.rows->format())); })
      .def_prop_ro("index_bytes",
                   [](const Layer& self) {
                     size_t bytes = self.rows->brief.index_bytes();
                     for (const FrozenSet& set : self.rows->full) bytes += set.index_bytes();
                     return bytes;
                   })
      .def_prop_ro("full_rows", [](const Layer& self) { return self.rows->full_rows(); })
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
      .def_prop_ro(
          "row_formats",
          [](const Rows& self) {
            std::vector<std::string> out;
            for (size_t i = 0; i < kFormats.size(); ++i)
              if (std::any_of(self.rows.layers().begin(), self.rows.layers().end(), [i](const auto& layer) {
                    return layer->full_rows() + layer->brief.size() != 0 && static_cast<size_t>(layer->format()) == i;
                  }))
                out.emplace_back(kFormats.at(i));
            return out;
          },
          "The formats of its rows.")
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
          [](const Rows& self, const Keys& keys, const Array<const int64_t>& starts, const Array<const int64_t>& ends,
             const std::optional<Weights>& values, const std::optional<Array<const uint8_t>>& mean,
             const Histories& histories, size_t limit, const Array<float, 2>& first, const Array<float, 3>& factors) {
            const Ragged cells = checked_cells(keys.size(), starts, ends, values, mean, histories, first, factors);
            need(factors.shape(2) == self.rows.factors(), "array shapes do not match");
            std::vector<HistoryInputs> found;
            {
              const nb::gil_scoped_release nogil;
              found = inputs(self.rows, keys, cells, histories, limit, first, factors);
            }
            return hand_over(std::move(found), self.rows.factors());
          },
          nb::arg("keys"), nb::arg("starts"), nb::arg("ends"), nb::arg("values").none(), nb::arg("mean").none(),
          nb::arg("histories"), nb::arg("limit"), nb::arg("first").noconvert(), nb::arg("factors").noconvert(),
          "Read the rows of `keys`, pool those of the slots and return (factors, length, row) of each history. Rows "
          "may "
          "share cells.");

  m.def(
      "assemble",
      [](const Array<const uint32_t>& where, const Array<const float, 2>& rows, const Array<const int64_t>& starts,
         const Array<const int64_t>& ends, const std::optional<Weights>& values,
         const std::optional<Array<const uint8_t>>& mean, const Histories& histories, size_t limit,
         const Array<float, 2>& first, const Array<float, 3>& factors) {
        Ragged cells = checked_cells(where.size(), starts, ends, values, mean, histories, first, factors);
        need(rows.shape(1) == 1 + factors.shape(2), "array shapes do not match");
        need(below(where.data(), where.size(), rows.shape(0)), "a key points outside the rows");
        cells.where = where.data();
        std::vector<HistoryInputs> found;
        {
          const nb::gil_scoped_release nogil;
          found = assemble(cells, rows.data(), histories, limit, first, factors);
        }
        return hand_over(std::move(found), factors.shape(2));
      },
      nb::arg("where"), nb::arg("rows"), nb::arg("starts"), nb::arg("ends"), nb::arg("values").none(),
      nb::arg("mean").none(), nb::arg("histories"), nb::arg("limit"), nb::arg("first").noconvert(),
      nb::arg("factors").noconvert(), "As `FrozenRows.inputs`, for rows that were read elsewhere.");

  m.def(
      "merge_frozen",
      [](const std::vector<const Layer*>& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted) {
        MergedRows merged;
        {
          const Layers rows = row_layers(layers, factors);
          const nb::gil_scoped_release nogil;
          merged = merge(rows, low, high, keep_deleted);
        }
        nb::list full;
        for (MergedRows::Full& one : merged.full)
          full.append(nb::make_tuple(one.width, array(std::move(one.keys)), array(std::move(one.weights)),
                                     array(std::move(one.factors), one.width)));
        return nb::make_tuple(full, array(std::move(merged.brief_keys)), array(std::move(merged.brief_weights)),
                              array(std::move(merged.deleted)));
      },
      nb::arg("layers"), nb::arg("factors"), nb::arg("low"), nb::arg("high"), nb::arg("keep_deleted"),
      "Merge layers, newest first: the newest state of every key whose hash is in [low, high]. Full rows come as one "
      "(width, keys, weights, factors) per width.");

  m.def(
      "merge_records",
      [](const std::vector<const Layer*>& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted) {
        MergedRows merged;
        RowFormat format{};
        {
          const Layers rows = row_layers(layers, factors);
          need(same_records(rows), "the layers do not have the same small format");
          for (const auto& layer : rows)
            if (layer->format() != RowFormat::kFloat32) format = layer->format();
          const nb::gil_scoped_release nogil;
          merged = merge(rows, low, high, keep_deleted, true);
        }
        nb::list full;
        for (MergedRows::Full& one : merged.full)
          full.append(nb::make_tuple(one.width, array(std::move(one.keys)),
                                     array(std::move(one.records), record_bytes(format, one.width))));
        return nb::make_tuple(full, array(std::move(merged.brief_keys)),
                              array(std::move(merged.brief_records), record_bytes(format, 0)),
                              array(std::move(merged.deleted)));
      },
      nb::arg("layers"), nb::arg("factors"), nb::arg("low"), nb::arg("high"), nb::arg("keep_deleted"),
      "As `merge_frozen`, for layers of one small format: keys and records of full rows, of short rows, deleted keys.");

  m.def(
      "pack_rows",
      [](const std::string& format_name, const Weights& weights, const Weights& factors, size_t width) {
        const RowFormat format = row_format(format_name);
        need(width <= size_t{1} << 20 && factors.size() == weights.size() * width, "array shapes do not match");
        std::vector<uint8_t> records(weights.size() * record_bytes(format, width));
        size_t packed = 0;
        {
          const nb::gil_scoped_release nogil;
          packed = pack_rows(format, weights.data(), factors.data(), weights.size(), width, records.data());
        }
        return nb::make_tuple(array(std::move(records), record_bytes(format, width)), packed);
      },
      nb::arg("format"), nb::arg("weights"), nb::arg("factors"), nb::arg("width"),
      "Return the records of rows, and how many could be packed before the first number that the format cannot hold.");

  m.def(
      "unpack_rows",
      [](const std::string& format_name, const Records& records, const Array<float, 2>& out) {
        const RowFormat format = row_format(format_name);
        need(out.shape(1) >= 1 && out.shape(0) == records.shape(0) &&
                 records.shape(1) == record_bytes(format, out.shape(1) - 1),
             "array shapes do not match");
        const nb::gil_scoped_release nogil;
        for (size_t i = 0; i < out.shape(0); ++i)
          unpack(format, records.data() + i * records.shape(1), out.shape(1) - 1, out.data() + i * out.shape(1));
      },
      nb::arg("format"), nb::arg("records"), nb::arg("out").noconvert(),
      "Write embed_w and embedx of every record to `out`.");

  m.def(
      "round_rows",
      [](const std::string& format_name, const Array<float, 2>& rows) {
        const RowFormat format = row_format(format_name);
        need(rows.shape(1) >= 1, "array shapes do not match");
        const nb::gil_scoped_release nogil;
        const size_t factors = rows.shape(1) - 1;
        std::vector<uint8_t> record(record_bytes(format, factors));
        for (size_t i = 0; i < rows.shape(0); ++i) {
          float* row = rows.data() + i * rows.shape(1);
          if (!pack(format, row[0], row + 1, factors, record.data())) return i;
          unpack(format, record.data(), factors, row);
        }
        return rows.shape(0);
      },
      nb::arg("format"), nb::arg("rows").noconvert(),
      "Round embed_w and embedx in place to what a format holds. Return how many rows could be rounded.");
}

}  // namespace clickfleet
