#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if (defined(__unix__) || defined(__APPLE__)) && !defined(CLICKFLEET_PORTABLE) && \
    !defined(CLICKFLEET_SANITIZED)  // sanitizers watch the heap, not mappings
#include <sys/mman.h>
#define CLICKFLEET_MMAP
#endif

namespace clickfleet {
namespace {

constexpr size_t kLine = 64;
#if defined(__x86_64__)
[[maybe_unused]] constexpr size_t kSmallPage = 4096;
#else
[[maybe_unused]] constexpr size_t kSmallPage = size_t{1} << 16;  // arm64 has pages of 4, 16 or 64 KB
#endif
[[maybe_unused]] constexpr size_t kHugePage = size_t{1} << 21;
[[maybe_unused]] constexpr size_t kMapped = size_t{1} << 16;  // smaller blocks come from the heap

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

char* allocate_small(size_t bytes) {
  void* p = ::operator new(bytes, std::align_val_t{kLine});
  std::memset(p, 0, bytes);
  return static_cast<char*>(p);
}

void free_small(char* p) { ::operator delete(p, std::align_val_t{kLine}); }

}  // namespace

#ifdef CLICKFLEET_MMAP

char* allocate_pages(size_t bytes) {
  if (bytes < kMapped) return allocate_small(bytes);
  const bool huge = bytes >= kHugePage;
  const size_t size = round_up(bytes, kSmallPage);
  // mmap aligns to small pages only: map more than needed, then unmap both ends.
  const size_t want = size + (huge ? kHugePage : 0);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_POPULATE
  if (!huge) flags |= MAP_POPULATE;  // a shelf uses every page at once: avoid a page fault for each
#endif
  void* raw = mmap(nullptr, want, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  if (!huge) return start;
  const auto address = reinterpret_cast<size_t>(start);
  char* aligned = start + (round_up(address, kHugePage) - address);
  if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
  if (aligned + size != start + want) munmap(aligned + size, static_cast<size_t>(start + want - aligned) - size);
#ifdef MADV_HUGEPAGE
  madvise(aligned, size, MADV_HUGEPAGE);
#endif
  return aligned;
}

void free_pages(char* pages, size_t bytes) {
  if (bytes < kMapped)
    free_small(pages);
  else
    munmap(pages, round_up(bytes, kSmallPage));
}

#else

char* allocate_pages(size_t bytes) { return allocate_small(round_up(bytes, kLine)); }

void free_pages(char* pages, size_t) { free_small(pages); }

#endif

}  // namespace clickfleet
