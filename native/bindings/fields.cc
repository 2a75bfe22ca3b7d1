// Converts the features of a request, after JSON or a tensor was decoded, to keys and dense values. Files are read with
// the same layout.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "bind.h"
#include "parse/layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using namespace parse;

constexpr size_t kMostRows = size_t{1} << 31;

// One value of a request, of any Python type.
struct Cell {
  enum Kind { missing, text, integer, natural, number, other } kind = missing;
  std::string_view characters;
  int64_t whole = 0;
  uint64_t big = 0;
  double real = 0;
};

Cell cell(PyObject* value) {
  Cell c;
  if (value == Py_None) return c;
  c.kind = Cell::other;
  if (PyUnicode_Check(value)) {
    Py_ssize_t n;
    const char* p = PyUnicode_AsUTF8AndSize(value, &n);
    if (p == nullptr) {  // a lone surrogate has no bytes
      PyErr_Clear();
    } else {
      c.kind = Cell::text;
      c.characters = {p, static_cast<size_t>(n)};
    }
  } else if (PyLong_Check(value)) {  // True and False count as 1 and 0
    int overflow;
    c.whole = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) {
      c.kind = Cell::integer;
      c.real = static_cast<double>(c.whole);
    } else if (overflow > 0) {
      c.big = PyLong_AsUnsignedLongLong(value);
      if (PyErr_Occurred() == nullptr) {
        c.kind = Cell::natural;
        c.real = static_cast<double>(c.big);
      }
      PyErr_Clear();
    }
  } else if (PyFloat_Check(value)) {
    c.kind = Cell::number;
    c.real = PyFloat_AS_DOUBLE(value);
  } else if (PyBytes_Check(value)) {
    c.kind = Cell::text;
    c.characters = {PyBytes_AS_STRING(value), static_cast<size_t>(PyBytes_GET_SIZE(value))};
  }
  return c;
}

// A name that a request may use. A dense column and slots may share one name.
struct Name {
  std::string text;
  nb::object key;     // interned, like the keys of Python's dictionaries
  size_t index;       // index among all names
  bool first = true;  // whether no earlier field has the same name
};

[[noreturn]] void refuse(size_t row, const Name& name, const std::string& why) {
  throw std::invalid_argument("row " + std::to_string(row) + ": " + name.text + ": " + why);
}

// A row given as a mapping.
struct MappingRow {
  PyObject* row;
  size_t number;
  Py_ssize_t used = 0;

  // Calls value(cell, weight) for every value the row has under a name. A history is a list, never a single value.
  template <class Value>
  void each(const Name& name, const Value& value, bool history = false) {
    PyObject* found = PyDict_GetItemWithError(row, name.key.ptr());
    if (found == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return;
    }
    if (name.first) ++used;
    if (PyList_Check(found)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); ++i) value(cell(PyList_GET_ITEM(found, i)), 1.0F);
    } else if (PyDict_Check(found)) {
      PyObject *key, *weight;
      Py_ssize_t at = 0;
      while (PyDict_Next(found, &at, &key, &weight) != 0) {
        const Cell w = cell(weight);
        if (w.kind == Cell::text || w.kind == Cell::other || w.kind == Cell::missing)
          refuse(number, name, "the weight of a value must be a number");
        const auto narrow = static_cast<float>(w.real);
        if (!std::isfinite(narrow)) refuse(number, name, "the weight of a value must be a finite number");
        value(cell(key), narrow);
      }
    } else if (found != Py_None) {
      if (history) refuse(number, name, "expected a list, with one value per event");
      value(cell(found), 1.0F);
    }
  }
};

// A column: a list, or an array of numbers or texts, with `width` values per row or as many as `split` says.
struct RequestColumn {
  nb::object memory;
  PyObject* list = nullptr;
  const float* floats = nullptr;
  const double* doubles = nullptr;
  const int64_t* integers = nullptr;
  const uint64_t* naturals = nullptr;
  std::vector<std::string_view> texts;
  size_t size = 0, width = 1;
  bool jagged = false;
  std::vector<std::pair<size_t, size_t>> rows;  // where the values of each row begin and end, if it is jagged

