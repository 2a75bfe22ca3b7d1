// Reads of single records, many at a time, in the background. On Linux one thread keeps up to 256 reads in flight
// through io_uring, into memory that the kernel knows, and wakes up for several at once; where that is not allowed, a
// few threads read one record each. Measured on a virtual disk, a read costs 4 us of CPU through io_uring and 8 us in
// threads.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "file.h"
#include "layout.h"

namespace clickfleet {

class Segment;
class Stage;

// Counts the reads that one caller waits for.
class ReadGroup {
 public:
  void add(size_t reads) {
    const std::lock_guard guard(lock_);
    left_ += reads;
  }
  void done() {
    const std::lock_guard guard(lock_);
    if (--left_ == 0) changed_.notify_all();
  }
  void fail(const std::string& error) {
    const std::lock_guard guard(lock_);
    if (error_.empty()) error_ = error;
  }
  void wait();  // for all reads; throws the first error

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  size_t left_ = 0;
  std::string error_;
};

// One record to read.
struct Read {
  std::shared_ptr<const Segment> segment;
  uint64_t key = 0;
  uint32_t position = 0;
  RowKind kind = 0;
  // What becomes of the row: a copy for a caller who waits, a place in the stage, or both.
  char* to = nullptr;
  bool* found = nullptr;  // set if the record holds the key
  ReadGroup* group = nullptr;
  Stage* stage = nullptr;
  uint32_t slot = 0, ticket = 0;
};

class ReadQueue {
 public:
  // `bytes` is the size of the largest record, `depth` the number of reads in flight. `done` is called for each read
  // with the record, or with an error.
  using Done = std::function<void(Read& read, const char* record, const std::string& error)>;
  ReadQueue(Budget& budget, size_t bytes, size_t depth, bool ring, Done done);
  ~ReadQueue();  // waits for the reads in flight and drops those that wait
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;

  void add(std::vector<Read>&& reads, bool urgent);
  bool has_ring() const { return ring_ != nullptr; }
  bool idle() const { return left_ == 0; }  // nothing waits or is in flight

 private:
  struct Ring;
  void start();
  bool take(Read& read);  // the next read that waits; the caller holds the lock
  void run_ring();
  void run_thread(size_t number);
  void finish(Read& read, const char* data, const std::string& error);
  char* buffer(size_t slot) const { return buffers_.data() + slot * span_; }

  const Done done_;
  const size_t depth_, span_;
  Sectors buffers_;
  std::unique_ptr<Ring> ring_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Read> urgent_, later_;
  std::atomic<size_t> left_{0};
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace clickfleet
