#include "print.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A column and the arrays it points to.
struct Column {
  PrintColumn column;
  size_t rows = 0;
  std::vector<nb::object> held;

  template <class T>
  const T* hold(const nb::object& object, size_t& size) {
    Array<T> array;  // no conversion: a converted copy would not outlive this call
    if (!nb::try_cast(object, array, false))
      throw std::invalid_argument("arrays must be contiguous and have the expected type");
    held.push_back(object);
    size = array.size();
    return array.data();
  }
};

size_t set_values(Column& c, const nb::object& values, const nb::object& ends) {
  size_t size = 0;
  if (!ends.is_none()) {
    c.column.kind = PrintColumn::Kind::text;
    size_t bytes = 0, count = 0;
    c.column.values = c.hold<uint8_t>(values, bytes);
    c.column.ends = c.hold<int32_t>(ends, count);
    if (count == 0) throw std::invalid_argument("ends must have one more entry than there are texts");
    for (size_t i = 1; i < count; ++i)
      if (c.column.ends[i] < c.column.ends[i - 1]) throw std::invalid_argument("ends must not decrease");
    if (c.column.ends[0] < 0 || static_cast<size_t>(c.column.ends[count - 1]) > bytes)
      throw std::invalid_argument("ends point outside the bytes");
    return count - 1;
  }
  const nb::dlpack::dtype type = nb::cast<nb::ndarray<nb::ro, nb::device::cpu>>(values).dtype();
  if (type == nb::dtype<int64_t>()) {
    c.column.kind = PrintColumn::Kind::int64;
    c.column.values = c.hold<int64_t>(values, size);
  } else if (type == nb::dtype<uint64_t>()) {
    c.column.kind = PrintColumn::Kind::uint64;
    c.column.values = c.hold<uint64_t>(values, size);
  } else if (type == nb::dtype<float>()) {
    c.column.kind = PrintColumn::Kind::float32;
    c.column.values = c.hold<float>(values, size);
  } else if (type == nb::dtype<double>()) {
    c.column.kind = PrintColumn::Kind::float64;
    c.column.values = c.hold<double>(values, size);
  } else {
    throw std::invalid_argument("values must be int64, uint64, float32, float64, or bytes with ends");
  }
  return size;
}

}  // namespace

void bind_print(nb::module_& m) {
  nb::class_<Column>(m, "PrintColumn", "One column to print, and the text around its values.")
      .def(
          "__init__",
          [](Column* self, const nb::object& values, const nb::object& ends, const nb::object& starts,
             const nb::object& present, const nb::object& weights, std::string before, std::string prefix,
             std::string suffix, std::string absent, std::string between, bool skip_absent, bool bare, int digits,
             bool counted) {
            Column made;
            PrintColumn& c = made.column;
            const size_t count = set_values(made, values, ends);
            made.rows = count;
            size_t size = 0;
            if (!starts.is_none()) {
              c.starts = made.hold<int64_t>(starts, size);
              if (size == 0) throw std::invalid_argument("starts must have one more entry than there are rows");
              made.rows = size - 1;
              for (size_t i = 1; i < size; ++i)
                if (c.starts[i] < c.starts[i - 1]) throw std::invalid_argument("starts must not decrease");
              if (c.starts[0] < 0 || static_cast<size_t>(c.starts[size - 1]) > count)
                throw std::invalid_argument("starts point outside the values");
            }
            if (!present.is_none()) {
              c.present = made.hold<uint8_t>(present, size);
              if (size != made.rows) throw std::invalid_argument("present must have one entry per row");
            }
            if (!weights.is_none()) {
              c.weights = made.hold<float>(weights, size);
              if (size != count) throw std::invalid_argument("weights must have one entry per value");
            }
            c.before = std::move(before);
            c.prefix = std::move(prefix);
            c.suffix = std::move(suffix);
            c.absent = std::move(absent);
            c.between = std::move(between);
            c.skip_absent = skip_absent;
            c.bare = bare;
            c.digits =
                digits < 0 || digits > 17 ? throw std::invalid_argument("digits must be between 0 and 17") : digits;
            c.counted = counted;
            new (self) Column(std::move(made));
          },
          "values"_a, nb::kw_only(), "ends"_a = nb::none(), "starts"_a = nb::none(), "present"_a = nb::none(),
          "weights"_a = nb::none(), "before"_a = "", "prefix"_a = "", "suffix"_a = "", "absent"_a = "",
          "between"_a = "", "skip_absent"_a = false, "bare"_a = false, "digits"_a = 0, "counted"_a = false)
      .def_ro("rows", &Column::rows, "The number of rows of this column.");
  m.def(
      "print_rows",
      [](const nb::list& columns, const std::string& separator) {
        std::vector<PrintColumn> list;
        size_t rows = 0;
        for (nb::handle item : columns) {
          const auto& column = nb::cast<const Column&>(item);
          if (!list.empty() && column.rows != rows)
            throw std::invalid_argument("columns have different numbers of rows");
          rows = column.rows;
          list.push_back(column.column);
        }
        if (separator.size() != 1) throw std::invalid_argument("separator must be one character");
        std::string out;
        {
          nb::gil_scoped_release nogil;
          out.reserve(rows * list.size() * 8);
          print_rows(list, rows, separator[0], out);
        }
        return nb::bytes(out.data(), out.size());
      },
      "columns"_a, "separator"_a, "Return the rows as lines of text.");
}

}  // namespace clickfleet
