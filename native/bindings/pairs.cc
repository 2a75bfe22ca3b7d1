#include "pairs.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "parse/sentences.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

template <class T>
nb::object array(std::vector<T>&& values) {
  auto* const owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

void draw(Pairs& pairs, const Array<const uint64_t>& keys, const Array<const int64_t>& offsets, size_t slots,
          uint64_t seed) {
  const nb::gil_scoped_release nogil;
  pairs.draw(keys.data(), offsets.data(), (offsets.size() - 1) / slots, slots, seed);
}

Bounds bounds(const std::pair<float, float>& given) { return {given.first, given.second}; }

}  // namespace

void bind_pairs(nb::module_& m) {
  m.def(
      "parse_sentences",
      [](const nb::bytes& text, const std::string& slot) {
        Sentences found;
        {
          const nb::gil_scoped_release nogil;
          found = parse_sentences({text.c_str(), text.size()}, slot_seed(slot.data(), slot.size()));
        }
        return nb::make_tuple(array(std::move(found.keys)), array(std::move(found.offsets)));
      },
      nb::arg("text"), nb::arg("slot"), "The keys of the words of whole lines, and offsets for two slots a line.");
  nb::class_<Words>(m, "Words", "A vocabulary: which word a key is, how often it is kept, which words are noise.")
      .def("__init__", [](Words* self, const Array<const uint64_t>& in, const Array<const uint64_t>& out,
                          const Array<const double>& keep, const Array<const double>& noise) {
        if (in.size() == 0 || out.size() != in.size() || keep.size() != in.size() || noise.size() != in.size())
          throw nb::value_error("a vocabulary needs words, and as many of each column");
        new (self) Words(in.data(), out.data(), keep.data(), noise.data(), in.size());
      });
  nb::class_<InPlace>(m, "InPlace", "Rows of a table, trained where they stand.")
      .def(
          "__init__",
          [](InPlace* self, Table& table, const Array<const uint64_t>& keys) {
            new (self) InPlace(table, keys.data(), keys.size());
          },
          nb::keep_alive<1, 2>());
  nb::class_<Pairs>(m, "Pairs", "The pairs of some sentences, drawn afresh for every batch.")
      .def(nb::init<const Words&, uint32_t, uint32_t>(), nb::arg("words"), nb::arg("window"), nb::arg("negatives"),
           nb::keep_alive<1, 2>())
      .def("draw", &draw, nb::arg("keys").noconvert(), nb::arg("offsets").noconvert(), nb::arg("slots"),
           nb::arg("seed"))
      .def_prop_ro("words", &Pairs::words)
      .def("__len__", &Pairs::size)
      .def("gather", &Pairs::gather, nb::call_guard<nb::gil_scoped_release>())
      .def("rows", [](const Pairs& pairs, const Array<uint64_t>& keys, const Array<float>& show,
                      const Array<uint16_t>& slots) { pairs.rows(keys.data(), show.data(), slots.data()); })
      .def("move",
           [](Pairs& pairs, const Array<const float, 2>& rows, float lr, float rule_lr, bool bias,
              const std::pair<float, float>& of_factors, const std::pair<float, float>& of_bias,
              const Array<float, 2>& grads) {
             const nb::gil_scoped_release nogil;
             pairs.move(rows.data(), static_cast<int>(rows.shape(1)) - 1, lr, rule_lr, bias, bounds(of_factors),
                        bounds(of_bias), grads.data());
           })
      .def("gradient",
           [](Pairs& pairs, const Array<const float, 2>& rows, bool bias, const Array<float, 2>& grads) {
             const nb::gil_scoped_release nogil;
             pairs.gradient(rows.data(), static_cast<int>(rows.shape(1)) - 1, bias, grads.data());
           })
      .def("train", &Pairs::train, nb::arg("held"), nb::arg("lr"), nb::arg("bias"), nb::arg("shared"),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "drawn",
          [](const Pairs& pairs) {
            std::vector<uint32_t> centres, ends;
            for (const auto& centre : pairs.centres()) {
              centres.push_back(centre.id);
              ends.push_back(centre.end);
            }
            return nb::make_tuple(array(std::move(centres)), array(std::move(ends)),
                                  array(std::vector<uint32_t>(pairs.targets())));
          },
          "Centre words, where the targets of each end, and the targets: a neighbour, then its words of noise.")
      .def("take_counts", [](Pairs& pairs, const Array<float>& in,
                             const Array<float>& out) { pairs.take_counts(in.data(), out.data()); })
      .def("scores", [](const Pairs& pairs) {
        return nb::make_tuple(array(std::vector<float>(pairs.true_logits())),
                              array(std::vector<float>(pairs.noise_logits())), pairs.loss());
      });
}

}  // namespace clickfleet
