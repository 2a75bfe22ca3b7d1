// The disk tier of a table: what holds its cold rows, and the threads that work for it.
//
// A table with a directory keeps every row in exactly one of two places: in a shelf in memory, or in a segment on disk
// (segment.h). Where a row is never shows in a result. It depends on the history and on timing, and a checkpoint does
// not record it.
//
//   spill    When the memory is full, a push first moves a sixteenth of a stripe to a new segment: the rows that were
//            shown least, where every round without a push halves the shows a little (Table::warmth). The segment is in
//            memory until a thread has written it; then a push never waits for the disk unless the disk is slower than
//            the spills for long.
//   fetch    A pull copies rows from disk and leaves them there; the copy waits in the stage of the stripe (stage.h).
//   The
//            push that follows moves the row to a shelf and clears its tag in the segment. A push without a pull reads
//            first. Nobody takes a row on disk for a new one: a key without a tag in any segment has no row, and a
//            tag alone is not believed until the key was read.
//   announce A reader tells the keys of coming batches. A thread looks up which of them are on disk and queues their
//            reads (read_queue.h), so that the rows are in the stage when they are pulled. Announcing is only a hint.
//   merge    A thread merges segments of similar size, so that a stripe has about ten, and rewrites those with many
//            dead rows. Segments are never changed otherwise, so they are read without locks.
//   events   Shrink, the end of a day and the publication of a base concern all rows. Rows on disk follow them when
//   they
//            are read (history.h). An event that may delete rows, or that consumers must hear of, reads the segments
//            that can contain such rows, once.
//   cuts     A cut reads the live rows of a range of hashes from both tiers under the lock of the stripe. A row keeps
//            its epoch on disk. If it moves to memory and is changed, its image goes to the undo log as always. Rows
//            that were not written since the cut are spilled to a segment with the clock of the cut.
//   limits   The memory limit covers shelves, index, stage, segments that are not written yet and the buffers of all
//            threads. The index takes 2.25 bytes per row on disk. The disk limit covers all files. Rows of both tiers
//            may take 70% of it, as if all were on disk; beyond that, the lowest-scored rows are deleted, by the same
//            order as under a memory limit. This depends only on the rows, so it can be repeated. The rest of the limit
//            is for dead rows and for merging.
//   errors   Records have checksums. If the disk is full, segments stay in memory, and the next push fails before it
//            changes anything. The files are scratch: checkpoints hold all rows, and nothing is read from a directory
//            that another process left.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "config.h"
#include "read_queue.h"
#include "segment.h"

namespace clickfleet {

// How the memory that the tier needs beside the index is divided.
struct DiskMemory {
  DiskMemory(size_t room, const Layout& layout);
  uint32_t stage_slots;  // of one stripe
  size_t unwritten;      // segments that are in memory until they are written
  size_t depth;          // reads in flight
  size_t chunk;          // a merge reads and writes this much at a time, of each segment
  size_t total;          // everything

  static constexpr size_t kMergeInputs = 12;
};

class Disk {
 public:
  struct Work {
    std::function<bool()> merge;                             // merges something; false if there is nothing to merge
    std::function<void(std::vector<uint64_t>&)> look_ahead;  // queues the reads of announced keys
  };

  Disk(const Config& config, const Layout& layout, size_t room, Budget& all, Work work);
  ~Disk();
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  const DiskMemory& memory() const { return memory_; }
  Budget& scratch() { return scratch_; }
  const Budget& scratch() const { return scratch_; }
  ReadQueue& reads() { return *reads_; }

  std::unique_ptr<File> new_file();
  uint64_t new_id() { return ++ids_; }
  void write_later(std::shared_ptr<Segment> segment);
  const Budget& files() const { return files_; }  // bytes on disk
  size_t unwritten();

  // If a thread has met an error, lets it try again, and throws the error if it persists. Nothing was lost.
  void check();
  // Waits until segments of this many bytes may be created. Throws like `check`.
  void wait_for_room(size_t bytes);
  // The same for callers that must go on: stops waiting after an error.
  void wait_for_writes(size_t bytes);
  void merge_soon();
  bool merge_and_wait();  // waits until something was merged; false if there is nothing to merge
  void announce(const uint64_t* keys, size_t n);
  void wait_until_idle();  // for tests: everything is written, merged and read ahead
  void stop();             // ends the threads
  bool stopping() const { return stopping_; }

  std::atomic<uint64_t> spilled{0}, fetched{0}, reads_done{0}, reads_waited{0}, pulled{0};

 private:
  void start();
  void run_writer();
  void run_merger();
  void run_announcer();
  void done(Read& read, const char* record, std::string error);

  const std::string folder_;
  const DiskMemory memory_;
  Budget scratch_, files_;
  const Work work_;
  std::unique_ptr<ReadQueue> reads_;
  std::atomic<uint64_t> ids_{0};

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Segment>> unwritten_;
  size_t unwritten_bytes_ = 0;
  std::string write_error_, merge_error_;
  uint64_t failures_ = 0, merges_ = 0;  // failed writes; merges done
  bool retry_ = false, merge_wanted_ = false, merging_ = false, looking_ = false, stop_ = false;
  std::deque<std::vector<uint64_t>> announced_;
  std::atomic<bool> stopping_{false};  // the same as stop_, without the lock
  std::vector<std::thread> threads_;
};

}  // namespace clickfleet
