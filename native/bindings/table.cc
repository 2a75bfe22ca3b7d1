#include "table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "rule_from.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

constexpr int kMostFactors = 65536;

template <class T>
T get(const nb::dict& from, const char* name) {
  return nb::cast<T>(from[name]);
}

// Returns the position of a word in a list.
template <size_t N>
int index_of(const std::string& word, const char* const (&words)[N]) {
  for (size_t i = 0; i < N; ++i)
    if (word == words[i]) return static_cast<int>(i);
  throw nb::value_error(("unknown choice " + word).c_str());
}

Part part_from(const nb::dict& from) {
  static constexpr const char* scales[] = {"show", "batch", "none"};
  static constexpr const char* kinds[] = {"zero", "uniform", "normal", "truncated"};
  Part part;
  part.rule = rule_from(from["rule"], get<nb::dict>(from, "settings"));
  part.bounds = {get<float>(from, "lower"), get<float>(from, "upper")};
  part.init.a = get<float>(from, "a");
  part.init.b = get<float>(from, "b");
  part.scale = static_cast<Scale>(index_of(get<std::string>(from, "scale"), scales));
  part.init.kind = static_cast<Init::Kind>(index_of(get<std::string>(from, "init"), kinds));
  return part;
}

Config config_from(const nb::dict& from) {
  static constexpr const char* ways[] = {"birth", "score", "count", "probability"};
  Config config;
  const auto read_class = [](const nb::dict& own, RowClass& to) {
    to.factors = get<int>(own, "factors");
    need(to.factors >= 0 && to.factors <= kMostFactors, "factors must be between 0 and 65536");
    to.embed = part_from(get<nb::dict>(own, "embed"));
    to.embedx = part_from(get<nb::dict>(own, "embedx"));
    to.admission.threshold = get<double>(own, "admission_threshold");
    to.admission.by = static_cast<Admission::By>(index_of(get<std::string>(own, "admission"), ways));
  };
  const auto classes = nb::cast<std::vector<nb::dict>>(from["classes"]);
  need(!classes.empty() && classes.size() <= kMostClasses, "a table has between 1 and 16 classes of rows");
  read_class(classes[0], config);
  config.others.resize(classes.size() - 1);
  for (size_t i = 1; i < classes.size(); ++i) read_class(classes[i], config.others[i - 1]);
  config.slot_class = get<std::vector<uint8_t>>(from, "slot_class");
  for (const uint8_t row_class : config.slot_class) need(row_class < classes.size(), "a slot names an unknown class");
  config.seed = get<uint64_t>(from, "seed");
  Policy& policy = config.policy;
  policy.nonclick_coeff = get<double>(from, "nonclick_coeff");
  policy.click_coeff = get<double>(from, "click_coeff");
  policy.base_threshold = get<double>(from, "base_threshold");
  policy.delta_threshold = get<double>(from, "delta_threshold");
  policy.delta_keep_days = get<double>(from, "delta_keep_days");
  policy.decay_rate = get<double>(from, "decay_rate");
  policy.delete_threshold = get<double>(from, "delete_threshold");
  policy.delete_after_unseen_days = get<double>(from, "delete_after_unseen_days");
  if (!from["padding_key"].is_none()) config.padding = get<uint64_t>(from, "padding_key");
  config.memory_limit = get<size_t>(from, "memory_limit");
  config.snapshot_reserve = get<size_t>(from, "snapshot_reserve");
  config.disk = get<std::string>(from, "disk");
  config.disk_limit = get<size_t>(from, "disk_limit");
  config.disk_ring = get<bool>(from, "disk_ring");
  return config;
}

