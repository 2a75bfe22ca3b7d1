// Checks that a plan stays within its columns. Parsers use the indices of a plan without further checks.
#pragma once
#include <cmath>
#include <stdexcept>
#include <vector>

#include "delimited.h"
#include "slotted.h"
#include "weighted.h"

namespace clickfleet::parse {

class PlanCheck {
 public:
  explicit PlanCheck(const Layout& layout) : layout_(layout), dense_(layout.dense.size()), slots_(layout.slots.size()) {
    if (layout.modulus < 1) throw std::invalid_argument("modulus must be at least 1");
    if (layout.labels.empty() || layout.labels.size() > 64) throw std::invalid_argument("a row has 1 to 64 labels");
    for (const Bucket& bucket : layout.buckets) {
      check(bucket.slot, slots_, "a bucket refers to an unknown slot");
      check(bucket.column, dense_, "a bucket refers to an unknown dense column");
      if (layout.slots[static_cast<size_t>(bucket.slot)].multi)
        throw std::invalid_argument("a bucketed slot is single-valued");
      slots_[static_cast<size_t>(bucket.slot)] = true;
    }
  }

  // Checks a field that fills one dense column.
  void column(const Field& field) {
    if (field.role == Role::dense) take(field.index, dense_, "a field refers to an unknown dense column");
    other(field);
  }

  // Checks a field that fills a group of dense columns.
  void grouped(const Field& field, const std::vector<DenseGroup>& groups) const {
    if (field.role == Role::dense && (field.index < 0 || static_cast<size_t>(field.index) >= groups.size()))
      throw std::invalid_argument("a field refers to an unknown group of dense columns");
  }

  void group(const DenseGroup& columns) {
    for (const int column : columns) take(column, dense_, "a field refers to an unknown dense column");
  }

  // Checks that the layout has the column a role fills. Pass `refuses_labels` if the parser itself rejects labels.
  void other(const Field& field, bool refuses_labels = false) {
    if (field.role == Role::slot) take(field.index, slots_, "a field refers to an unknown slot");
    if (field.role == Role::label && (field.index < 0 || static_cast<size_t>(field.index) >= layout_.labels.size()))
      throw std::invalid_argument("a field refers to an unknown label");
    const bool filled = field.role == Role::label    ? layout_.label || refuses_labels
                        : field.role == Role::show   ? layout_.show
                        : field.role == Role::click  ? layout_.click
                        : field.role == Role::weight ? layout_.weight
                        : field.role == Role::time   ? layout_.time
                        : field.role == Role::group  ? layout_.group
                                                     : true;
    if (!filled) throw std::invalid_argument("a field fills a column that is not in the layout");
  }

  // A column that no field fills would contain uninitialized memory.
  void all_dense() const { all(dense_, "no field fills a dense column"); }
  void all_slots() const { all(slots_, "no field fills a slot"); }

 private:
  static void check(int index, const std::vector<bool>& of, const char* what) {
    if (index < 0 || static_cast<size_t>(index) >= of.size()) throw std::invalid_argument(what);
  }
  static void take(int index, std::vector<bool>& of, const char* what) {
    check(index, of, what);
    of[static_cast<size_t>(index)] = true;
  }
  static void all(const std::vector<bool>& of, const char* what) {
    for (const bool taken : of)
      if (!taken) throw std::invalid_argument(what);
  }

  const Layout& layout_;
  std::vector<bool> dense_, slots_;
};

inline void check(const Delimited& plan) {
  PlanCheck it(plan.layout);
  for (const Field& field : plan.fields) it.column(field);
  for (const auto& [column, field] : plan.further_uses) {
    if (column >= plan.fields.size()) throw std::invalid_argument("a field refers to an unknown column");
    it.column(field);
  }
  it.all_dense();
  it.all_slots();
}

inline void check(const Slotted& plan) {
  PlanCheck it(plan.layout);
  for (const DenseGroup& group : plan.groups) it.group(group);
  for (const auto& [name, uses] : plan.names())
    for (const Field& field : uses) {
      it.grouped(field, plan.groups);
      it.other(field, true);
    }
  it.all_dense();
}

inline void check(const MultiSlot& plan) {
  PlanCheck it(plan.layout);
  for (const MultiSlot::Step& step : plan.steps)
    for (const Field& field : step.uses) {
      it.grouped(field, plan.groups);
      it.other(field);
      if (field.role != Role::dense) continue;
      const DenseGroup& group = plan.groups[static_cast<size_t>(field.index)];
      if (step.width < 0 || static_cast<size_t>(step.width) != group.size())
        throw std::invalid_argument("the width of a dense block differs from its number of columns");
      it.group(group);
    }
  it.all_dense();
}

inline void check(const Weighted& plan) {
  PlanCheck it(plan.layout);
  for (const auto& [name, field] : plan.names) it.other(field);
  it.all_dense();
  if (plan.grammar == Weighted::Grammar::bag && plan.layout.slots.size() != 1)
    throw std::invalid_argument("a bag of entries needs one slot");
}

// A bucket is defined by equal widths or by boundaries; both need valid numbers.
inline void check(const Bucket& bucket) {
  const bool equal = std::isfinite(bucket.low) && std::isfinite(bucket.high) && bucket.low < bucket.high &&
                     std::isfinite(bucket.high - bucket.low) && bucket.buckets >= 1 && bucket.buckets <= 1LL << 53;
  if (bucket.boundaries.empty() && !equal) throw std::invalid_argument("buckets need finite limits with low < high");
}

}  // namespace clickfleet::parse