  // Returns whether it has values for exactly n rows: a list may have changed since it was passed.
  bool holds(size_t n) const {
    const size_t now = list == nullptr ? size : static_cast<size_t>(PyList_GET_SIZE(list));
    if (now != size) return false;
    return jagged ? rows.size() == n : width != 0 && size % width == 0 && size / width == n;
  }

  std::pair<size_t, size_t> row(size_t i) const { return jagged ? rows[i] : std::pair(i * width, (i + 1) * width); }

  // Gives every row its number of values: of all values one after another or, if `padded`, of the `width` values of the
  // row.
  void split(const int64_t* lengths, size_t n, bool padded) {
    if (n > kMostRows) throw std::invalid_argument("more than 2^31 rows in one call");
    if (padded && !(width == 0 ? size == 0 : size % width == 0 && size / width == n))
      throw std::invalid_argument("expected lengths of " + std::to_string(width == 0 ? 0 : size / width) +
                                  " rows, not " + std::to_string(n));
    rows.clear();
    rows.reserve(n);
    size_t at = 0;
    for (size_t i = 0; i < n; ++i) {
      const size_t most = padded ? width : size - at;
      if (lengths[i] < 0 || static_cast<uint64_t>(lengths[i]) > most)
        throw std::invalid_argument("the length of row " + std::to_string(i) + " is " + std::to_string(lengths[i]) +
                                    ", but " + (padded ? "a row has " : "there are only ") + std::to_string(most) +
                                    (padded ? " values" : " values left"));
      if (padded) at = i * width;
      rows.emplace_back(at, at + static_cast<size_t>(lengths[i]));
      at = rows.back().second;
    }
    if (!padded && at != size)
      throw std::invalid_argument("the lengths add up to " + std::to_string(at) + ", but there are " +
                                  std::to_string(size) + " values");
    jagged = true;
  }

  Cell at(size_t i) const {
    if (list != nullptr) return cell(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)));
    Cell c;
    if (floats != nullptr || doubles != nullptr) {
      c.kind = Cell::number;
      c.real = floats != nullptr ? static_cast<double>(floats[i]) : doubles[i];
    } else if (integers != nullptr) {
      c.kind = Cell::integer;
      c.whole = integers[i];
      c.real = static_cast<double>(c.whole);
    } else if (naturals != nullptr) {
      c.kind = Cell::natural;
      c.big = naturals[i];
      c.real = static_cast<double>(c.big);
    } else {
      c.kind = Cell::text;
      c.characters = texts[i];
    }
    return c;
  }
};

// A row of columns, in the order of the names.
struct ColumnsRow {
  const std::vector<RequestColumn>& columns;
  size_t number;

  template <class Value>
  void each(const Name& name, const Value& value, bool = false) const {
    const RequestColumn& column = columns[name.index];
    const auto [begin, end] = column.row(number);
    for (size_t i = begin; i < end; ++i) value(column.at(i), 1.0F);
  }
};

struct Out {
  std::vector<float> dense, values;
  std::vector<uint64_t> keys;
  std::vector<int64_t> offsets;
};

class Fields {
 public:
  Fields(const Layout& layout, const std::vector<std::pair<std::string, std::vector<int>>>& dense,
         const std::vector<std::pair<std::string, int>>& slots)
      : layout_(layout) {
    if (layout_.slots.size() != slots.size())
      throw std::invalid_argument("slots must have one name per slot of the layout");
    for (const auto& [name, places] : dense) {
      need(below(places, layout_.dense.size()), "unknown dense column");
      const bool both = std::any_of(slots.begin(), slots.end(),
                                    [&](const auto& slot) { return slot.second < 0 && slot.first == name; });
      dense_.push_back({make(name), places, both});
    }
    for (const auto& [name, bucket] : slots) {
      need(bucket < 0 || below({bucket}, layout_.buckets.size()), "unknown bucket");
      slots_.push_back({bucket < 0 ? make(name) : Name{name, nb::none(), 0}, bucket});
      flat_ = flat_ && !layout_.slots[slots_.size() - 1].multi;
    }
    flat_ = flat_ && !layout_.values;
  }

