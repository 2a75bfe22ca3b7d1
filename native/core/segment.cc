#include "segment.h"

#include "error.h"

namespace clickfleet {
namespace {

uint32_t checksum(uint64_t id, RowKind kind, uint32_t position, const char* image, size_t bytes) {
  const uint64_t hash = hash_bytes(mix64(id << 37 ^ uint64_t{kind} << 32 ^ position), image, bytes);
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace

Segment::Segment(uint64_t id, uint32_t clock, const Layout& layout, Budget& budget, const RowCounts& rows)
    : id_(id), clock_(clock), layout_(layout), bytes_(file_bytes(layout, rows)) {
  uint64_t start = 0;
  for (RowKind kind = 0; kind < layout.kinds(); ++kind) {
    start_.push_back(start);
    start += whole_sectors(rows[kind] * record_bytes(kind));
    indices_.push_back(std::make_unique<SegmentIndex>(budget, rows[kind]));
  }
}

void Segment::seal(char* record, RowKind kind, uint32_t position) const {
  const size_t bytes = record_bytes(kind) - kChecksum;
  store(record + bytes, checksum(id_, kind, position, record, bytes));
}

void Segment::check(const char* record, RowKind kind, uint32_t position) const {
  const size_t bytes = record_bytes(kind) - kChecksum;
  if (load<uint32_t>(record + bytes) == checksum(id_, kind, position, record, bytes)) return;
  throw Error(file_->path() + " is damaged: a row in it does not match its checksum" +
              "\n  check the disk of table.disk, then resume from the last checkpoint, which is complete");
}

void Segment::hold(Budget& budget) {
  memory_ = std::make_shared<Sectors>(budget, bytes_);
  for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {  // nothing but rows goes to the disk
    const uint64_t end = offset(kind, indices_[kind]->rows());
    std::memset(memory_->data() + end, 0, whole_sectors(end) - end);
  }
}

void Segment::write(std::unique_ptr<File> file) {
  for (RowKind kind = 0; kind < layout_.kinds(); ++kind)
    for (uint32_t i = 0; i < indices_[kind]->rows(); ++i) seal(record(kind, i), kind, i);
  file->write(memory_->data(), memory_->size(), 0);
  std::shared_ptr<Sectors> released;
  const std::lock_guard guard(lock_);
  file_ = std::move(file);
  released.swap(memory_);
}

void Segment::copy(RowKind kind, uint32_t position, char* image) const {
  const size_t bytes = record_bytes(kind) - kChecksum;
  const uint64_t at = offset(kind, position);
  if (const auto held = memory(); held != nullptr) {
    std::memcpy(image, held->data() + at, bytes);
    return;
  }
  Budget uncounted;
  const uint64_t begin = sectors_below(at);
  const Sectors buffer(uncounted, at - begin + record_bytes(kind));
  file_->read(buffer.data(), buffer.size(), begin);
  check(buffer.data() + (at - begin), kind, position);
  std::memcpy(image, buffer.data() + (at - begin), bytes);
}

char* Segment::records(RowKind kind, uint32_t first, uint32_t last, Budget& budget,
                       std::unique_ptr<Sectors>& buffer) const {
  const uint64_t at = offset(kind, first), begin = sectors_below(at);
  const size_t bytes = (last - first) * record_bytes(kind);
  buffer = std::make_unique<Sectors>(budget, at - begin + bytes);
  char* const records = buffer->data() + (at - begin);
  if (const auto held = memory(); held != nullptr) {  // without the checksums, which are written meanwhile
    for (uint32_t i = 0; i < last - first; ++i)
      std::memcpy(records + i * record_bytes(kind), held->data() + at + i * record_bytes(kind),
                  record_bytes(kind) - kChecksum);
    return records;
  }
  file_->read(buffer->data(), buffer->size(), begin);
  for (uint32_t i = first; i < last; ++i) check(records + (i - first) * record_bytes(kind), kind, i);
  return records;
}

}  // namespace clickfleet
