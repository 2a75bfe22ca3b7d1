#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind.h"
#include "parse/check.h"
#include "parse/columnar.h"
#include "parse/delimited.h"
#include "parse/slotted.h"
#include "parse/weighted.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using namespace parse;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using ListArrays = std::tuple<In<uint64_t>, std::optional<In<int32_t>>, std::optional<In<int64_t>>,
                              std::optional<In<int64_t>>, std::optional<In<float>>>;

template <class T>
nb::object array(Column<T>& column, bool wanted) {
  if (!wanted) return nb::none();
  const size_t n = column.size;
  T* const data = column.release();
  nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

// (columns by name, rows, lines, bad lines, [(line, offset, length, value, value_length, field, why, detail)])
nb::tuple hand_over(Rows& rows, const Layout& layout) {
  nb::dict columns;
  columns["labels"] = array(rows.labels, layout.label);
  columns["shows"] = array(rows.shows, layout.show);
  columns["clicks"] = array(rows.clicks, layout.click);
  columns["weights"] = array(rows.weights, layout.weight);
  columns["times"] = array(rows.times, layout.time);
  columns["groups"] = array(rows.groups, layout.group);
  columns["dense"] = array(rows.dense, true);
  columns["keys"] = array(rows.keys, true);
  columns["offsets"] = array(rows.offsets, !rows.one_each);
  columns["values"] = array(rows.values, layout.values);
  nb::list bad;
  for (const Bad& b : rows.bad)
    bad.append(nb::make_tuple(b.line, b.offset, b.length, b.value, b.value_length, b.field, static_cast<int>(b.why),
                              b.detail));
  return nb::make_tuple(columns, rows.rows, rows.lines, rows.bad_lines, bad);
}

template <class Plan>
nb::tuple parse_block(const Plan& plan, const In<uint8_t>& block, OnBad on_bad) {
  Rows rows;
  {
    nb::gil_scoped_release nogil;
    rows = plan.parse({reinterpret_cast<const char*>(block.data()), block.size()}, on_bad);
  }
  return hand_over(rows, plan.layout);
}

using KeysOut = nb::ndarray<uint64_t, nb::ndim<2>, nb::device::cpu>;  // [rows, 1], with any row stride
using DenseOut = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

template <class Array>
size_t checked_stride(const Array& out, size_t rows) {
  if (out.shape(0) != rows || out.shape(1) != 1 || (rows > 1 && out.stride(0) < 1))
    throw nb::value_error("out must be [n, 1] for n values");
  return static_cast<size_t>(out.stride(0));
}

template <class Offset>
size_t fill_text_keys(const Layout& self, size_t slot, const In<Offset>& ends, const In<uint8_t>& bytes, KeysOut out) {
  if (ends.size() == 0) throw nb::value_error("ends must have one more entry than there are values");
  const size_t n = ends.size() - 1, stride = checked_stride(out, n);
  if (slot >= self.slots.size() || !ascending(ends.data(), ends.size(), bytes.size()))
    throw nb::value_error("unknown slot, or offsets that decrease or point outside the text");
  nb::gil_scoped_release nogil;
  return text_keys(self, slot, ends.data(), n, reinterpret_cast<const char*>(bytes.data()), out.data(), stride);
}

template <class Offset>
size_t fill_text_times(const In<Offset>& ends, const In<uint8_t>& bytes,
                       nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  if (ends.size() == 0 || out.size() != ends.size() - 1 || !ascending(ends.data(), ends.size(), bytes.size()))
    throw nb::value_error("out has another length than the texts, or offsets decrease or point outside the text");
  nb::gil_scoped_release nogil;
  return text_times(ends.data(), out.size(), reinterpret_cast<const char*>(bytes.data()), out.data());
}

template <class Integer>
size_t fill_integer_keys(const Layout& self, size_t slot, const In<Integer>& values, KeysOut out) {
  const size_t stride = checked_stride(out, values.size());
  if (slot >= self.slots.size()) throw nb::value_error("unknown slot");
  nb::gil_scoped_release nogil;
  return integer_keys(self, slot, values.data(), values.size(), out.data(), stride);
}

}  // namespace

