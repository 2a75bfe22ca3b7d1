#include "spread.h"

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using Move = void (*)(const uint32_t*, size_t, const float*, size_t, float*);

template <Move move>
void moving(const Array<const uint32_t>& where, const Array<const float, 2>& rows, const Array<float, 2>& out) {
  constexpr bool gathers = move == &take_rows;  // `where` points into rows; otherwise into out
  const size_t in_order = gathers ? out.shape(0) : rows.shape(0), pointed_at = gathers ? rows.shape(0) : out.shape(0);
  need(rows.shape(1) == out.shape(1) && where.size() <= in_order, "the arrays do not fit each other");
  need(below(where.data(), where.size(), pointed_at), "an index points outside the rows");
  const nb::gil_scoped_release nogil;
  move(where.data(), where.size(), rows.data(), rows.shape(1), out.data());
}

}  // namespace

void bind_spread(nb::module_& m) {
  m.def(
      "split",
      [](const Array<const uint64_t>& keys, const Array<const uint16_t>& owner, const Array<uint64_t>& sorted,
         const Array<uint32_t>& order, const Array<int64_t>& starts) {
        if (owner.size() != kVirtualShards || sorted.size() < keys.size() || order.size() < keys.size() ||
            keys.size() > UINT32_MAX)
          throw nb::value_error("every virtual shard has an owner, and the arrays hold as many numbers as keys");
        need(starts.size() > 0 && below(owner.data(), owner.size(), starts.size() - 1),
             "an owner is not one of the shards");
        const nb::gil_scoped_release nogil;
        split(keys.data(), keys.size(), owner.data(), starts.size() - 1, sorted.data(), order.data(), starts.data());
      },
      "keys"_a, "owner"_a, nb::arg("sorted").noconvert(), nb::arg("order").noconvert(), nb::arg("starts").noconvert(),
      "Keys sorted by the shard that owns them, where they came from, and where each shard's begin.");
  m.def(
      "pack_rows",
      [](const Array<const uint32_t>& order, const Array<const uint64_t>& keys, const Array<const float, 2>& grads,
         const Array<const float>& show, const Array<const float>& click, const Array<const uint16_t>& slots,
         const Array<uint8_t>& out) {
        const size_t n = order.size(), width = grads.shape(1);
        if (keys.size() != n || out.size() != n * (8 + 4 * width + 4 + 4 + 2))
          throw nb::value_error("a key for each row, and room for all of them");
        need(show.size() == grads.shape(0) && click.size() == grads.shape(0) && slots.size() == grads.shape(0) &&
                 below(order.data(), n, grads.shape(0)),
             "an index points outside the rows");
        const nb::gil_scoped_release nogil;
        pack_rows(order.data(), n, keys.data(), grads.data(), width, show.data(), click.data(), slots.data(),
                  out.data());
      },
      "order"_a, "keys"_a, "grads"_a, "show"_a, "click"_a, "slots"_a, nb::arg("out").noconvert(),
      "The rows of a push for one shard, as a message has them.");
  m.def("take_rows", &moving<take_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[i] = rows[where[i]]");
  m.def("put_rows", &moving<put_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] = rows[i]");
  m.def("add_rows", &moving<add_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] += rows[i]");
}

}  // namespace clickfleet
