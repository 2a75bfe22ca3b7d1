#include "buckets.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bind.h"
#include "groups.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float>;
using Ids = Array<const uint64_t>;

// A metric and its lock, because trainer threads may share one metric.
template <class T>
struct Locked {
  template <class... Args>
  explicit Locked(Args... args) : value(args...) {}
  T value;
  std::mutex lock;
};

template <class T, class Call>
auto locked(Locked<T>& self, Call call) {
  nb::gil_scoped_release nogil;
  std::lock_guard guard(self.lock);
  return call(self.value);
}

void check_size(const char* name, size_t found, size_t expected) {
  if (found != expected)
    throw nb::value_error(
        (std::string(name) + " has " + std::to_string(found) + " values, expected " + std::to_string(expected))
            .c_str());
}

Rows rows(const Floats& scores, const Floats& labels, const std::optional<Floats>& weights, const Ids* ids) {
  check_size("labels", labels.size(), scores.size());
  if (weights) check_size("weights", weights->size(), scores.size());
  if (ids) check_size("ids", ids->size(), scores.size());
  return {scores.data(), labels.data(), weights ? weights->data() : nullptr, ids ? ids->data() : nullptr,
          scores.size()};
}

template <class T>
void update(Locked<T>& self, const Floats& scores, const Floats& labels, const std::optional<Floats>& weights) {
  const Rows batch = rows(scores, labels, weights, nullptr);
  locked(self, [&](T& it) { it.update(batch); });
}

template <class T>
void update_by_id(Locked<T>& self, const Ids& ids, const Floats& scores, const Floats& labels,
                  const std::optional<Floats>& weights) {
  const Rows batch = rows(scores, labels, weights, &ids);
  locked(self, [&](T& it) { it.update(batch); });
}

int thresholds_of(const Buckets& it) { return it.thresholds(); }
int thresholds_of(const Slices& it) { return it.rest.thresholds(); }
int thresholds_of(const Groups&) { return 0; }

template <class T>
void merge(Locked<T>& self, Locked<T>& other) {
  need(thresholds_of(self.value) == thresholds_of(other.value), "cannot merge metrics with different thresholds");
  T copy = locked(other, [](T& it) { return it; });  // never hold two locks at once
  locked(self, [&](T& it) { it.merge(copy); });
}

int checked(int thresholds) {
  need(thresholds >= 1 && thresholds <= 1 << 28, "thresholds must be between 1 and 2^28");
  return thresholds;
}

// Python checks the arguments (metrics.py); these functions read and write plain arrays.
void bind_sums(nb::module_& m) {
  using Self = Locked<Buckets>;
  nb::class_<Self>(m, "Buckets", "Sums over rows, and clicks and non-clicks per score bucket.")
      .def(
          "__init__", [](Self* self, int thresholds) { new (self) Self(checked(thresholds)); }, nb::arg("thresholds"))
      .def("update", &update<Buckets>, nb::arg("scores"), nb::arg("labels"), nb::arg("weights") = nb::none())
      .def("merge", &merge<Buckets>, nb::arg("other"))
      .def("reset", [](Self& self) { locked(self, [](Buckets& it) { it.reset(); }); })
      .def("auc", [](Self& self) { return locked(self, [](Buckets& it) { return it.auc(); }); })
      .def("calibration_groups",
           [](Self& self) {
             const CalibrationGroups all = locked(self, [](Buckets& it) { return it.calibration_groups(); });
             return std::tuple{all.error, all.shown, all.expected, all.clicked};
           })
      .def(
          "write",
          [](Self& self, Array<double> out) {
            check_size("out", out.size(), self.value.size());
            locked(self, [&](Buckets& it) { it.write(out.data()); });
          },
          nb::arg("out").noconvert())
      .def(
          "read",
          [](Self& self, Array<const double> in) {
            check_size("state", in.size(), self.value.size());
            locked(self, [&](Buckets& it) { it.read(in.data()); });
          },
          nb::arg("state"));
}

void bind_window(nb::module_& m) {
  using Self = Locked<Window>;
  nb::class_<Self>(m, "Window", "The buckets of each of the last `size` batches.")
      .def(
          "__init__",
          [](Self* self, int thresholds, int size) {
            need(size >= 1, "size must be at least 1");
            new (self) Self(checked(thresholds), size);
          },
          nb::arg("thresholds"), nb::arg("size"))
      .def("update", &update<Window>, nb::arg("scores"), nb::arg("labels"), nb::arg("weights") = nb::none())
      .def("auc", [](Self& self) { return locked(self, [](Window& it) { return it.sum().auc(); }); })
      .def_prop_ro("next", [](Self& self) { return locked(self, [](Window& it) { return it.next(); }); })
      .def(
          "write",
          [](Self& self, Array<double> out) {
            check_size("out", out.size(), self.value.ring().size() * self.value.ring()[0].size());
            locked(self, [&](Window& it) {
              for (size_t i = 0; i < it.ring().size(); ++i) it.ring()[i].write(out.data() + i * it.ring()[i].size());
            });
          },
          nb::arg("out").noconvert())
      .def(
          "read",
          [](Self& self, Array<const double> in, size_t next) {
            check_size("state", in.size(), self.value.ring().size() * self.value.ring()[0].size());
            locked(self, [&](Window& it) {
              for (size_t i = 0; i < it.ring().size(); ++i) it.ring()[i].read(in.data() + i * it.ring()[i].size());
              it.set_next(next);
            });
          },
          nb::arg("state"), nb::arg("next"));
}