void bind_parse(nb::module_& m) {
  nb::enum_<KeyRule>(m, "KeyRule")
      .value("hash64", KeyRule::hash64)
      .value("py2", KeyRule::py2)
      .value("raw", KeyRule::raw);
  nb::enum_<Scale>(m, "Scale")
      .value("none", Scale::none)
      .value("minmax", Scale::minmax)
      .value("log1p", Scale::log1p)
      .value("standard", Scale::standard);
  nb::enum_<OnBad>(m, "OnBad").value("stop", OnBad::stop).value("some", OnBad::some).value("all", OnBad::all);
  nb::enum_<Role>(m, "Role")
      .value("skip", Role::skip)
      .value("label", Role::label)
      .value("dense", Role::dense)
      .value("slot", Role::slot)
      .value("show", Role::show)
      .value("click", Role::click)
      .value("weight", Role::weight)
      .value("time", Role::time)
      .value("group", Role::group);

  nb::enum_<LabelKind>(m, "LabelKind")
      .value("click", LabelKind::click)
      .value("number", LabelKind::number)
      .value("count", LabelKind::count);

  nb::class_<Layout>(m, "Layout", "The columns that a parser fills, and the rules for filling them.")
      .def(
          "__init__",
          [](Layout* self, KeyRule rule, int64_t modulus) {
            if (modulus < 1) throw nb::value_error("modulus must be at least 1");
            new (self) Layout();
            self->rule = rule;
            self->modulus = modulus;
          },
          "rule"_a, "modulus"_a)
      .def_rw("label", &Layout::label)
      .def_rw("labels", &Layout::labels)
      .def_rw("show", &Layout::show)
      .def_rw("click", &Layout::click)
      .def_rw("weight", &Layout::weight)
      .def_rw("time", &Layout::time)
      .def_rw("group", &Layout::group)
      .def_rw("values", &Layout::values)
      .def_rw("negative", &Layout::negative)
      .def("group_by",
           [](Layout& self, const std::string& name) {
             self.group = true;
             self.group_seed = slot_seed(name.data(), name.size());
           })
      .def(
          "add_dense",
          [](Layout& self, const std::string& name, Scale scale, double a, double b, float missing) {
            self.dense.push_back({name, scale, a, b, missing});
          },
          "name"_a, "scale"_a, "a"_a, "b"_a, "missing"_a)
      .def("add_slot", &Layout::add_slot, "name"_a, "multi"_a, "prefix"_a)
      .def(
          "add_history",
          [](Layout& self, size_t count, size_t max, bool last) {
            need(count >= 1 && count <= self.slots.size() && max >= 1, "a history needs slots and at least one event");
            for (size_t s = self.slots.size() - count; s < self.slots.size(); ++s)
              need(self.slots[s].multi && !self.slots[s].history, "a column of a history is multi-valued");
            self.add_history(count, max, last);
          },
          "count"_a, "max"_a, "last"_a)
      .def("missing_key", [](const Layout& self, size_t slot) { return self.slots.at(slot).missing; })
      .def("text_keys", &fill_text_keys<int32_t>, "slot"_a, "ends"_a.noconvert(), "bytes"_a, "out"_a.noconvert())
      .def("text_keys", &fill_text_keys<int64_t>, "slot"_a, "ends"_a.noconvert(), "bytes"_a, "out"_a.noconvert())
      .def("integer_keys", &fill_integer_keys<int64_t>, "slot"_a, "values"_a.noconvert(), "out"_a.noconvert())
      .def("integer_keys", &fill_integer_keys<uint64_t>, "slot"_a, "values"_a.noconvert(), "out"_a.noconvert())
      .def(
          "group_keys",
          [](const Layout& self, const In<int32_t>& ends, const In<uint8_t>& bytes, KeysOut out) {
            need(ascending(ends.data(), ends.size(), bytes.size()), "offsets decrease or point outside the text");
            const size_t n = ends.size() - 1, stride = checked_stride(out, n);
            for (size_t i = 0; i < n; ++i)
              out.data()[i * stride] =
                  hash64(self.group_seed, reinterpret_cast<const char*>(bytes.data()) + ends.data()[i],
                         static_cast<size_t>(ends.data()[i + 1] - ends.data()[i]));
          },
          "ends"_a, "bytes"_a, "out"_a.noconvert())
      .def(
          "dense_values",
          [](const Layout& self, size_t column, const In<double>& values, DenseOut out) {
            const size_t stride = checked_stride(out, values.size());
            if (column >= self.dense.size()) throw nb::value_error("unknown dense column");
            nb::gil_scoped_release nogil;
            return dense_values(self, column, values.data(), values.size(), out.data(), stride);
          },
          "column"_a, "values"_a, "out"_a.noconvert())
      .def(
          "bucket_keys",
          [](const Layout& self, const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& dense,
             nb::ndarray<uint64_t, nb::ndim<2>, nb::device::cpu> out, size_t bucket) {
            const size_t n = dense.shape(0), width = dense.shape(1), stride = checked_stride(out, n);
            const Bucket& b = self.buckets.at(bucket);
            need(static_cast<size_t>(b.column) < width, "unknown dense column");
            for (size_t i = 0; i < n; ++i)
              out.data()[i * stride] = self.bucket_key(b, dense.data()[i * width + static_cast<size_t>(b.column)]);
          },
          "dense"_a.noconvert(), "out"_a.noconvert(), "bucket"_a)
      .def(
          "add_bucket",
          [](Layout& self, int slot, int column, double low, double high, int64_t buckets,
             std::vector<double> boundaries, uint64_t offset) {
            need(slot >= 0 && static_cast<size_t>(slot) < self.slots.size(), "unknown slot");
            need(column >= 0 && static_cast<size_t>(column) < self.dense.size(), "unknown dense column");
            Bucket added{slot, column, low, high, buckets, std::move(boundaries), offset};
            check(added);
            self.buckets.push_back(std::move(added));
          },
          "slot"_a, "column"_a, "low"_a, "high"_a, "buckets"_a, "boundaries"_a, "offset"_a);

  m.def("text_times", &fill_text_times<int32_t>, "ends"_a.noconvert(), "bytes"_a, "out"_a.noconvert(),
        "Write the times in texts to `out`; return the index of the first text that is not a time.");
  m.def("text_times", &fill_text_times<int64_t>, "ends"_a.noconvert(), "bytes"_a, "out"_a.noconvert());
  m.def(
      "weave",
      [](const std::vector<std::pair<In<uint64_t>, std::optional<In<int32_t>>>>& columns,
         nb::ndarray<uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
        const size_t rows = out.shape(0);
        std::vector<KeyColumn> plain;
        for (const auto& [keys, uses] : columns) {
          if ((uses ? uses->size() : keys.size()) != rows || (rows > 0 && keys.size() == 0))
            throw nb::value_error("columns have different lengths");
          plain.push_back({keys.data(), keys.size(), uses ? uses->data() : nullptr});
        }
        if (plain.size() != out.shape(1)) throw nb::value_error("out has a different number of columns");
        nb::gil_scoped_release nogil;
        if (!weave(plain, rows, out.data())) throw std::invalid_argument("an index points outside its dictionary");
      },
      "columns"_a, "out"_a.noconvert(),
      "Interleave columns into `out`; each is (keys, the index of every row's key or None).");

  m.def(
      "weave_lists",
      [](const std::vector<ListArrays>& columns, size_t rows) {
        std::vector<ListColumn> plain;
        for (const auto& [keys, uses, starts, counts, values] : columns) {
          const size_t entries = uses ? uses->size() : keys.size();
          need(starts.has_value() == counts.has_value() && (!starts || starts->size() == rows) &&
                   (!counts || counts->size() == rows) && (!values || values->size() == entries),
               "columns have different lengths");
          plain.push_back({keys.data(), keys.size(), uses ? uses->data() : nullptr, entries,
                           starts ? starts->data() : nullptr, counts ? counts->data() : nullptr,
                           values ? values->data() : nullptr});
        }
        need(columns.empty() || rows < (size_t{1} << 40) / columns.size(), "too many rows");
        const bool valued = std::any_of(columns.begin(), columns.end(),
                                        [](const ListArrays& column) { return std::get<4>(column).has_value(); });
        Column<int64_t> offsets;
        Column<uint64_t> keys;
        Column<float> values;
        {
          nb::gil_scoped_release nogil;
          offsets.size = rows * columns.size() + 1;
          offsets.reserve(offsets.size);
          if (!list_offsets(plain, rows, offsets.data()))
            throw std::invalid_argument("a row points outside of its entries");
          keys.size = static_cast<size_t>(offsets.data()[offsets.size - 1]);
          keys.reserve(keys.size + 1);
          values.size = valued ? keys.size : 0;
          values.reserve(values.size + 1);
          if (!weave_lists(plain, rows, keys.data(), valued ? values.data() : nullptr))
            throw std::invalid_argument("an index points outside its dictionary");
        }
        return nb::make_tuple(array(keys, true), array(offsets, true), array(values, valued));
      },
      "columns"_a, "rows"_a,
      "Interleave columns with several entries per row: (keys, the key of every entry or None, the first entry of "
      "every "
      "row or None, their number or None, the value of every entry or None). Return keys, offsets and values.");

  nb::class_<Delimited>(m, "Delimited", "Parser for lines of fields between separators.")
      .def(
          "__init__",
          [](Delimited* self, const Layout& layout, const std::vector<std::vector<std::pair<Role, int>>>& columns,
             char separator, char list_separator, bool quotes, bool missing_words, bool blank_is_missing) {
            Delimited plan{layout, separator, list_separator, quotes, {}, {}, missing_words, blank_is_missing};
            for (const auto& uses : columns) {
              for (size_t i = 1; i < uses.size(); ++i)
                plan.further_uses.push_back({plan.fields.size(), {uses[i].first, uses[i].second}});
              plan.fields.push_back(uses.empty() ? Field{Role::skip, 0} : Field{uses[0].first, uses[0].second});
            }
            check(plan);
            new (self) Delimited(std::move(plan));
          },
          "layout"_a, "columns"_a, "separator"_a, "list_separator"_a, "quotes"_a, "missing_words"_a = false,
          "blank_is_missing"_a = false)
      .def("parse", &parse_block<Delimited>, "block"_a, "on_bad"_a);

  nb::enum_<Slotted::Token>(m, "Token")
      .value("name_value", Slotted::Token::name_value)
      .value("value_name", Slotted::Token::value_name)
      .value("name_key_value", Slotted::Token::name_key_value);
  nb::class_<Slotted>(m, "Slotted", "Parser for lines of tokens that name their slot.")
      .def(
          "__init__",
          [](Slotted* self, const Layout& layout, Slotted::Token token, const std::vector<DenseGroup>& groups,
             const std::vector<std::tuple<std::string, Role, int>>& names) {
            Slotted plan;
            plan.layout = layout;
            plan.token = token;
            plan.groups = groups;
            for (const auto& [name, role, index] : names) plan.name(name, {role, index});
            check(plan);
            new (self) Slotted(std::move(plan));
          },
          "layout"_a, "token"_a, "groups"_a, "names"_a)
      .def("parse", &parse_block<Slotted>, "block"_a, "on_bad"_a);

  nb::enum_<Weighted::Grammar>(m, "Grammar")
      .value("bag", Weighted::Grammar::bag)
      .value("positions", Weighted::Grammar::positions)
      .value("spaces", Weighted::Grammar::spaces);
  nb::class_<Weighted>(m, "Weighted", "Parser for lines of features that may have a value.")
      .def(
          "__init__",
          [](Weighted* self, const Layout& layout, Weighted::Grammar grammar,
             const std::vector<std::tuple<std::string, Role, int>>& names) {
            Weighted plan{layout, grammar, {}};
            for (const auto& [name, role, index] : names) plan.names[name] = {role, index};
            check(plan);
            new (self) Weighted(std::move(plan));
          },
          "layout"_a, "grammar"_a, "names"_a)
      .def("parse", &parse_block<Weighted>, "block"_a, "on_bad"_a);

  nb::class_<MultiSlot>(m, "MultiSlot", "Parser for lines of counted blocks in a fixed order.")
      .def(
          "__init__",
          [](MultiSlot* self, const Layout& layout, const std::vector<DenseGroup>& groups,
             const std::vector<std::pair<std::vector<std::pair<Role, int>>, int>>& steps) {
            MultiSlot plan{layout, groups, {}};
            for (const auto& [uses, width] : steps) {
              plan.steps.push_back({{}, width});
              for (const auto& [role, index] : uses) plan.steps.back().uses.push_back({role, index});
            }
            check(plan);
            new (self) MultiSlot(std::move(plan));
          },
          "layout"_a, "groups"_a, "steps"_a)
      .def("parse", &parse_block<MultiSlot>, "block"_a, "on_bad"_a);
}

}  // namespace clickfleet
