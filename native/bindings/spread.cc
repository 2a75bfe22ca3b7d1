#include "spread.h"

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clickfleet {
namespace {

using Move = void (*)(const uint32_t*, size_t, const float*, size_t, float*);

template <Move move>
void move_rows(const Array<const uint32_t>& where, const Array<const float, 2>& rows, const Array<float, 2>& out) {
  constexpr bool gathers = move == &take_rows;  // `where` indexes `rows`; otherwise it indexes `out`
  const size_t in_order = gathers ? out.shape(0) : rows.shape(0), pointed_at = gathers ? rows.shape(0) : out.shape(0);
  need(rows.shape(1) == out.shape(1) && where.size() <= in_order, "array shapes do not match");
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
          throw nb::value_error(
              "owner needs one entry per virtual shard; sorted and order need one per key, fewer than 2^32");
        need(starts.size() > 0 && below(owner.data(), owner.size(), starts.size() - 1),
             "owner refers to an unknown shard");
        const nb::gil_scoped_release nogil;
        split(keys.data(), keys.size(), owner.data(), starts.size() - 1, sorted.data(), order.data(), starts.data());
      },
      "keys"_a, "owner"_a, nb::arg("sorted").noconvert(), nb::arg("order").noconvert(), nb::arg("starts").noconvert(),
      "Sort keys by owning shard; also write their original positions and the start of each shard.");
  m.def(
      "pack_rows",
      [](const Array<const uint32_t>& order, const Array<const uint64_t>& keys, const Array<const float, 2>& grads,
         const Array<const float>& show, const Array<const float>& click, const Array<const uint16_t>& slots,
         const Array<uint8_t>& out) {
        const size_t n = order.size(), width = grads.shape(1);
        if (keys.size() != n || out.size() != n * (8 + 4 * width + 4 + 4 + 2))
          throw nb::value_error("keys must have one entry per row, and out must have the size of the message");
        need(show.size() == grads.shape(0) && click.size() == grads.shape(0) && slots.size() == grads.shape(0) &&
                 below(order.data(), n, grads.shape(0)),
             "an index points outside the rows");
        const nb::gil_scoped_release nogil;
        pack_rows(order.data(), n, keys.data(), grads.data(), width, show.data(), click.data(), slots.data(),
                  out.data());
      },
      "order"_a, "keys"_a, "grads"_a, "show"_a, "click"_a, "slots"_a, nb::arg("out").noconvert(),
      "Pack the rows of a push for one shard in the layout of a message.");
  m.def("take_rows", &move_rows<take_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[i] = rows[where[i]]");
  m.def("put_rows", &move_rows<put_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] = rows[i]");
  m.def("add_rows", &move_rows<add_rows>, "where"_a, "rows"_a, nb::arg("out").noconvert(), "out[where[i]] += rows[i]");
}

}  // namespace clickfleet