  nb::tuple rows(const nb::list& given) const {
    const size_t n = given.size();
    Out out = start(n);
    for (size_t i = 0; i < n; ++i) {
      PyObject* row = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyDict_Check(row))
        throw std::invalid_argument("row " + std::to_string(i) + ": expected a mapping from features to values");
      MappingRow mapped{row, i};
      add(mapped, out);
      if (mapped.used != PyDict_GET_SIZE(row)) refuse_unknown(row, i);
    }
    return hand_over(std::move(out));
  }

  nb::tuple columns(const std::vector<RequestColumn>& given, size_t n) const {
    if (given.size() != names_) throw std::invalid_argument("expected one column per name");
    if (n > kMostRows) throw std::invalid_argument("more than 2^31 rows in one call");  // their product must not wrap
    for (const RequestColumn& column : given)
      if (!column.holds(n)) throw std::invalid_argument("columns have different lengths");
    Out out = start(n);
    for (size_t i = 0; i < n; ++i) {
      const ColumnsRow row{given, i};
      add(row, out);
    }
    return hand_over(std::move(out));
  }

 private:
  static bool below(const std::vector<int>& places, size_t end) {
    return std::all_of(places.begin(), places.end(),
                       [end](int place) { return place >= 0 && static_cast<size_t>(place) < end; });
  }

  struct Dense {
    Name name;
    std::vector<int> places;
    bool both;  // a slot has the same name, so text is read as a number, as in files
  };
  struct Slot {
    Name name;
    int bucket;  // index into layout.buckets; -1: the request provides the value
  };

  Name make(const std::string& name) {
    PyObject* text = PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
    if (text == nullptr) throw nb::python_error();
    PyUnicode_InternInPlace(&text);
    nb::object key = nb::steal(text);
    if (known_.contains(key)) return {name, key, nb::cast<size_t>(known_[key]), false};
    known_[key] = names_;
    return {name, key, names_++};
  }

  Out start(size_t n) const {
    Out out;
    out.dense.reserve(n * layout_.dense.size());
    out.keys.reserve(n * layout_.slots.size());
    out.dense.resize(n * layout_.dense.size());
    if (!flat_) out.offsets.push_back(0);
    return out;
  }

  template <class Row>
  void add(Row& row, Out& out) const {
    float* to = out.dense.data() + row.number * layout_.dense.size();
    for (const Dense& field : dense_) {
      size_t at = 0;
      row.each(field.name, [&](const Cell& c, float) {
        if (at == field.places.size()) refuse(row.number, field.name, wanted(field));
        const auto place = static_cast<size_t>(field.places[at++]);
        to[place] = dense_value(layout_.dense[place], c, row.number, field);
      });
      if (at != 0 && at != field.places.size()) refuse(row.number, field.name, wanted(field));
      for (; at < field.places.size(); ++at) {
        const auto place = static_cast<size_t>(field.places[at]);
        to[place] = layout_.dense[place].missing;
      }
    }
    size_t h = 0, events = 0;  // of the history whose columns come next or are being read
    for (size_t s = 0; s < slots_.size(); ++s) {
      const Slot& field = slots_[s];
      const SlotColumn& slot = layout_.slots[s];
      const size_t before = out.keys.size();
      if (field.bucket >= 0) {
        const Bucket& bucket = layout_.buckets[static_cast<size_t>(field.bucket)];
        push(out, layout_.bucket_key(bucket, to[bucket.column]), 1.0F);
      } else {
        const auto add_key = [&](const Cell& c, float weight) {
          if (c.kind == Cell::missing || (slot.multi && c.kind == Cell::text && c.characters.empty())) {
            if (slot.history) push(out, slot.missing, weight);  // an event without a value
            return;
          }
          if (!slot.multi && out.keys.size() > before)
            refuse(row.number, field.name, "expected one value, found several");
          push(out, key(slot, c, row.number, field.name), weight);
        };
        row.each(field.name, add_key, slot.history);
        if (!slot.multi && out.keys.size() == before) push(out, slot.missing, 1.0F);
      }
      if (slot.history) {
        const History& history = layout_.histories[h];
        const size_t found = out.keys.size() - before;
        if (s == history.first) events = found;
        if (found != events)
          refuse(row.number, field.name,
                 "expected " + std::to_string(events) + " values, one per event of " + slots_[history.first].name.text +
                     ", found " + std::to_string(found));
        keep_events(history, before, out);
        h += s + 1 == history.first + history.count ? 1 : 0;
      }
      if (!flat_) out.offsets.push_back(static_cast<int64_t>(out.keys.size()));
    }
  }

  // Drops the events beyond the limit of a history from its column, which starts at `begin`.
  static void keep_events(const History& history, size_t begin, Out& out) {
    const size_t found = out.keys.size() - begin;
    if (found <= history.max) return;
    const auto first = static_cast<std::ptrdiff_t>(begin + (history.last ? 0 : history.max));
    const auto last = first + static_cast<std::ptrdiff_t>(found - history.max);
    out.keys.erase(out.keys.begin() + first, out.keys.begin() + last);
    if (!out.values.empty()) out.values.erase(out.values.begin() + first, out.values.begin() + last);
  }

  void push(Out& out, uint64_t key, float weight) const {
    out.keys.push_back(key);
    if (layout_.values) out.values.push_back(weight);
  }

  static std::string wanted(const Dense& field) {
    const size_t n = field.places.size();
    return n == 1 ? "expected one number" : "expected a list of " + std::to_string(n) + " numbers";
  }

  float dense_value(const DenseColumn& column, const Cell& c, size_t row, const Dense& field) const {
    if (c.kind == Cell::missing || (c.kind == Cell::text && c.characters.empty()) || std::isnan(c.real))
      return column.missing;
    double given = c.real;
    if (c.kind == Cell::text && field.both) {
      if (!to_double(c.characters.data(), c.characters.data() + c.characters.size(), given))
        refuse(row, field.name, "expected an integer, or a number as text");
    } else if (c.kind == Cell::text || c.kind == Cell::other) {
      refuse(row, field.name, "expected a number");
    }
    const auto x = static_cast<float>(layout_.transform(column, given));
    if (!std::isfinite(x)) refuse(row, field.name, "the number is out of range");
    return x;
  }

  uint64_t key(const SlotColumn& slot, const Cell& c, size_t row, const Name& name) const {
    uint64_t out = 0;
    char digits[24];
    std::string_view text = c.characters;
    if (c.kind == Cell::integer || c.kind == Cell::natural) {
      const auto end = c.kind == Cell::integer ? std::to_chars(digits, digits + sizeof digits, c.whole).ptr
                                               : std::to_chars(digits, digits + sizeof digits, c.big).ptr;
      text = {digits, static_cast<size_t>(end - digits)};
    } else if (c.kind != Cell::text) {
      refuse(row, name, "expected text or integers; write a fractional number as text");
    }
    if (!layout_.key(slot, text.data(), text.size(), out))
      refuse(row, name, "expected integers from 0 to 2^64 - 1, because the key rule is raw");
    return out;
  }

  [[noreturn]] void refuse_unknown(PyObject* row, size_t i) const {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    std::string found = "?";
    while (PyDict_Next(row, &at, &key, &value) != 0)
      if (!known_.contains(nb::borrow(key))) found = nb::cast<std::string>(nb::str(nb::borrow(key)));
    throw std::out_of_range("row " + std::to_string(i) + "\n" + found);
  }

  template <class T>
  static nb::object array(std::vector<T>&& values, bool wanted) {
    if (!wanted) return nb::none();
    auto* owned = new std::vector<T>(std::move(values));
    const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
  }

  // Flat arrays: (dense, keys, offsets or None, values or None)
  nb::tuple hand_over(Out&& out) const {
    return nb::make_tuple(array(std::move(out.dense), true), array(std::move(out.keys), true),
                          array(std::move(out.offsets), !flat_), array(std::move(out.values), layout_.values));
  }

  Layout layout_;
  std::vector<Dense> dense_;
  std::vector<Slot> slots_;
  nb::dict known_;  // name -> its index
  size_t names_ = 0;
  bool flat_ = true;
};

