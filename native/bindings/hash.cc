#include "hash.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <charconv>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using Keys = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_hash(nb::module_& m) {
  m.attr("VIRTUAL_SHARDS") = kVirtualShards;
  m.def(
      "mix64",
      [](const Keys& keys, Out out) {
        need(out.size() == keys.size(), "out must have one entry per key");
        nb::gil_scoped_release nogil;
        for (size_t i = 0; i < keys.size(); ++i) out.data()[i] = mix64(keys.data()[i]);
      },
      "keys"_a, "out"_a.noconvert(), "Write mix64 of every key to `out`.");
  m.def(
      "hash64",
      [](const std::string& slot, const nb::bytes& value) {
        return hash64(slot_seed(slot.data(), slot.size()), value.c_str(), value.size());
      },
      "slot"_a, "value"_a, "Return the key of a value in a slot.");
  m.def(
      "py2_hash",
      [](const nb::bytes& text) {
        Py2Hash h;
        h.add(text.c_str(), text.size());
        return h.value();
      },
      "text"_a, "Return the string hash of 64-bit CPython 2.");
}

}  // namespace clickfleet
