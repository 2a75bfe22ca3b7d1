#include "read_queue.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.h"
#include "segment.h"

#if defined(__linux__) && !defined(CLICKFLEET_PORTABLE) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(SYS_io_uring_setup) && defined(IORING_FEAT_SINGLE_MMAP)
#define CLICKFLEET_RING
#endif
#endif

namespace clickfleet {
namespace {

constexpr size_t kThreads = 8;

}  // namespace

void ReadGroup::wait() {
  std::unique_lock guard(lock_);
  changed_.wait(guard, [&] { return left_ == 0; });
  if (!error_.empty()) throw Error(error_);
}

#ifdef CLICKFLEET_RING

// The queues that this process shares with the kernel.
struct ReadQueue::Ring {
  int descriptor = -1;
  void *memory = MAP_FAILED, *entries = MAP_FAILED;
  size_t memory_bytes = 0, entries_bytes = 0;
  unsigned *submit_tail = nullptr, *submit_mask = nullptr, *submit_order = nullptr;
  unsigned *complete_head = nullptr, *complete_tail = nullptr, *complete_mask = nullptr;
  io_uring_sqe* submitted = nullptr;
  io_uring_cqe* completed = nullptr;
  bool fixed = false;  // the memory of reads is registered

  explicit Ring(unsigned depth) {
    io_uring_params parameters{};
    descriptor = static_cast<int>(syscall(SYS_io_uring_setup, depth, &parameters));
    if (descriptor < 0 || (parameters.features & IORING_FEAT_SINGLE_MMAP) == 0) return;
    memory_bytes = std::max(parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned),
                            parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe));
    entries_bytes = parameters.sq_entries * sizeof(io_uring_sqe);
    constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_POPULATE;
    memory = mmap(nullptr, memory_bytes, kProtection, kFlags, descriptor, IORING_OFF_SQ_RING);
    entries = mmap(nullptr, entries_bytes, kProtection, kFlags, descriptor, IORING_OFF_SQES);
    if (!usable()) return;
    const auto at = [&](unsigned offset) { return static_cast<char*>(memory) + offset; };
    submit_tail = reinterpret_cast<unsigned*>(at(parameters.sq_off.tail));
    submit_mask = reinterpret_cast<unsigned*>(at(parameters.sq_off.ring_mask));
    submit_order = reinterpret_cast<unsigned*>(at(parameters.sq_off.array));
    complete_head = reinterpret_cast<unsigned*>(at(parameters.cq_off.head));
    complete_tail = reinterpret_cast<unsigned*>(at(parameters.cq_off.tail));
    complete_mask = reinterpret_cast<unsigned*>(at(parameters.cq_off.ring_mask));
    submitted = static_cast<io_uring_sqe*>(entries);
    completed = reinterpret_cast<io_uring_cqe*>(at(parameters.cq_off.cqes));
  }
  ~Ring() {
    if (memory != MAP_FAILED) munmap(memory, memory_bytes);
    if (entries != MAP_FAILED) munmap(entries, entries_bytes);
    if (descriptor >= 0) close(descriptor);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool usable() const { return memory != MAP_FAILED && entries != MAP_FAILED; }

  void put(int file, char* to, size_t bytes, uint64_t at, uint64_t slot) const {
    const unsigned tail = *submit_tail, place = tail & *submit_mask;
    io_uring_sqe& entry = submitted[place];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
    entry.fd = file;
    entry.addr = reinterpret_cast<uint64_t>(to);
    entry.len = static_cast<unsigned>(bytes);
    entry.off = at;
    entry.user_data = slot;
    submit_order[place] = place;
    __atomic_store_n(submit_tail, tail + 1, __ATOMIC_RELEASE);
  }

  // Tells the kernel the memory of all reads once, so that it need not look it up for each. It may refuse.
  void register_memory(char* memory_of_reads, size_t bytes) {
    const iovec all{memory_of_reads, bytes};
    fixed = syscall(SYS_io_uring_register, descriptor, IORING_REGISTER_BUFFERS, &all, 1) == 0;
  }

  // Submits this many entries and waits for some completions. Returns the number that the kernel took.
  unsigned enter(unsigned entries_to_submit, unsigned completions) const {
    const long n =
        syscall(SYS_io_uring_enter, descriptor, entries_to_submit, completions, IORING_ENTER_GETEVENTS, nullptr, 0);
    return n < 0 ? 0 : static_cast<unsigned>(n);  // interrupted or busy: the caller tries again
  }

  template <class Visit>
  void each_completed(const Visit& visit) const {
    unsigned head = *complete_head;
    const unsigned tail = __atomic_load_n(complete_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = completed[head & *complete_mask];
      visit(entry.user_data, entry.res);
    }
    __atomic_store_n(complete_head, head, __ATOMIC_RELEASE);
  }
};

#else

