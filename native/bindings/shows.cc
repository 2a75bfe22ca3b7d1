#include "shows.h"

#include <nanobind/stl/string_view.h>

#include <cerrno>
#include <memory>

#include "bind.h"
#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace clickfleet {
namespace {

// Hands the memory of a column to NumPy.
template <class Values>
nb::object owned(Values&& values) {
  using T = typename std::remove_reference_t<Values>::value_type;
  using Number = std::conditional_t<std::is_same_v<T, char>, uint8_t, T>;
  auto held = std::make_unique<std::remove_reference_t<Values>>(std::move(values));
  const size_t size = held->size();
  auto* const first = reinterpret_cast<Number*>(held->data());
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::remove_reference_t<Values>*>(p); });
  held.release();
  return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<1>>(first, {size}, owner));
}

nb::object validity(ValidityColumn& column) { return column.missing == 0 ? nb::none() : owned(std::move(column.bits)); }

// Writes all bytes. Returns 0, or the number of the error.
int write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
#if defined(_WIN32)
    const auto written = ::_write(file, bytes.data(), static_cast<unsigned>(bytes.size()));
#else
    const auto written = ::write(file, bytes.data(), bytes.size());
#endif
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

}  // namespace

void bind_shows(nb::module_& m) {
  nb::class_<ShowColumns>(m, "ShowColumns", "Scored rows as columns, read from the frames of workers. Not thread-safe.")
      .def(nb::init<>())
      .def_prop_ro("rows", &ShowColumns::rows)
      .def_prop_ro("bytes", &ShowColumns::bytes, "About how many bytes the columns have.")
      .def(
          "add",
          [](ShowColumns& shows, const nb::bytes& frames) {
            const std::string_view given(frames.c_str(), frames.size());
            const auto at = [&] {
              const nb::gil_scoped_release nogil;
              return shows.add(given);
            }();
            return nb::make_tuple(at.taken, at.next, at.damaged);
          },
          nb::arg("frames"),
          "Append the rows of all whole frames. Return the bytes of those frames, the bytes of the frame after them if "
          "its length is known, and whether what follows is damaged.")
      .def(
          "take_others",
          [](ShowColumns& shows) {
            nb::list out;
            for (const std::string& content : shows.others) out.append(nb::bytes(content.data(), content.size()));
            shows.others.clear();
            return out;
          },
          "Return the contents of frames that could not be converted, and forget them.")
      .def(
          "take",
          [](ShowColumns& shows) {
            ShowColumns taken;
            std::swap(taken, shows);
            std::swap(taken.others, shows.others);
            nb::dict out;
            const auto text = [&](const char* name, TextColumn& column, nb::object valid) {
              out[name] = nb::make_tuple(valid, owned(std::move(column.offsets)), owned(std::move(column.bytes)));
            };
            text("request", taken.request, nb::none());
            text("item", taken.item, nb::none());
            text("features", taken.features, nb::none());
            text("model", taken.model, nb::none());
            text("route", taken.route, nb::none());
            text("user", taken.user, validity(taken.has_user));
            out["time"] = nb::make_tuple(nb::none(), owned(std::move(taken.time)));
            out["sequence"] = nb::make_tuple(nb::none(), owned(std::move(taken.sequence)));
            out["score"] = nb::make_tuple(nb::none(), owned(std::move(taken.score)));
            out["position"] = nb::make_tuple(validity(taken.has_position), owned(std::move(taken.position)));
            return out;
          },
          "Return the buffers of all columns as Arrow has them, by name, and empty the columns.");
  m.def(
      "write_show",
      [](int file, std::string_view route, std::string_view request, int64_t time, std::string_view model,
         int64_t sequence, const nb::bytes& scores, const nb::bytes& body) {
        const auto view = [](const nb::bytes& bytes) { return std::string_view(bytes.c_str(), bytes.size()); };
        need(scores.size() % 4 == 0 && body.size() <= kMaxFrame / 2,
             "scores are float32, and the body has at most 512 MiB");
        const std::string_view frame = frame_of({route, request, model, view(scores), view(body), time, sequence});
        int problem = 0;
        {
          const nb::gil_scoped_release nogil;
          problem = write_all(file, frame);
        }
        if (problem != 0) {
          errno = problem;
          PyErr_SetFromErrno(PyExc_OSError);
          throw nb::python_error();
        }
        return frame.size();
      },
      nb::arg("file"), nb::arg("route"), nb::arg("request"), nb::arg("time"), nb::arg("model"), nb::arg("sequence"),
      nb::arg("scores"), nb::arg("body"),
      "Append the frame of a scored request, whose rows have no ids, to an open file. Return its size. Raise OSError "
      "if "
      "it cannot be written; a part of it may have been.");
  m.def(
      "frame_hash", [](const nb::bytes& content) { return frame_hash({content.c_str(), content.size()}); },
      nb::arg("content"), "Return the hash in the head of a frame.");
}

}  // namespace clickfleet
