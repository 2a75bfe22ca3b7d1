#include "frame_file.h"

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "check.h"

namespace clickfleet {
namespace {

// A file without a name, in memory or not.
int nameless(const char* folder) {
  std::string path = std::string(folder) + "/frames-XXXXXX";
  const int file = mkstemp(path.data());
  unlink(path.c_str());
  return file;
}

std::string numbered(uint64_t number) {
  return std::string(1 + number % 700, static_cast<char>('a' + number % 26)) + std::to_string(number);
}

// Everything before `frames_end` is complete, whenever another thread looks.
TEST(what_is_read_while_it_grows_is_complete) {
  for (const char* folder : {"/dev/shm", "."}) {
    const int file = nameless(folder);
    if (file < 0) continue;  // no file system in memory
    constexpr uint64_t kFrames = 4000;
    FrameAppender frames(file, size_t{1} << 19);  // the last ones do not fit
    std::thread reader([file] {
      std::string read;
      for (uint64_t number = 0; number < kFrames;) {
        const size_t end = frames_end(file), known = kFramesBegin + read.size();
        std::string more(end - known, '\0');
        CHECK(pread(file, more.data(), more.size(), static_cast<off_t>(known)) == static_cast<ssize_t>(more.size()));
        size_t at = 0;
        for (; at < more.size(); ++number) {
          const std::string expected = numbered(number);
          CHECK(more.compare(at, expected.size(), expected) == 0);
          at += expected.size();
        }
        read += more;
      }
    });
    for (uint64_t number = 0; number < kFrames; ++number) CHECK(frames.append(numbered(number)) == 0);
    reader.join();
    CHECK(frames_end(file) == frames.end());
    close(file);
  }
}

// A file that is used again has its space, also where there is none left.
TEST(a_file_is_used_again) {
  for (const char* folder : {"/dev/shm", "."}) {
    const int file = nameless(folder);
    if (file < 0) continue;  // no file system in memory
    constexpr size_t kCapacity = size_t{1} << 18;
    const auto fill = [&] {
      FrameAppender frames(file, kCapacity);
      CHECK(frames.end() == kFramesBegin);
      while (frames.end() < kCapacity + 100'000) {
        frames.make_room();
        CHECK(frames.append(numbered(frames.end())) == 0);
      }
      return frames.end();
    };
    const size_t end = fill();
    constexpr uint64_t kNone = 0;
    CHECK(pwrite(file, &kNone, sizeof kNone, 0) == sizeof kNone && frames_end(file) == kFramesBegin);
    CHECK(fill() == end && frames_end(file) == end);
    std::string found(end - kFramesBegin, '\0'), expected;
    CHECK(pread(file, found.data(), found.size(), kFramesBegin) == static_cast<ssize_t>(found.size()));
    while (expected.size() < found.size()) expected += numbered(kFramesBegin + expected.size());
    CHECK(found == expected);
    close(file);
  }
}

TEST(a_file_without_frames_ends_where_they_begin) {
  const int file = nameless(".");
  CHECK(frames_end(file) == kFramesBegin && frames_end(-1) == kFramesBegin);
  FrameAppender frames(file, size_t{1} << 16);
  CHECK(frames.end() == kFramesBegin && frames_end(file) == kFramesBegin);
  close(file);
  FrameAppender closed(-1, size_t{1} << 16);
  CHECK(closed.append("x") == EBADF && closed.end() == kFramesBegin && !closed.mapped());
}

}  // namespace
}  // namespace clickfleet
#endif
