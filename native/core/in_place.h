// Rows of a table trained where they stand, by several threads at once.
//
// While `work` runs, all stripes are held together with other readers, so that no row can move; a cut has its images of
// the rows already. Writers among each other lock row by row (skipgram.h). Whoever pulls such a row meanwhile may see
// it half moved.
#pragma once
#include <vector>

#include "table.h"

namespace clickfleet {

class InPlace {
 public:
  // The rows of these keys must be there already, with their factors.
  InPlace(Table& table, const uint64_t* keys, size_t n);

  const Table& table() const { return table_; }
  size_t size() const { return keys_.size(); }

  // Calls work(rows): the weights of each key's row, embed_w first.
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
  void give_images();
  void find_rows();

  Table& table_;
  std::vector<uint64_t> keys_;
  std::vector<float*> rows_;
  std::vector<uint64_t> versions_;  // of the shelves when the rows were found
  int imaged_ = -1;                 // the epoch whose cut has images of all the rows
};

}  // namespace clickfleet
