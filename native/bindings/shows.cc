#include "shows.h"

#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "bind.h"
#include "frame_file.h"

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

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

[[noreturn]] void raise_errno() {
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

void appended(FrameAppender& frames, std::string_view frame) {
  errno = frames.append(frame);
  if (errno != 0) raise_errno();
}

constexpr size_t kKept = size_t{1} << 18;  // bytes of a file that fit the memory kept for it

// Appends frames of a file, from `at` on. Returns whether there may be more, and how it went.
std::pair<bool, ShowColumns::Progress> read_frames(ShowColumns& shows, int file, size_t at, size_t most) {
  int64_t size = 0;
  const auto progress = [&] {
    const nb::gil_scoped_release nogil;
    const size_t end = frames_end(file), wanted = std::min(most, end - std::min(end, at));
    thread_local const auto kept = std::make_unique_for_overwrite<char[]>(kKept);  // new pages cost more than the copy
    const auto larger = wanted > kKept ? std::make_unique_for_overwrite<char[]>(wanted) : nullptr;
    char* const bytes = larger ? larger.get() : kept.get();
    size = read_at(file, bytes, wanted, at);
    return size < 0 ? ShowColumns::Progress{} : shows.add({bytes, static_cast<size_t>(size)});
  }();
  if (size < 0) raise_errno();
  return {static_cast<size_t>(size) == most, progress};
}

}  // namespace

void bind_shows(nb::module_& m) {
  nb::class_<ShowColumns>(m, "ShowColumns",
                          "Scored requests as columns, read from the frames of workers. Not thread-safe.")
      .def(nb::init<>())
      .def_prop_ro("requests", &ShowColumns::requests)
      .def_prop_ro("rows", &ShowColumns::rows)
      .def_prop_ro("bytes", &ShowColumns::bytes,
                   "About how many bytes the rows have, with the texts of its request in each.")
      .def(
          "add",
          [](ShowColumns& shows, const nb::bytes& frames) {
            const auto at = shows.add(view(frames));
            return nb::make_tuple(at.taken, at.next, at.damaged);
          },
          nb::arg("frames"),
          "Append the requests of all whole frames. Return the bytes of those frames, the bytes of the next frame if "
          "its length is known, and whether what follows is damaged.")
      .def(
          "read",
          [](ShowColumns& shows, int file, size_t at, size_t most) {
            need(most > 0, "it must read something");
            const auto [more, progress] = read_frames(shows, file, at, most);
            return nb::make_tuple(more, progress.taken, progress.next, progress.damaged);
          },
          nb::arg("file"), nb::arg("at"), nb::arg("most"),
          "Append the frames that begin at a place of a file, reading at most so many bytes. Return whether there are "
          "more bytes, and what `add` returns.")
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
            const auto numbers = [&](const char* name, auto& column, nb::object valid) {
              out[name] = nb::make_tuple(valid, owned(std::move(column)));
            };
            text("request", taken.request, nb::none());
            numbers("time", taken.time, nb::none());
            text("model", taken.model, nb::none());
            numbers("sequence", taken.sequence, nb::none());
            text("route", taken.route, nb::none());
            text("user", taken.user, validity(taken.has_user));
            numbers("rows", taken.rows_until, nb::none());
            text("item", taken.item, nb::none());
            text("features", taken.features, nb::none());
            numbers("position", taken.position, validity(taken.has_position));
            numbers("score", taken.score, nb::none());
            return out;
          },
          "Return the buffers of all columns as Arrow has them, by name, and empty the columns.");
  nb::class_<FrameAppender>(m, "FrameAppender",
                            "Appends frames to a file without any, open for reading and writing, that another process "
                            "reads. Not thread-safe.")
      .def(nb::init<int, size_t>(), nb::arg("file"), nb::arg("capacity"),
           "At most `capacity` bytes of a file in memory are mapped.")
      .def_prop_ro("end", &FrameAppender::end, "Where the frames end.")
      .def_prop_ro("mapped", &FrameAppender::mapped, "Whether the file is in memory: an append is a copy.")
      .def(
          "append", [](FrameAppender& frames, const nb::bytes& frame) { appended(frames, view(frame)); },
          nb::arg("frame"), "Append a frame. Raise OSError if there is no room; the file keeps the frames that it has.")
      .def(
          "append_show",
          [](FrameAppender& frames, std::string_view route, std::string_view request, int64_t time,
             std::string_view model, int64_t sequence, const nb::bytes& scores, const nb::bytes& body) {
            need(scores.size() % 4 == 0 && body.size() <= kMaxFrame / 2,
                 "scores are float32, and the body has at most 512 MiB");
            appended(frames, frame_of({route, request, model, view(scores), view(body), time, sequence}));
          },
          nb::arg("route"), nb::arg("request"), nb::arg("time"), nb::arg("model"), nb::arg("sequence"),
          nb::arg("scores"), nb::arg("body"), "Append the frame of a scored request whose rows have no ids.")
      .def("make_room", &FrameAppender::make_room, "Reserve space for the next frames, while nobody waits.");
  m.def("frames_end", &frames_end, nb::arg("file"),
        "Return where the frames of a file end. Everything before is complete when it is read afterwards.");
  m.def(
      "frame_hash", [](const nb::bytes& content) { return frame_hash(view(content)); }, nb::arg("content"),
      "Return the hash in the head of a frame.");
}

}  // namespace clickfleet
