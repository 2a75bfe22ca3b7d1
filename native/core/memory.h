// Memory for the table. A Budget counts every byte, so a memory limit is exact.
#pragma once
#include <atomic>
#include <cstddef>
#include <vector>

namespace clickfleet {

class Budget {
 public:
  explicit Budget(Budget* whole = nullptr) : whole_(whole) {}  // a nested budget also counts towards `whole`
  void take(size_t bytes) {
    if (whole_ != nullptr) whole_->take(bytes);
    const size_t now = used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    size_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void give(size_t bytes) {
    if (whole_ != nullptr) whole_->give(bytes);
    used_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  size_t used() const { return used_.load(std::memory_order_relaxed); }
  size_t peak() const { return peak_.load(std::memory_order_relaxed); }

 private:
  Budget* whole_;
  std::atomic<size_t> used_{0}, peak_{0};
};

// Prefetches into the second-level cache: the first level can wait for too few lines at a time.
inline void prefetch(const void* at) {
#if defined(__GNUC__)
  __builtin_prefetch(at, 0, 2);
#else
  static_cast<void>(at);
#endif
}

// Allocates zeroed memory aligned to a cache line. From 2 MB on it is aligned for huge pages and requests them, because
// random row accesses cost TLB misses.
char* allocate_pages(size_t bytes);
void free_pages(char* pages, size_t bytes);

// An array of numbers in such memory, counted by a budget.
template <class T>
class CountedPages {
 public:
  CountedPages(Budget& budget, size_t size) : budget_(budget), bytes_(size * sizeof(T)) {
    budget_.take(bytes_);
    data_ = reinterpret_cast<T*>(allocate_pages(bytes_));
  }
  ~CountedPages() {
    free_pages(reinterpret_cast<char*>(data_), bytes_);
    budget_.give(bytes_);
  }
  CountedPages(const CountedPages&) = delete;
  CountedPages& operator=(const CountedPages&) = delete;
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Budget& budget_;
  size_t bytes_;
  T* data_;
};

// An allocator for containers of the table: std::vector<T, CountingAllocator<T>> counts its own memory.
template <class T>
struct CountingAllocator {
  using value_type = T;
  Budget* budget;
  explicit CountingAllocator(Budget* b) : budget(b) {}
  template <class U>
  CountingAllocator(const CountingAllocator<U>& other) : budget(other.budget) {}  // NOLINT(google-explicit-constructor)
  T* allocate(size_t n) {
    budget->take(n * sizeof(T));
    return static_cast<T*>(::operator new(n * sizeof(T)));
  }
  void deallocate(T* p, size_t n) {
    budget->give(n * sizeof(T));
    ::operator delete(p);
  }
  friend bool operator==(const CountingAllocator& a, const CountingAllocator& b) { return a.budget == b.budget; }
};

template <class T>
using CountedVector = std::vector<T, CountingAllocator<T>>;

}  // namespace clickfleet
