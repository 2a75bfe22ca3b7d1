// A log of row images. Each image is one byte, the kind of the row, followed by the hot and cold parts of the
// row. The log grows in small blocks: doubling one large buffer would copy it while pushes wait.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "layout.h"
#include "memory.h"

namespace clickfleet {

class ImageLog {
 public:
  static constexpr size_t kBlock = 8192;

  ImageLog(Budget& budget, const Layout& layout) : budget_(&budget), layout_(&layout) {}
  ~ImageLog() { clear(); }
  ImageLog(ImageLog&& other) noexcept
      : budget_(other.budget_),
        layout_(other.layout_),
        blocks_(std::move(other.blocks_)),
        room_(other.room_),
        size_(other.size_) {
    other.blocks_.clear();
    other.room_ = other.size_ = 0;
  }
  ImageLog(const ImageLog&) = delete;
  ImageLog& operator=(const ImageLog&) = delete;
  ImageLog& operator=(ImageLog&&) = delete;

  size_t size() const { return size_; }

  void append(Row row, RowKind kind) {
    const auto hot = static_cast<size_t>(layout_->hot_bytes(kind)),
               cold = static_cast<size_t>(layout_->cold_bytes(kind));
    const size_t bytes = 1 + hot + cold;
    if (room_ < bytes) {
      const size_t block = bytes > kBlock ? bytes : kBlock;
      budget_->take(block);
      blocks_.push_back({std::make_unique_for_overwrite<char[]>(block), block, 0});
      room_ = block;
    }
    Block& last = blocks_.back();
    char* to = last.data.get() + last.used;
    *to = static_cast<char>(kind);
    std::memcpy(to + 1, row.hot, hot);
    std::memcpy(to + 1 + hot, row.cold, cold);
    last.used += bytes;
    room_ -= bytes;
    ++size_;
  }

  // Calls visit(row, kind) for every image.
  template <class Visit>
  void each(const Visit& visit) const {
    for (const Block& block : blocks_)
      for (size_t at = 0; at < block.used;) {
        const auto kind = static_cast<RowKind>(block.data[at]);
        char* hot = block.data.get() + at + 1;
        visit(Row{hot, hot + layout_->hot_bytes(kind)}, kind);
        at += 1 + static_cast<size_t>(layout_->bytes(kind));
      }
  }

  void clear() {
    for (const Block& block : blocks_) budget_->give(block.bytes);
    blocks_.clear();
    room_ = size_ = 0;
  }

 private:
  struct Block {
    std::unique_ptr<char[]> data;
    size_t bytes, used;
  };
  Budget* budget_;
  const Layout* layout_;
  std::vector<Block> blocks_;
  size_t room_ = 0, size_ = 0;
};

}  // namespace clickfleet
