// The file of frames of one process, which another one reads while it grows (serve/frames.py).
//
//   bytes 0 to 7   where the frames end (u64, little-endian); 0 in a new file
//   from 8 on      frames (shows.h)
//
// In a file system in memory (tmpfs), a frame is copied into a mapping, without a system call: a write costs a reply
// several microseconds. Space is reserved before it is touched, because the process would not survive a page that
// cannot be had. A file that is used again has its space already. Elsewhere a mapping may wait for a disk and fail with
// it, so frames are written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace clickfleet {

inline constexpr size_t kFramesBegin = 8;

class FrameAppender {
 public:
  // Appends to a file without frames, open for reading and writing. At most `capacity` bytes are mapped; what does not
  // fit is written.
  FrameAppender(int file, size_t capacity);
  ~FrameAppender();
  FrameAppender(const FrameAppender&) = delete;
  FrameAppender& operator=(const FrameAppender&) = delete;

  // Returns 0, or the number of the error. After an error, the file has the frames that it had before.
  int append(std::string_view frame);
  // Reserves space for frames like the last one, if there is little. Call it when nobody waits: pages cost several
  // times the copy.
  void make_room();
  size_t end() const { return end_; }
  bool mapped() const { return mapped_ != nullptr; }

 private:
  int reserve(size_t end);

  const int file_;
  char* mapped_ = nullptr;
  // The file has its first `allocated_` bytes; those up to `reserved_` are also in the page table of this process.
  size_t capacity_ = 0, allocated_ = 0, reserved_ = 0, end_ = kFramesBegin, last_ = 0;
};

// Returns where the frames of a file end. Everything before is complete when it is read afterwards.
size_t frames_end(int file);

// Reads bytes at a place of a file. Returns how many there were; sets errno and returns -1 if they cannot be read.
int64_t read_at(int file, char* to, size_t size, size_t at);

}  // namespace clickfleet
