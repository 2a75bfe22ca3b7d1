#include "key_set.h"

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {

void bind_key_set(nb::module_& m) {
  nb::class_<KeySet>(m, "KeySet", "A set of keys. Not thread-safe.")
      .def(nb::init<>())
      .def("__len__", &KeySet::size)
      .def(
          "add",
          [](KeySet& set, const Array<const uint64_t>& keys) {
            const nb::gil_scoped_release nogil;
            set.add(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert())
      .def(
          "insert",
          [](KeySet& set, const Array<const uint64_t>& keys, const Array<uint8_t>& out) {
            need(out.size() == keys.size(), "out must have one entry per key");
            const nb::gil_scoped_release nogil;
            set.insert(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def(
          "has",
          [](const KeySet& set, const Array<const uint64_t>& keys, const Array<uint8_t>& out) {
            need(out.size() == keys.size(), "out must have one entry per key");
            const nb::gil_scoped_release nogil;
            set.has(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def(
          "copy",
          [](const KeySet& set, const Array<uint64_t>& out) {
            need(out.size() == set.size(), "out must have one entry per key");
            const nb::gil_scoped_release nogil;
            set.copy(out.data());
          },
          nb::arg("out").noconvert());
}

}  // namespace clickfleet