template <class T>
RequestColumn numbers(const T* RequestColumn::* member,
                      nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> values, size_t width,
                      nb::object memory) {
  RequestColumn column;
  column.memory = std::move(memory);
  column.*member = values.data();
  column.size = values.size();
  column.width = width;
  return column;
}

// Texts as the protocol packs them: a four-byte little-endian length, then the bytes.
RequestColumn packed_texts(const nb::bytes& packed, size_t width) {
  RequestColumn column;
  column.memory = packed;
  column.width = width;
  const char *p = packed.c_str(), *end = p + packed.size();
  while (p < end) {
    uint32_t n = 0;
    if (end - p < 4) throw std::invalid_argument("packed text is truncated: incomplete length");
    for (int i = 0; i < 4; ++i) n |= static_cast<uint32_t>(static_cast<unsigned char>(p[i])) << (8 * i);
    p += 4;
    if (static_cast<size_t>(end - p) < n)
      throw std::invalid_argument("packed text is truncated: fewer bytes than its length");
    column.texts.emplace_back(p, n);
    p += n;
  }
  column.size = column.texts.size();
  return column;
}

}  // namespace

void bind_fields(nb::module_& m) {
  nb::class_<RequestColumn>(m, "RequestColumn", "One input of a request: a list, numbers, or packed texts.")
      .def_static(
          "of_list",
          [](nb::list values, size_t width) {
            RequestColumn column;
            column.list = values.ptr();
            column.size = values.size();
            column.width = width;
            column.memory = std::move(values);
            return column;
          },
          "values"_a, "width"_a)
      .def_static("of_texts", &packed_texts, "packed"_a, "width"_a)
      .def_static("of_numbers", [](const Array<const float>& v,
                                   size_t width) { return numbers(&RequestColumn::floats, v, width, nb::cast(v)); })
      .def_static("of_numbers", [](const Array<const double>& v,
                                   size_t width) { return numbers(&RequestColumn::doubles, v, width, nb::cast(v)); })
      .def_static("of_numbers", [](const Array<const int64_t>& v,
                                   size_t width) { return numbers(&RequestColumn::integers, v, width, nb::cast(v)); })
      .def_static("of_numbers", [](const Array<const uint64_t>& v,
                                   size_t width) { return numbers(&RequestColumn::naturals, v, width, nb::cast(v)); })
      .def(
          "split",
          [](RequestColumn& self, const Array<const int64_t>& lengths, bool padded) {
            self.split(lengths.data(), lengths.size(), padded);
          },
          "lengths"_a, "padded"_a,
          "Give every row its number of values; if `padded`, the first of the `width` values of the row.")
      .def_ro("size", &RequestColumn::size);

  nb::class_<Fields>(m, "Fields", "Converts the features of requests to keys and dense values.")
      .def(nb::init<const Layout&, const std::vector<std::pair<std::string, std::vector<int>>>&,
                    const std::vector<std::pair<std::string, int>>&>(),
           "layout"_a, "dense"_a, "slots"_a, "Dense names with their columns; slot names with their bucket, or -1.")
      .def("rows", &Fields::rows, "rows"_a,
           "Convert mappings, one per row; features that a row does not name are missing.")
      .def(
          "columns",
          [](const Fields& self, const std::vector<const RequestColumn*>& columns, size_t n) {
            std::vector<RequestColumn> plain;
            plain.reserve(columns.size());
            for (const RequestColumn* column : columns) {
              need(column != nullptr, "None is not a column");
              plain.push_back(*column);
            }
            return self.columns(plain, n);
          },
          "columns"_a, "rows"_a, "Convert columns, one per name, dense names first.");
}

}  // namespace clickfleet
