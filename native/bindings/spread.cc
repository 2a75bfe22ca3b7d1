#include "spread.h"

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using Move = void (*)(const uint32_t*, size_t, const float*, size_t, float*);

template <Move move>
void moving(const Array<const uint32_t>& where, const Array<const float, 2>& rows, const Array<float, 2>& out) {
  const nb::gil_scoped_release nogil;
  move(where.data(), where.size(), rows.data(), rows.shape(1), out.data());
}

}  // namespace

void bind_spread(nb::module_& m) {
  m.def(
      "split",
      [](const Array<const uint64_t>& keys, const Array<const uint16_t>& owner, const Array<uint64_t>& sorted,
         const Array<uint32_t>& order, const Array<int64_t>& starts) {
        if (owner.size() != kVirtualShards || sorted.size() < keys.size() || order.size() < keys.size())
          throw nb::value_error("every virtual shard has an owner, and the arrays hold as many numbers as keys");
        const nb::gil_scoped_release nogil;
        split(keys.data(), keys.size(), owner.data(), starts.size() - 1, sorted.data(), order.data(), starts.data());
      },
      "keys"_a, "owner"_a, nb::arg("sorted").noconvert(), nb::arg("order").noconvert(), nb::arg("starts").noconvert(),
      "Keys sorted by the shard that owns them, where they came from, and where each shard's begin.");
  m.def("take_rows", &moving<take_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[i] = rows[where[i]]");
  m.def("put_rows", &moving<put_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] = rows[i]");
  m.def("add_rows", &moving<add_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] += rows[i]");
}

}  // namespace clickfleet