struct ReadQueue::Ring {
  explicit Ring(unsigned) {}
  static bool usable() { return false; }
  static void register_memory(char*, size_t) {}
};

#endif

ReadQueue::ReadQueue(Budget& budget, size_t bytes, size_t depth, bool ring, Done done)
    : done_(std::move(done)),
      depth_(depth),
      span_(whole_sectors(bytes) + kSector),  // a record may begin anywhere in a sector
      buffers_(budget, depth_ * span_) {
  if (ring) ring_ = std::make_unique<Ring>(static_cast<unsigned>(depth_));
  if (ring_ != nullptr && !ring_->usable()) ring_.reset();
  if (ring_ != nullptr) ring_->register_memory(buffers_.data(), buffers_.size());
}

ReadQueue::~ReadQueue() {
  {
    const std::lock_guard guard(lock_);
    stop_ = true;
    changed_.notify_all();
  }
  for (auto& thread : threads_) thread.join();
}

void ReadQueue::start() {
  if (ring_ != nullptr) {
    threads_.emplace_back([this] { run_ring(); });
    return;
  }
  for (size_t i = 0; i < std::min(kThreads, depth_); ++i) threads_.emplace_back([this, i] { run_thread(i); });
}

void ReadQueue::add(std::vector<Read>&& reads, bool urgent) {
  if (reads.empty()) return;
  const std::lock_guard guard(lock_);
  if (threads_.empty()) start();
  auto& queue = urgent ? urgent_ : later_;
  left_ += reads.size();
  for (Read& read : reads) queue.push_back(std::move(read));
  reads.clear();
  changed_.notify_all();
}

bool ReadQueue::take(Read& read) {
  for (auto* queue : {&urgent_, &later_}) {
    if (queue->empty()) continue;
    read = std::move(queue->front());
    queue->pop_front();
    return true;
  }
  return false;
}

void ReadQueue::finish(Read& read, const char* data, const std::string& error) {
  done_(read, data, error);
  ReadGroup* const group = read.group;
  read = {};  // releases the segment before the waiting caller continues
  --left_;
  if (group != nullptr) group->done();
}

void ReadQueue::run_thread(size_t number) {
  Read read;
  for (;;) {
    {
      std::unique_lock guard(lock_);
      changed_.wait(guard, [&] { return stop_ || !urgent_.empty() || !later_.empty(); });
      if (stop_) return;
      take(read);
    }
    const uint64_t at = read.segment->offset(read.kind, read.position), begin = sectors_below(at);
    const size_t bytes = read.segment->record_bytes(read.kind);
    std::string error;
    try {
      read.segment->file().read(buffer(number), whole_sectors(at - begin + bytes), begin);
    } catch (const std::exception& e) {
      error = e.what();
    }
    finish(read, buffer(number) + (at - begin), error);
  }
}

#ifdef CLICKFLEET_RING

void ReadQueue::run_ring() {
  std::vector<Read> flying(depth_);
  std::vector<uint32_t> free;
  for (size_t i = depth_; i-- > 0;) free.push_back(static_cast<uint32_t>(i));
  unsigned unsubmitted = 0;
  for (;;) {
    {
      std::unique_lock guard(lock_);
      if (free.size() == depth_) {
        changed_.wait(guard, [&] { return stop_ || !urgent_.empty() || !later_.empty(); });
        if (stop_) return;
      }
      while (!stop_ && !free.empty()) {
        const uint32_t slot = free.back();
        if (!take(flying[slot])) break;
        free.pop_back();
        const Read& read = flying[slot];
        const uint64_t at = read.segment->offset(read.kind, read.position), begin = sectors_below(at);
        ring_->put(read.segment->file().descriptor(), buffer(slot),
                   whole_sectors(at - begin + read.segment->record_bytes(read.kind)), begin, slot);
        ++unsubmitted;
      }
    }
    // Few wake-ups: a read takes a tenth of a millisecond, and those in flight end at about the same time.
    constexpr size_t kTogether = 8;
    unsubmitted -= ring_->enter(unsubmitted, static_cast<unsigned>(std::min(kTogether, depth_ - free.size())));
    ring_->each_completed([&](uint64_t slot, int result) {
      Read& read = flying[slot];
      const uint64_t at = read.segment->offset(read.kind, read.position), begin = sectors_below(at);
      const size_t bytes = whole_sectors(at - begin + read.segment->record_bytes(read.kind));
      std::string error;
      if (result != static_cast<int>(bytes)) try {  // try again alone, for a clear error
          read.segment->file().read(buffer(slot), bytes, begin);
        } catch (const std::exception& e) {
          error = e.what();
        }
      finish(read, buffer(slot) + (at - begin), error);
      free.push_back(static_cast<uint32_t>(slot));
    });
  }
}

#else

void ReadQueue::run_ring() {}

#endif

}  // namespace clickfleet
