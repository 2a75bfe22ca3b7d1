// Rows of a table that several threads train in place.
//
// While `work` runs, all stripes are locked for reading, so no row can move. An open cut already holds images of these
// rows. Writers lock individual rows among themselves (skipgram.h). A concurrent pull may read a partly updated row.
#pragma once
#include <vector>

#include "table.h"

namespace clickfleet {

class InPlace {
 public:
  // The rows of these keys must already exist and have factors.
  InPlace(Table& table, const uint64_t* keys, size_t n);

  const Table& table() const { return table_; }
  size_t size() const { return keys_.size(); }

  // Calls work(rows), where rows[i] points to the weights of the i-th key's row, embed_w first.
  template <class Work>
  void with(const Work& work) {
    const Held held(*this);
    work(rows_.data());
  }

 private:
  class Held {
   public:
    explicit Held(InPlace& self);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    InPlace& self_;
    Gate::Pass pass_;
  };
  void log_images();
  void find_rows();

  Table& table_;
  std::vector<uint64_t> keys_;
  std::vector<float*> rows_;
  std::vector<uint64_t> versions_;  // of the shelves when the rows were looked up
  int imaged_ = -1;                 // the epoch whose cut has images of all these rows
};

}  // namespace clickfleet
