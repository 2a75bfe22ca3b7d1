// Admits either many writers at a time or one exclusive caller: a cut, a shrink, an eviction. Writers that arrive later
// do not delay a waiting exclusive caller.
#pragma once
#include <condition_variable>
#include <mutex>

namespace clickfleet {

class Gate {
 public:
  class Pass {  // inside the gate until destroyed
   public:
    Pass(Gate& gate, bool alone) : gate_(gate), alone_(alone) { alone ? gate.enter_alone() : gate.enter(); }
    ~Pass() { alone_ ? gate_.leave_alone() : gate_.leave(); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    Gate& gate_;
    bool alone_;
  };

  void enter() {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [&] { return waiting_ == 0 && !alone_; });
    ++inside_;
  }
  void leave() {
    const std::lock_guard guard(lock_);
    if (--inside_ == 0) changed_.notify_all();
  }
  void enter_alone() {
    std::unique_lock guard(lock_);
    ++waiting_;
    changed_.wait(guard, [&] { return inside_ == 0 && !alone_; });
    --waiting_;
    alone_ = true;
  }
  void leave_alone() {
    const std::lock_guard guard(lock_);
    alone_ = false;
    changed_.notify_all();
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  int inside_ = 0, waiting_ = 0;
  bool alone_ = false;
};

}  // namespace clickfleet
