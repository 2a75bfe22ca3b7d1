#include "disk.h"

#include <algorithm>
#include <chrono>

#include "cold.h"
#include "error.h"
#include "stripe.h"

namespace clickfleet {

DiskMemory::DiskMemory(size_t room, const Layout& layout) {
  constexpr size_t kMost = size_t{256} << 20;
  const size_t piece = room / 16, record = Segment::most_record_size(layout), span = whole_sectors(record) + kSector;
  const size_t stage = std::min(piece, kMost) / kStripes;
  stage_slots = static_cast<uint32_t>(std::clamp<size_t>(stage / Stage::slot_bytes(layout), 8, size_t{1} << 20));
  unwritten = std::max(std::min(piece, kMost), room / 28);  // a stripe that is resized takes this place
  depth = std::clamp<size_t>(piece / 2 / span, 4, 256);
  chunk = whole_sectors(std::max(std::min(piece / 2 / (kMergeInputs + 1), size_t{1} << 20), span));
  total = kStripes * stage_slots * Stage::slot_bytes(layout) + unwritten + depth * span + (kMergeInputs + 1) * chunk;
}

Disk::Disk(const Config& config, const Layout& layout, size_t room, Budget& all, Work work)
    : folder_(config.disk), memory_(room, layout), scratch_(&all), work_(std::move(work)) {
  new_file();  // fails now if the directory cannot be used
  reads_ = std::make_unique<ReadQueue>(
      scratch_, Segment::most_record_size(layout), memory_.depth, config.disk_ring,
      [this](Read& read, const char* record, const std::string& error) { done(read, record, error); });
}

Disk::~Disk() { stop(); }

void Disk::stop() {
  {
    const std::lock_guard guard(lock_);
    stop_ = stopping_ = true;
    changed_.notify_all();
  }
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  reads_.reset();
}

void Disk::start() {
  if (!threads_.empty() || stop_) return;
  threads_.emplace_back([this] { run_writer(); });
  threads_.emplace_back([this] { run_merger(); });
  threads_.emplace_back([this] { run_announcer(); });
}

std::unique_ptr<File> Disk::new_file() {
  return std::make_unique<File>(folder_ + "/segment-" + std::to_string(++ids_), files_);
}

// ---- writing ----

void Disk::write_later(std::shared_ptr<Segment> segment) {
  const std::lock_guard guard(lock_);
  start();
  unwritten_bytes_ += segment->file_bytes();
  unwritten_.push_back(std::move(segment));
  changed_.notify_all();
}

size_t Disk::unwritten() {
  const std::lock_guard guard(lock_);
  return unwritten_bytes_;
}

void Disk::run_writer() {
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [&] { return stop_ || !unwritten_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Segment> segment = unwritten_.front();
    guard.unlock();
    std::string error;
    try {
      if (segment.use_count() > 2) segment->write(new_file());  // else a merge has already replaced it
    } catch (const std::exception& e) {
      error = e.what();
    }
    guard.lock();
    write_error_ = error;
    if (error.empty()) {
      unwritten_.pop_front();
      unwritten_bytes_ -= segment->file_bytes();
      merge_wanted_ = true;
      changed_.notify_all();
      continue;
    }
    ++failures_;
    changed_.notify_all();
    changed_.wait(guard, [&] { return stop_ || retry_; });
    retry_ = false;
  }
}

void Disk::check() {
  std::unique_lock guard(lock_);
  if (!merge_error_.empty()) {
    const uint64_t merged = merges_;
    merge_error_.clear();
    merge_wanted_ = true;
    changed_.notify_all();
    changed_.wait(guard,
                  [&] { return stop_ || merges_ != merged || !merge_error_.empty() || (!merge_wanted_ && !merging_); });
    if (!merge_error_.empty()) throw Error(merge_error_);
  }
  if (write_error_.empty()) return;
  const uint64_t before = failures_;
  retry_ = true;
  changed_.notify_all();
  changed_.wait(guard, [&] { return stop_ || write_error_.empty() || failures_ != before; });
  if (!write_error_.empty()) throw Error(write_error_);
}

void Disk::wait_for_room(size_t bytes) {
  for (;;) {
    check();
    wait_for_writes(bytes);
    const std::lock_guard guard(lock_);
    if (write_error_.empty()) return;
  }
}

void Disk::wait_for_writes(size_t bytes) {
  std::unique_lock guard(lock_);
  changed_.wait(guard, [&] {
    return stop_ || unwritten_.empty() || unwritten_bytes_ + bytes <= memory_.unwritten || !write_error_.empty();
  });
}

// ---- merging ----

void Disk::merge_soon() {
  const std::lock_guard guard(lock_);
  merge_wanted_ = true;
  changed_.notify_all();
}

bool Disk::merge_and_wait() {
  std::unique_lock guard(lock_);
  start();
  const uint64_t before = merges_;
  merge_wanted_ = true;
  changed_.notify_all();
  changed_.wait(guard, [&] { return stop_ || merges_ != before || (!merge_wanted_ && !merging_); });
  return merges_ != before;
}

void Disk::run_merger() {
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [&] { return stop_ || merge_wanted_; });
    if (stop_) return;
    merge_wanted_ = false;
    merging_ = true;
    for (bool more = true; more && !stop_;) {
      guard.unlock();
      std::string error;
      try {
        more = work_.merge();
      } catch (const std::exception& e) {
        error = e.what();
        more = false;
      }
      guard.lock();
      if (!error.empty()) merge_error_ = error;
      if (more) ++merges_;
      changed_.notify_all();
    }
    merging_ = false;
    changed_.notify_all();
  }
}

// ---- reading ----

void Disk::done(Read& read, const char* record, std::string error) {
  ++reads_done;
  bool found = false;
  if (error.empty()) try {
      read.segment->check(record, read.kind, read.position);
      found = load<uint64_t>(record) == read.key;
    } catch (const std::exception& e) {
      error = e.what();
    }
  if (found && read.to != nullptr) {
    std::memcpy(read.to, record, read.segment->record_bytes(read.kind) - Segment::kChecksum);
    *read.found = true;
  }
  if (!error.empty() && read.group != nullptr) read.group->fail(error);
  if (read.stage == nullptr) return;
  if (found)
    read.stage->fill(read.slot, read.ticket, record,
                     {read.segment->id(), read.position, read.segment->clock(), read.kind});
  else
    read.stage->cancel(read.slot, read.ticket);
}

void Disk::announce(const uint64_t* keys, size_t n) {
  constexpr size_t kBatches = 16;  // that may wait: later ones would come too late
  const std::lock_guard guard(lock_);
  if (threads_.empty() || announced_.size() >= kBatches) return;
  announced_.emplace_back(keys, keys + n);
  changed_.notify_all();
}

void Disk::run_announcer() {
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [&] { return stop_ || !announced_.empty(); });
    if (stop_) return;
    std::vector<uint64_t> keys = std::move(announced_.front());
    announced_.pop_front();
    looking_ = true;
    guard.unlock();
    work_.look_ahead(keys);
    guard.lock();
    looking_ = false;
    changed_.notify_all();
  }
}

void Disk::wait_until_idle() {
  std::unique_lock guard(lock_);
  changed_.wait(guard, [&] {
    const bool written = unwritten_.empty() || !write_error_.empty();
    return stop_ || (written && !merging_ && !merge_wanted_ && announced_.empty() && !looking_);
  });
  guard.unlock();
  while (!reads_->idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace clickfleet
