#include "touched.h"

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {

void bind_touched(nb::module_& m) {
  nb::class_<Touched>(m, "Touched", "The rows that were trained since a shipment. Not thread-safe.")
      .def(nb::init<size_t>(), nb::arg("width"))
      .def("__len__", &Touched::size)
      .def(
          "add",
          [](Touched& touched, const Array<const uint64_t>& keys, const Array<const float, 2>& rows,
             const Array<const float>& show, const Array<const float>& click, const Array<const uint16_t>& slots) {
            const size_t n = keys.size();
            need(rows.shape(0) == n && rows.shape(1) == touched.width() && show.size() == n && click.size() == n &&
                     slots.size() == n && touched.size() + n < UINT32_MAX,
                 "the columns do not match the keys");
            const nb::gil_scoped_release nogil;
            touched.add(keys.data(), n, rows.data(), show.data(), click.data(), slots.data());
          },
          nb::arg("keys").noconvert(), nb::arg("rows").noconvert(), nb::arg("show").noconvert(),
          nb::arg("click").noconvert(), nb::arg("slots").noconvert())
      .def(
          "rebase",
          [](Touched& touched, const Array<const uint64_t>& keys, const Array<float, 2>& rows,
             const Array<uint8_t>& out) {
            need(rows.shape(0) == keys.size() && rows.shape(1) == touched.width() && out.size() == keys.size(),
                 "rows and out must have one entry per key");
            const nb::gil_scoped_release nogil;
            touched.rebase(keys.data(), keys.size(), rows.data(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("rows").noconvert(), nb::arg("out").noconvert())
      .def(
          "copy_keys",
          [](const Touched& touched, const Array<uint64_t>& out) {
            need(out.size() == touched.size(), "out must have one entry per key");
            std::copy_n(touched.keys(), touched.size(), out.data());
          },
          nb::arg("out").noconvert())
      .def(
          "take",
          [](Touched& touched, const Array<float, 2>& rows, const Array<float>& show, const Array<float>& click,
             const Array<uint16_t>& slots) {
            const size_t n = touched.size();
            need(rows.shape(0) == n && rows.shape(1) == touched.width() && show.size() == n && click.size() == n &&
                     slots.size() == n,
                 "the columns do not match the keys");
            const nb::gil_scoped_release nogil;
            touched.take(rows.data(), show.data(), click.data(), slots.data());
          },
          nb::arg("rows").noconvert(), nb::arg("show").noconvert(), nb::arg("click").noconvert(),
          nb::arg("slots").noconvert());
}

}  // namespace clickfleet
