#include "cut.h"

#include <nanobind/stl/string.h>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

// Hands the vector's memory to NumPy without a copy.
template <class T>
nb::object array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

nb::object next(Cut& cut) {
  Cut::Batch batch;
  bool more = false;
  {
    const nb::gil_scoped_release nogil;
    more = cut.next(batch);
  }
  if (!more) return nb::none();
  nb::dict out;
  out["file"] = batch.file;
  out["kind"] = static_cast<int>(batch.kind);
  out["full"] = batch.full;
  out["key"] = array(std::move(batch.key));
  out["slot"] = array(std::move(batch.slot));
  out["embed_w"] = array(std::move(batch.embed_w));
  out["embedx"] = array(std::move(batch.embedx));
  if (cut.kind() != Cut::snapshot) return out;
  out["show"] = array(std::move(batch.show));
  out["click"] = array(std::move(batch.click));
  out["unseen_days"] = array(std::move(batch.unseen_days));
  out["delta_score"] = array(std::move(batch.delta_score));
  out["published"] = array(std::move(batch.published));
  out["embed_state"] = array(std::move(batch.embed_state));
  out["embedx_state"] = array(std::move(batch.embedx_state));
  return out;
}

}  // namespace

void bind_cut(nb::module_& m) {
  nb::class_<Cut>(m, "Cut", "A consistent cut through a table, read while pushes continue.")
      .def(
          "__init__",
          [](Cut* self, Table& table, const std::string& kind, int files) {
            need(kind == "snapshot" || kind == "base" || kind == "changes" || kind == "taken",
                 "kind must be snapshot, base, changes or taken");
            need(files >= 1 && files <= 32 && (files & (files - 1)) == 0, "files must be a power of two, at most 32");
            const nb::gil_scoped_release nogil;
            if (kind == "taken")
              new (self) Cut(table);
            else
              new (self) Cut(table,
                             kind == "snapshot" ? Cut::snapshot
                             : kind == "base"   ? Cut::base
                                                : Cut::changes,
                             files);
          },
          nb::arg("table"), nb::arg("kind"), nb::arg("files"), nb::keep_alive<1, 2>())
      .def("next", &next, "Return the next rows as a dictionary of columns, or None after the last.")
      .def("changed_keys", [](const Cut& cut) { return array(std::vector<uint64_t>(cut.changed_keys())); })
      .def("deleted_keys", [](const Cut& cut) { return array(std::vector<uint64_t>(cut.deleted_keys())); })
      .def("memory", [](const Cut& cut) { return array(std::vector<uint64_t>(cut.memory())); })
      .def_prop_ro("tracking", &Cut::tracking)
      .def("commit", &Cut::commit, nb::call_guard<nb::gil_scoped_release>())
      .def("abort", &Cut::abort, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Cut::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace clickfleet