nb::dict stats(const Table& table) {
  Stats s;
  {
    const nb::gil_scoped_release nogil;
    s = table.stats();
  }
  nb::dict out;
  out["rows"] = s.rows;
  out["full_rows"] = s.full_rows;
  out["bytes"] = s.bytes;
  out["peak_bytes"] = s.peak_bytes;
  out["own_bytes"] = s.own_bytes;
  out["admitted"] = s.admitted;
  out["shrunk"] = s.shrunk;
  out["evicted"] = s.evicted;
  out["changed"] = s.changed;
  out["deleted"] = s.deleted;
  out["undo_waits"] = s.undo_waits;
  for (const Stats::OfKind& of : s.kinds) {  // summed by width, and over shards by whoever reads them
    if (of.rows + of.disk_rows == 0) continue;
    const auto add = [&](const char* what, uint64_t number) {
      const std::string name = "width_" + std::to_string(of.factors) + what;
      out[name.c_str()] = number + (out.contains(name.c_str()) ? nb::cast<uint64_t>(out[name.c_str()]) : 0);
    };
    add("_rows", of.rows);
    add("_bytes", of.bytes);
    if (table.config().disk.empty()) continue;
    add("_disk_rows", of.disk_rows);
    add("_disk_bytes", of.disk_bytes);
  }
  if (table.config().disk.empty()) return out;
  out["disk_rows"] = s.disk_rows;
  out["disk_full_rows"] = s.disk_full_rows;
  out["disk_bytes"] = s.disk_bytes;
  out["peak_disk_bytes"] = s.peak_disk_bytes;
  out["index_bytes"] = s.index_bytes;
  out["segments"] = s.segments;
  out["spilled"] = s.spilled;
  out["fetched"] = s.fetched;
  out["pulled"] = s.pulled;
  out["disk_reads"] = s.disk_reads;
  out["disk_waits"] = s.disk_waits;
  return out;
}

// A Plan numbers keys with 32 bits.
template <class Rows>
bool fits_rows(const Table& table, const Array<const uint64_t>& keys, const Rows& rows) {
  return keys.size() <= UINT32_MAX && rows.shape(0) == keys.size() &&
         rows.shape(1) == 1 + static_cast<size_t>(table.widest());
}

