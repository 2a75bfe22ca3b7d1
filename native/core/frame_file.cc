#include "frame_file.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>

#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif
#if defined(__linux__)
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#endif

namespace clickfleet {
namespace {

constexpr size_t kStep = size_t{64} << 10;  // bytes reserved at a time: about 40 µs, or 4 µs if the file has them

int write_at(int file, std::string_view bytes, size_t at) {
  while (!bytes.empty()) {
#if defined(_WIN32)
    const auto size = static_cast<unsigned>(std::min(bytes.size(), size_t{1} << 30));
    const auto written =
        _lseeki64(file, static_cast<int64_t>(at), SEEK_SET) < 0 ? -1 : _write(file, bytes.data(), size);
#else
    const auto written = pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(at));
#endif
    if (written < 0 && errno != EINTR) return errno;
    if (written <= 0) continue;
    bytes.remove_prefix(static_cast<size_t>(written));
    at += static_cast<size_t>(written);
  }
  return 0;
}

void cut(int file, size_t size) {
#if defined(_WIN32)
  static_cast<void>(_chsize_s(file, static_cast<int64_t>(size)));
#else
  while (ftruncate(file, static_cast<off_t>(size)) != 0 && errno == EINTR) {
  }
#endif
}

uint64_t little(uint64_t value) { return std::endian::native == std::endian::big ? __builtin_bswap64(value) : value; }

}  // namespace

FrameAppender::FrameAppender(int file, size_t capacity) : file_(file) {
#if defined(__linux__)
  struct statfs about{};
  if (fstatfs(file, &about) != 0 || about.f_type != TMPFS_MAGIC) return;
  void* const at = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) return;
  mapped_ = static_cast<char*>(at);
  capacity_ = capacity;
  struct stat file_stat{};
  if (fstat(file, &file_stat) != 0 || file_stat.st_blocks * 512 < file_stat.st_size) return;  // it may have holes
  allocated_ = std::min(capacity, static_cast<size_t>(file_stat.st_size));
#else
  static_cast<void>(capacity);
#endif
}

FrameAppender::~FrameAppender() {
#if defined(__linux__)
  if (mapped_ != nullptr) munmap(mapped_, capacity_);
#endif
}

int FrameAppender::reserve(size_t end) {
#if defined(__linux__)
  if (end <= reserved_) return 0;
  const size_t upto = std::min(capacity_, (end + kStep - 1) / kStep * kStep);
  if (upto > allocated_) {
    const auto at = static_cast<off_t>(allocated_), bytes = static_cast<off_t>(upto - allocated_);
    int problem = EINTR;
    while (problem == EINTR) problem = posix_fallocate(file_, at, bytes);
    if (problem != 0) return problem;
    allocated_ = upto;
  }
#if defined(MADV_POPULATE_WRITE)
  madvise(mapped_ + reserved_, upto - reserved_, MADV_POPULATE_WRITE);  // one call instead of a fault per page
#endif
  reserved_ = upto;
#else
  static_cast<void>(end);
#endif
  return 0;
}

int FrameAppender::append(std::string_view frame) {
  const size_t end = end_ + frame.size();
  if (end <= capacity_) {
    if (const int problem = reserve(end); problem != 0) return problem;
    std::memcpy(mapped_ + end_, frame.data(), frame.size());
    // The reader may see the new end only after the frame.
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(mapped_)).store(little(end), std::memory_order_release);
  } else {
    const uint64_t head = little(end);
    int problem = write_at(file_, frame, end_);
    if (problem == 0) problem = write_at(file_, {reinterpret_cast<const char*>(&head), sizeof head}, 0);
    if (problem != 0) {
      cut(file_, std::max(end_, allocated_));  // gives its space back
      return problem;
    }
  }
  last_ = end - end_;
  end_ = end;
  return 0;
}

void FrameAppender::make_room() {
  const size_t wanted = std::min(end_ + std::max(kStep, 2 * last_), capacity_);
  if (wanted > reserved_) reserve(wanted);  // where there is no room, `append` says so
}

size_t frames_end(int file) {
  alignas(8) uint64_t head = 0;
  if (read_at(file, reinterpret_cast<char*>(&head), sizeof head, 0) != sizeof head) head = 0;
  // Reads of the frames come after this one.
  const uint64_t end = std::atomic_ref<uint64_t>(head).load(std::memory_order_acquire);
  return std::max(static_cast<size_t>(little(end)), kFramesBegin);
}

int64_t read_at(int file, char* to, size_t size, size_t at) {
  size_t done = 0;
  while (done < size) {
#if defined(_WIN32)
    const auto most = static_cast<unsigned>(std::min(size - done, size_t{1} << 30));
    const auto read =
        _lseeki64(file, static_cast<int64_t>(at + done), SEEK_SET) < 0 ? -1 : _read(file, to + done, most);
#else
    const auto read = pread(file, to + done, size - done, static_cast<off_t>(at + done));
#endif
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return -1;
    if (read == 0) break;
    done += static_cast<size_t>(read);
  }
  return static_cast<int64_t>(done);
}

}  // namespace clickfleet
