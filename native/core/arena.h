// Rows of one width, kept without holes: a removed row is replaced by the last one.
#pragma once
#include <cstdint>
#include <cstring>

#include "memory.h"

namespace clickfleet {

class Arena {
 public:
  Arena(Budget& budget, ChunkPool& pool, int row_bytes, int chunk_shift)
      : budget_(budget), pool_(pool), row_bytes_(row_bytes), shift_(chunk_shift), chunks_(Counted<char*>(&budget)) {}
  ~Arena() {
    while (size_ > 0) drop_last();
    if (!chunks_.empty()) release_first();
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint32_t size() const { return size_; }
  int row_bytes() const { return row_bytes_; }
  char* at(uint32_t i) const {
    return chunks_[i >> shift_] + static_cast<size_t>(i & ((1U << shift_) - 1)) * static_cast<size_t>(row_bytes_);
  }

  // The number of a new row of zeros.
  uint32_t add() {
    if (size_ == capacity()) grow();
    char* row = at(size_);
    std::memset(row, 0, static_cast<size_t>(row_bytes_));
    return size_++;
  }

  void drop_last() {
    --size_;
    if ((size_ & ((1U << shift_) - 1)) == 0 && size_ > 0) {
      pool_.free(chunks_.back());
      chunks_.pop_back();
    }
  }

 private:
  // The first chunk starts small and doubles, so that a small table is small.
  uint32_t capacity() const {
    return chunks_.size() > 1 ? static_cast<uint32_t>(chunks_.size()) << shift_ : first_rows_;
  }
  void grow() {
    const uint32_t whole = 1U << shift_;
    if (first_rows_ == whole) {
      chunks_.push_back(pool_.allocate());
      return;
    }
    const uint32_t rows = first_rows_ == 0 ? (whole < 8 ? whole : 8) : first_rows_ * 2;
    const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(row_bytes_);
    char* chunk = nullptr;
    if (rows == whole) {
      chunk = pool_.allocate();
    } else {
      budget_.take(bytes);
      chunk = static_cast<char*>(::operator new(bytes));
    }
    if (chunks_.empty()) {
      chunks_.push_back(chunk);
    } else {
      std::memcpy(chunk, chunks_[0], static_cast<size_t>(size_) * static_cast<size_t>(row_bytes_));
      release_first();
      chunks_[0] = chunk;
    }
    first_rows_ = rows;
  }
  void release_first() {
    if (first_rows_ == 1U << shift_) {
      pool_.free(chunks_[0]);
    } else {
      budget_.give(static_cast<size_t>(first_rows_) * static_cast<size_t>(row_bytes_));
      ::operator delete(chunks_[0]);
    }
  }

  Budget& budget_;
  ChunkPool& pool_;
  const int row_bytes_;
  const int shift_;
  uint32_t size_ = 0;
  uint32_t first_rows_ = 0;
  CountedVector<char*> chunks_;
};

}  // namespace clickfleet
