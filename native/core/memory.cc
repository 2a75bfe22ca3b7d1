#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define CLICKFLEET_MMAP
#endif

namespace clickfleet {
namespace {

[[maybe_unused]] constexpr size_t kHuge = size_t{1} << 21;
[[maybe_unused]] constexpr size_t kMapped = size_t{1} << 16;  // below this the heap is the better place

[[maybe_unused]] size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

char* allocate_zeroed(size_t bytes) {
  void* p = std::calloc(1, bytes);
  if (p == nullptr) throw std::bad_alloc();
  return static_cast<char*>(p);
}

}  // namespace

#if defined(CLICKFLEET_MMAP) && !defined(CLICKFLEET_SANITIZED)

char* allocate_pages(size_t bytes) {
  if (bytes < kMapped) return allocate_zeroed(bytes);
  const bool huge = bytes >= kHuge;
  // mmap aligns to small pages only: ask for more, then return the ends.
  const size_t want = round_up(bytes, 4096) + (huge ? kHuge : 0);
  void* raw = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  if (!huge) return start;
  char* aligned = start + (round_up(reinterpret_cast<size_t>(start), kHuge) - reinterpret_cast<size_t>(start));
  char* end = aligned + round_up(bytes, 4096);
  if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
  if (end != start + want) munmap(end, static_cast<size_t>(start + want - end));
#ifdef MADV_HUGEPAGE
  madvise(aligned, bytes, MADV_HUGEPAGE);
#endif
  return aligned;
}

void free_pages(char* pages, size_t bytes) {
  if (bytes < kMapped)
    std::free(pages);
  else
    munmap(pages, round_up(bytes, 4096));
}

#else  // other systems, and sanitizers, which watch the heap but not mappings

char* allocate_pages(size_t bytes) { return allocate_zeroed(bytes); }

void free_pages(char* pages, size_t) { std::free(pages); }

#endif

ChunkPool::ChunkPool(Budget& budget, size_t chunk_bytes) : budget_(budget), chunk_bytes_(chunk_bytes) {}

#if defined(CLICKFLEET_MMAP) && !defined(CLICKFLEET_SANITIZED)

ChunkPool::~ChunkPool() {
  for (const Region& region : regions_) free_pages(region.start, region.bytes);
}

char* ChunkPool::allocate() {
  const std::lock_guard guard(lock_);
  if (!free_.empty()) {
    char* chunk = free_.back();
    free_.pop_back();
    budget_.take(chunk_bytes_);
    return chunk;
  }
  if (regions_.empty() || carved_ + chunk_bytes_ > regions_.back().bytes) {
    size_t bytes = std::max(chunk_bytes_ * 4, std::min(total_ / 8, size_t{64} << 20));
    if (bytes > kHuge / 2) bytes = round_up(bytes, kHuge);
    regions_.push_back({allocate_pages(bytes), bytes});
    total_ += bytes;
    carved_ = 0;
  }
  char* chunk = regions_.back().start + carved_;
  carved_ += chunk_bytes_;
  budget_.take(chunk_bytes_);
  return chunk;
}

void ChunkPool::free(char* chunk) {
  const std::lock_guard guard(lock_);
#ifdef __linux__
  madvise(chunk, chunk_bytes_, MADV_DONTNEED);  // zero again when next touched
#else
  std::memset(chunk, 0, chunk_bytes_);
#endif
  free_.push_back(chunk);
  budget_.give(chunk_bytes_);
}

#else

ChunkPool::~ChunkPool() = default;  // arenas free every chunk before their pool goes

char* ChunkPool::allocate() {
  char* chunk = allocate_pages(chunk_bytes_);
  budget_.take(chunk_bytes_);
  return chunk;
}

void ChunkPool::free(char* chunk) {
  free_pages(chunk, chunk_bytes_);
  budget_.give(chunk_bytes_);
}

#endif

}  // namespace clickfleet