void bind_slices(nb::module_& m) {
  using Self = Locked<Slices>;
  nb::class_<Self>(m, "Slices", "Buckets per id for at most `limit` ids; the rows of other ids share one set.")
      .def(
          "__init__", [](Self* self, int thresholds, size_t limit) { new (self) Self(checked(thresholds), limit); },
          nb::arg("thresholds"), nb::arg("limit"))
      .def("update", &update_by_id<Slices>, nb::arg("ids"), nb::arg("scores"), nb::arg("labels"),
           nb::arg("weights") = nb::none())
      .def("merge", &merge<Slices>, nb::arg("other"))
      .def("__len__", [](Self& self) { return locked(self, [](Slices& it) { return it.ids().size(); }); })
      .def(
          "ids",
          [](Self& self, Array<uint64_t> out) {
            locked(self, [&](Slices& it) {
              std::copy_n(it.ids().begin(), std::min(it.ids().size(), out.size()), out.data());
            });
          },
          nb::arg("out").noconvert())
      .def(
          "write",
          [](Self& self, uint64_t id, bool rest, Array<double> out) {
            check_size("out", out.size(), self.value.rest.size());
            locked(self, [&](Slices& it) { (rest ? it.rest : it.find(id)).write(out.data()); });
          },
          nb::arg("id"), nb::arg("rest"), nb::arg("out").noconvert())
      .def(
          "read",
          [](Self& self, uint64_t id, bool rest, Array<const double> in) {
            check_size("state", in.size(), self.value.rest.size());
            locked(self, [&](Slices& it) { (rest ? it.rest : it.find(id)).read(in.data()); });
          },
          nb::arg("id"), nb::arg("rest"), nb::arg("state"));
}

void bind_groups(nb::module_& m) {
  using Self = Locked<Groups>;
  nb::class_<Self>(m, "Groups", "Rows by group, for the AUC within groups.")
      .def(nb::init<size_t>(), nb::arg("limit"))
      .def("update", &update_by_id<Groups>, nb::arg("ids"), nb::arg("scores"), nb::arg("labels"),
           nb::arg("weights") = nb::none())
      .def("merge", &merge<Groups>, nb::arg("other"))
      .def("reset", [](Self& self) { locked(self, [](Groups& it) { it.reset(); }); })
      .def("gauc", [](Self& self) { return locked(self, [](Groups& it) { return it.gauc(); }); })
      .def_prop_ro("level", [](Self& self) { return locked(self, [](Groups& it) { return it.level(); }); })
      .def("__len__", [](Self& self) { return locked(self, [](Groups& it) { return it.rows().size(); }); })
      .def(
          "write",
          [](Self& self, Array<uint64_t> groups, Array<float> scores, Array<float> weights) {
            check_size("scores", scores.size(), groups.size());
            check_size("weights", weights.size(), groups.size());
            locked(self, [&](Groups& it) {
              const size_t n = std::min(it.rows().size(), groups.size());
              for (size_t i = 0; i < n; ++i) {
                const Groups::Row& row = it.rows()[i];
                groups.data()[i] = row.group, scores.data()[i] = row.score, weights.data()[i] = row.weight;
              }
            });
          },
          nb::arg("groups").noconvert(), nb::arg("scores").noconvert(), nb::arg("weights").noconvert())
      .def(
          "append",
          [](Self& self, const Ids& groups, const Floats& scores, const Floats& weights, unsigned level) {
            check_size("scores", scores.size(), groups.size());
            check_size("weights", weights.size(), groups.size());
            for (size_t i = 0; i < scores.size(); ++i)  // sorting needs an order, so NaN is not allowed
              need(scores.data()[i] >= 0 && scores.data()[i] <= 1 && weights.data()[i] == weights.data()[i],
                   "scores must be in [0, 1], and weights must not be NaN");
            std::vector<Groups::Row> added(groups.size());
            for (size_t i = 0; i < added.size(); ++i)
              added[i] = {groups.data()[i], scores.data()[i], weights.data()[i]};
            locked(self, [&](Groups& it) { it.append(added, level); });
          },
          nb::arg("groups"), nb::arg("scores"), nb::arg("weights"), nb::arg("level"));
}

}  // namespace

void bind_buckets(nb::module_& m) {
  m.attr("BUCKET_TOTALS") = Totals::kCount;
  bind_sums(m);
  bind_window(m);
  bind_slices(m);
  bind_groups(m);
}

}  // namespace clickfleet