void restore(Table& table, int kind, const Array<const uint64_t>& key, const Array<const uint16_t>& slot,
             const Array<const double>& show, const Array<const double>& click,
             const Array<const uint16_t>& unseen_days, const Array<const float>& delta_score,
             const Array<const uint8_t>& published, const Array<const float>& embed_w,
             const Array<const float>& embed_state, const Array<const float>& embedx,
             const Array<const float>& embedx_state, int first_shard, int last_shard) {
  const size_t n = key.size();
  const auto numbers = [](int per_row) { return static_cast<size_t>(per_row); };
  const Layout& layout = table.layout();
  need(kind >= 0 && kind < layout.kinds(), "unknown kind of rows");
  const auto own = static_cast<RowKind>(kind);
  need(slot.size() == n && show.size() == n && click.size() == n && unseen_days.size() == n &&
           delta_score.size() == n && published.size() == n && embed_w.size() == n &&
           embed_state.size() == n * numbers(layout.embed_state(own)) &&
           embedx.size() >= n * numbers(layout.factors(own)) &&
           embedx_state.size() >= n * numbers(layout.embedx_state(own)),
       "columns have different lengths");
  for (size_t i = 0; i < n; ++i)
    need(table.class_of_slot(slot.data()[i]) == class_of(own), "a row has another width than its slot");
  const nb::gil_scoped_release nogil;
  table.restore(
      {key.size(), own, key.data(), slot.data(), show.data(), click.data(), unseen_days.data(), delta_score.data(),
       published.data(), embed_w.data(), embed_state.data(), embedx.data(), embedx_state.data()},
      first_shard, last_shard);
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      PyErr_SetString(nb::module_::import_("clickfleet.errors").attr("TableError").ptr(), e.what());
    }
  });
  nb::class_<Table>(m, "Table", "The sparse table. Prefer `clickfleet.Table`, whose error messages are clearer.")
      .def(
          "__init__",
          [](Table* self, const nb::dict& config, const nb::object&) { new (self) Table(config_from(config)); },
          nb::arg("config"), nb::arg("folder").none() = nb::none(), nb::keep_alive<1, 3>())
      .def(
          "pull",
          [](const Table& table, const Array<const uint64_t>& keys, bool training, const Array<float, 2>& out,
             const std::optional<Array<const uint16_t>>& slots) {
            need(fits_rows(table, keys, out) && fits(slots, keys.size()), "out or slots do not match the keys");
            const nb::gil_scoped_release nogil;
            table.pull(keys.data(), keys.size(), training, out.data(), data_or_null(slots));
          },
          nb::arg("keys").noconvert(), nb::arg("training"), nb::arg("out").noconvert(),
          nb::arg("slots").none() = nb::none())
      .def(
          "push",
          [](Table& table, const Array<const uint64_t>& keys, const Array<const float, 2>& grads,
             const std::optional<Array<const float>>& show, const std::optional<Array<const float>>& click,
             const std::optional<Array<const uint16_t>>& slot, float n, bool distinct, int move) {
            need(fits_rows(table, keys, grads) && fits(show, keys.size()) && fits(click, keys.size()) &&
                     fits(slot, keys.size()),
                 "the columns do not match the keys");
            need(move >= 0 && move <= static_cast<int>(Move::set), "unknown move");
            const nb::gil_scoped_release nogil;
            table.push({keys.data(), grads.data(), data_or_null(show), data_or_null(click), data_or_null(slot),
                        keys.size(), n, distinct, static_cast<Move>(move)});
          },
          nb::arg("keys").noconvert(), nb::arg("grads").noconvert(), nb::arg("show").none(), nb::arg("click").none(),
          nb::arg("slot").none(), nb::arg("n"), nb::arg("distinct"), nb::arg("move") = 0)
      .def(
          "known",
          [](const Table& table, const Array<const uint64_t>& keys, const Array<uint8_t>& out) {
            need(out.size() == keys.size() && keys.size() <= UINT32_MAX, "out must have one entry per key");
            const nb::gil_scoped_release nogil;
            table.known(keys.data(), keys.size(), out.data());
          },
          nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def(
          "announce",
          [](Table& table, const Array<const uint64_t>& keys) {
            need(keys.size() <= UINT32_MAX, "too many keys");
            table.announce(keys.data(), keys.size());
          },
          nb::arg("keys").noconvert())
      .def("wait_for_disk", &Table::wait_for_disk, nb::call_guard<nb::gil_scoped_release>())
      .def("shrink", &Table::shrink, nb::call_guard<nb::gil_scoped_release>())
      .def("end_day", &Table::end_day, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_rules",
          [](Table& table, const nb::dict& config) {
            const Config like = config_from(config);
            const nb::gil_scoped_release nogil;
            table.set_rules(like);
          },
          nb::arg("config"))
      .def("stats", &stats)
      .def_prop_ro("tracking", &Table::tracking)
      .def_prop_ro(
          "kinds",
          [](const Table& table) {
            const Layout& layout = table.layout();
            std::vector<std::tuple<int, int, int, int, int>> kinds;
            for (RowKind kind = 0; kind < layout.kinds(); ++kind)
              kinds.emplace_back(layout.factors(kind), layout.embed_state(kind), layout.embedx_state(kind),
                                 layout.bytes(kind), layout.own_bytes(kind));
            return kinds;
          },
          "For every kind of rows: factors, state of embed_w, state of embedx, bytes in memory, bytes of data.")
      .def("reserve", &Table::reserve, nb::arg("rows"), nb::call_guard<nb::gil_scoped_release>())
      .def("prepare", &Table::prepare, nb::arg("memory"), nb::call_guard<nb::gil_scoped_release>())
      .def("settle", &Table::settle, nb::arg("memory"), nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore)
      .def("restore_changes",
           [](Table& table, const Array<const uint64_t>& changed, const Array<const uint64_t>& deleted) {
             const nb::gil_scoped_release nogil;
             table.restore_changes(changed.data(), changed.size(), deleted.data(), deleted.size());
           })
      .def("restore_readers", [](Table& table, const Array<const uint64_t>& keys) {
        const nb::gil_scoped_release nogil;
        table.restore_readers(keys.data(), keys.size());
      });
}

}  // namespace clickfleet
