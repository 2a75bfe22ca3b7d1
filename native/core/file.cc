#include "file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <mutex>
#include <new>
#include <system_error>

#include "error.h"

#if (defined(__unix__) || defined(__APPLE__)) && !defined(CLICKFLEET_PORTABLE)
#include <fcntl.h>
#include <unistd.h>
#define CLICKFLEET_POSIX
#endif

namespace clickfleet {

Sectors::Sectors(Budget& budget, size_t bytes) : budget_(budget), bytes_(whole_sectors(bytes)) {
  data_ = static_cast<char*>(::operator new(std::max(bytes_, kSector), std::align_val_t{kSector}));
  budget_.take(bytes_);
}

Sectors::~Sectors() {
  ::operator delete(data_, std::align_val_t{kSector});
  budget_.give(bytes_);
}

void File::fail(const char* what, int error) const {
  throw Error(std::string("cannot ") + what + " " + path_ + ": " + std::generic_category().message(error) +
              "\n  check table.disk; the last checkpoint is complete, so training can resume from it");
}

#ifdef CLICKFLEET_POSIX

struct File::Portable {};

File::File(std::string path, Budget& disk) : path_(std::move(path)), disk_(disk) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
#ifdef O_DIRECT
  descriptor_ = open(path_.c_str(), kFlags | O_DIRECT, 0600);
  if (descriptor_ < 0 && errno == EINVAL) {  // this file system has no direct access; it may have created the file
    unlink(path_.c_str());
    descriptor_ = open(path_.c_str(), kFlags, 0600);
  }
#else
  descriptor_ = open(path_.c_str(), kFlags, 0600);
#endif
  if (descriptor_ < 0) fail("create", errno);
}

File::~File() {
  close(descriptor_);
  unlink(path_.c_str());
  disk_.give(bytes_);
}

void File::write(const char* from, size_t bytes, uint64_t at) {
  disk_.take(bytes);
  bytes_ += bytes;
  while (bytes > 0) {
    const ssize_t n = pwrite(descriptor_, from, std::min(bytes, size_t{8} << 20), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("write", n < 0 ? errno : ENOSPC);
    from += n;
    at += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void File::read(char* to, size_t bytes, uint64_t at) const {
  while (bytes > 0) {
    const ssize_t n = pread(descriptor_, to, bytes, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("read", n < 0 ? errno : EIO);
    to += n;
    at += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

#else

struct File::Portable {
  std::FILE* file = nullptr;
  std::mutex lock;

  bool seek(uint64_t at) const {
#if defined(_MSC_VER)
    return _fseeki64(file, static_cast<long long>(at), SEEK_SET) == 0;
#else
    return std::fseek(file, static_cast<long>(at), SEEK_SET) == 0;
#endif
  }
};

File::File(std::string path, Budget& disk)
    : path_(std::move(path)), disk_(disk), portable_(std::make_unique<Portable>()) {
  portable_->file = std::fopen(path_.c_str(), "w+bx");
  if (portable_->file == nullptr) fail("create", errno);
}

File::~File() {
  std::fclose(portable_->file);
  std::remove(path_.c_str());
  disk_.give(bytes_);
}

void File::write(const char* from, size_t bytes, uint64_t at) {
  disk_.take(bytes);
  bytes_ += bytes;
  const std::lock_guard guard(portable_->lock);
  if (!portable_->seek(at) || std::fwrite(from, 1, bytes, portable_->file) != bytes ||
      std::fflush(portable_->file) != 0)
    fail("write", errno != 0 ? errno : ENOSPC);
}

void File::read(char* to, size_t bytes, uint64_t at) const {
  const std::lock_guard guard(portable_->lock);
  if (!portable_->seek(at) || std::fread(to, 1, bytes, portable_->file) != bytes)
    fail("read", errno != 0 ? errno : EIO);
}

#endif

}  // namespace clickfleet
