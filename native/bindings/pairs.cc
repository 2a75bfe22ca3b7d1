#include "pairs.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "bind.h"
#include "parse/sentences.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

constexpr size_t kMostNeighbours = 65536;

template <class T>
nb::object array(std::vector<T>&& values) {
  auto* const owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

void draw(Pairs& pairs, const Array<const uint64_t>& keys, const Array<const int64_t>& offsets, size_t slots,
          uint64_t seed) {
  need(slots > 0 && ascending(offsets.data(), offsets.size(), keys.size()) && (offsets.size() - 1) % slots == 0,
       "offsets must not decrease or point outside the keys, and every row needs one per slot");
  const nb::gil_scoped_release nogil;
  pairs.draw(keys.data(), offsets.data(), (offsets.size() - 1) / slots, slots, seed);
}

// Checks that the arrays match the rows gathered last. Returns the number of factors.
int width_of(const Pairs& pairs, const Array<const float, 2>& rows, const Array<float, 2>& grads) {
  need(pairs.is_gathered(), "call gather before using the rows of these pairs");
  need(rows.shape(0) == pairs.gathered() && rows.shape(1) >= 1 && rows.shape(1) <= 1 + kMostNeighbours &&
           grads.shape(0) == rows.shape(0) && grads.shape(1) == rows.shape(1),
       "rows and grads must have one row per gathered row");
  return static_cast<int>(rows.shape(1)) - 1;
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
      nb::arg("text"), nb::arg("slot"),
      "Return the keys of all words in whole lines, and offsets for two slots per line.");
  nb::class_<Words>(m, "Words", "A vocabulary: the word of each key, the chance to keep it, and noise words to draw.")
      .def("__init__", [](Words* self, const Array<const uint64_t>& in, const Array<const uint64_t>& out,
                          const Array<const double>& keep, const Array<const double>& noise) {
        if (in.size() == 0 || out.size() != in.size() || keep.size() != in.size() || noise.size() != in.size())
          throw nb::value_error("a vocabulary must not be empty, and its columns must have the same length");
        need(in.size() < size_t{1} << 31, "a vocabulary must have fewer than 2^31 words");
        double total = 0;
        for (size_t i = 0; i < in.size(); ++i) {
          need(std::isfinite(keep.data()[i]) && std::isfinite(noise.data()[i]) && noise.data()[i] >= 0,
               "keep and noise must be finite, and noise must not be negative");
          total += noise.data()[i];
        }
        need(total > 0 && std::isfinite(total), "at least one word must have a positive noise weight");
        new (self) Words(in.data(), out.data(), keep.data(), noise.data(), in.size());
      });
  nb::class_<InPlace>(m, "InPlace", "Rows of a table, trained in place.")
      .def(
          "__init__",
          [](InPlace* self, Table& table, const Array<const uint64_t>& keys) {
            new (self) InPlace(table, keys.data(), keys.size());
          },
          nb::keep_alive<1, 2>());
  nb::class_<Pairs>(m, "Pairs", "The skip-gram pairs of some sentences, drawn afresh for every batch.")
      .def(
          "__init__",
          [](Pairs* self, const Words& words, uint32_t window, uint32_t negatives) {
            need(window >= 1 && window <= kMostNeighbours && negatives <= kMostNeighbours,
                 "window must be between 1 and 65536, negatives between 0 and 65536");
            new (self) Pairs(words, window, negatives);
          },
          nb::arg("words"), nb::arg("window"), nb::arg("negatives"), nb::keep_alive<1, 2>())
      .def("draw", &draw, nb::arg("keys").noconvert(), nb::arg("offsets").noconvert(), nb::arg("slots"),
           nb::arg("seed"))
      .def_prop_ro("words", &Pairs::words)
      .def("__len__", &Pairs::size)
      .def("gather", &Pairs::gather, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "rows",
          [](const Pairs& pairs, const Array<uint64_t>& keys, const Array<float>& show, const Array<uint16_t>& slots) {
            const size_t n = pairs.gathered();
            need(keys.size() == n && show.size() == n && slots.size() == n,
                 "keys, show and slots must have one entry per gathered row");
            pairs.rows(keys.data(), show.data(), slots.data());
          },
          nb::arg("keys").noconvert(), nb::arg("show").noconvert(), nb::arg("slots").noconvert())
      .def(
          "move",
          [](Pairs& pairs, const Array<const float, 2>& rows, float lr, float rule_lr, bool bias,
             const std::pair<float, float>& of_factors, const std::pair<float, float>& of_bias,
             const Array<float, 2>& grads) {
            const int dim = width_of(pairs, rows, grads);
            const nb::gil_scoped_release nogil;
            pairs.move(rows.data(), dim, lr, rule_lr, bias, bounds(of_factors), bounds(of_bias), grads.data());
          },
          nb::arg("rows"), nb::arg("lr"), nb::arg("rule_lr"), nb::arg("bias"), nb::arg("of_factors"),
          nb::arg("of_bias"), nb::arg("grads").noconvert())
      .def(
          "gradient",
          [](Pairs& pairs, const Array<const float, 2>& rows, bool bias, const Array<float, 2>& grads) {
            const int dim = width_of(pairs, rows, grads);
            const nb::gil_scoped_release nogil;
            pairs.gradient(rows.data(), dim, bias, grads.data());
          },
          nb::arg("rows"), nb::arg("bias"), nb::arg("grads").noconvert())
      .def(
          "train",
          [](Pairs& pairs, InPlace& held, float lr, bool bias, bool shared) {
            need(held.size() == 2 * size_t{pairs.vocabulary().size()}, "the rows do not match the vocabulary");
            pairs.train(held, lr, bias, shared);
          },
          nb::arg("held"), nb::arg("lr"), nb::arg("bias"), nb::arg("shared"), nb::call_guard<nb::gil_scoped_release>())
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
          "Return the centre words, the end of each one's targets, and the targets: each neighbour, then its noise "
          "words.")
      .def(
          "take_counts",
          [](Pairs& pairs, const Array<float>& in, const Array<float>& out) {
            need(in.size() == pairs.vocabulary().size() && out.size() == in.size(),
                 "in_ and out must have one entry per word");
            pairs.take_counts(in.data(), out.data());
          },
          nb::arg("in_").noconvert(), nb::arg("out").noconvert())
      .def("scores", [](const Pairs& pairs) {
        return nb::make_tuple(array(std::vector<float>(pairs.true_logits())),
                              array(std::vector<float>(pairs.noise_logits())), pairs.loss());
      });
}

}  // namespace clickfleet
