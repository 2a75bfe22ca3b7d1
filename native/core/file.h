// A file of the disk tier: written once in whole sectors, then read at any position by any thread. Where the system
// allows it, reads and writes bypass the page cache: the table is the cache, and its memory limit stays honest.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "memory.h"

namespace clickfleet {

inline constexpr size_t kSector = 4096;
inline constexpr size_t sectors_below(size_t bytes) { return bytes / kSector * kSector; }
inline constexpr size_t whole_sectors(size_t bytes) { return sectors_below(bytes + kSector - 1); }

// Memory for whole sectors, aligned as direct reads and writes need it, and counted.
class Sectors {
 public:
  Sectors(Budget& budget, size_t bytes);
  ~Sectors();
  Sectors(const Sectors&) = delete;
  Sectors& operator=(const Sectors&) = delete;
  char* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  Budget& budget_;
  size_t bytes_;
  char* data_;
};

class File {
 public:
  File(std::string path, Budget& disk);  // creates the file
  ~File();                               // removes it
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  // Position, size and memory must be multiples of a sector, and bytes are written once. Both throw Error.
  void write(const char* from, size_t bytes, uint64_t at);
  void read(char* to, size_t bytes, uint64_t at) const;
  int descriptor() const { return descriptor_; }  // -1 where files have none

 private:
  [[noreturn]] void fail(const char* what, int error) const;  // with a number of errno

  std::string path_;
  Budget& disk_;
  size_t bytes_ = 0;
  int descriptor_ = -1;
  struct Portable;
  std::unique_ptr<Portable> portable_;
};

}  // namespace clickfleet
