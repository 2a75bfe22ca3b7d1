// Moves rows between memory and disk, and reads those on disk. disk.h tells the design.
#include "tiers.h"

#include <bit>

#include "floats.h"
#include "plan.h"

namespace clickfleet {
namespace {

constexpr size_t kFewSegments = 10;   // of a stripe: more are merged
constexpr size_t kManySegments = 24;  // pushes wait for merges
constexpr uint32_t kOldEvents = 64;   // a segment this many events behind is rewritten

}  // namespace

// ---- the memory of both tiers ----

size_t Table::warm_room() const { return room() - disk_->memory().total; }

// Every stripe has the same share: which stripe came first must not matter for long.
size_t Table::shelf_room() const {
  const size_t room = warm_room() / 100 * 96, others = lasting_.used() - shelves_.used();
  return room > others ? (room - others) / kStripes : 0;
}

bool Table::pressed() const { return lasting_.used() > warm_room() / 100 * 98 || starved_; }

size_t Table::disk_room() const {
  constexpr size_t kEnds = size_t{4} << 20;  // files end at whole sectors
  return (config_.disk_limit - kEnds) / 10 * 7;
}

void Table::count_row(RowKind kind, int64_t rows) {
  if (disk_ != nullptr)
    disk_cost_.fetch_add(rows * static_cast<int64_t>(Segment::record_size(layout_, kind)), std::memory_order_relaxed);
}

// How much a row deserves its memory: the logarithm of its shows, less the spills since its last push. So a row that
// was shown twice as often stays 10 spills longer; 16 spills replace the whole stripe. Ties are broken by a hash, so
// that part of the equal rows can be chosen.
uint64_t Table::warmth(const Stripe& stripe, Row row) const {
  constexpr int64_t kOffset = 1024, kPerSpill = 3;
  const double show = row.show();
  const int64_t shows = show > 0 ? static_cast<int64_t>(std::bit_cast<uint64_t>(show) >> 47) : 0;  // 32 · log2, about
  const auto age = static_cast<uint8_t>(stripe.spills - row.round());
  const int64_t value = std::max<int64_t>(0, shows + kOffset - kPerSpill * age);
  return static_cast<uint64_t>(value) << 32 | mix64(mix64(row.key())) >> 32;
}

// ---- memory to disk ----

// Before a push: waits for the threads of the disk tier if they are behind, and shrinks shelves if others need memory.
void Table::relieve() {
  disk_->check();
  wait_for_space(disk_->memory().unwritten);
  if (unmerged_ != 0) wait_for_merges();
  if (!pressed()) return;
  const Gate::Pass pass(gate_, false);  // a spill depends on the open cut
  for (int n = 0; n < kStripes && pressed(); ++n) {
    disk_->wait_for_room(shelf_room() / 8);
    Stripe& stripe = *stripes_[next_stripe_++ % kStripes];
    const std::unique_lock guard(stripe.lock);
    spill(stripe, ~uint64_t{0}, 16);
    for (RowKind kind = 0; kind < stripe.kinds; ++kind) fit_shelf(stripe.shelves[kind]);
    if (starved_.exchange(false)) disk_->merge_soon();
  }
  if (lasting_.used() > room())
    throw Error("memory_limit is too small for the index of " + std::to_string(stats().disk_rows) +
                " rows on disk and the list of " + std::to_string(stats().changed) + " keys to publish" +
                "\n  raise table.memory_limit, or set table.disk_limit to delete the lowest-scored rows");
}

void Table::wait_for_merges() {
  for (const auto& stripe : stripes_) {
    const uint32_t bit = 1U << stripe->number;
    const auto many = [&] {
      const std::shared_lock guard(stripe->lock);
      return stripe->cold->segments.size() > kManySegments;
    };
    if ((unmerged_ & bit) == 0) continue;
    while (many() && disk_->merge_and_wait()) {
    }
    unmerged_ &= ~bit;
  }
}

// Waits until this many bytes may be added to the files.
void Table::wait_for_space(size_t bytes) {
  if (config_.disk_limit == 0) return;
  while (disk_->files().used() + disk_->unwritten() + bytes > config_.disk_limit / 100 * 95)
    if (!disk_->merge_and_wait()) {
      disk_->check();
      throw Error("the files in " + config_.disk + " take " + std::to_string(disk_->files().used()) +
                  " bytes and reach table.disk_limit\n  raise table.disk_limit");
    }
}

// Moves the coldest rows of these kinds (bits) to a new segment: one part of `part` of their bytes. The caller holds
// the lock.
void Table::spill(Stripe& stripe, uint64_t kinds, int part) {
  Cold& cold = *stripe.cold;
  if (!cold.stage.allocated()) cold.stage.allocate(disk_->scratch(), layout_, disk_->memory().stage_slots);
  const auto wanted = [&](RowKind kind) { return (kinds >> kind & 1) != 0; };
  // A sample of the rows tells the warmth up to which they go.
  constexpr uint32_t kSample = 4096;
  std::vector<std::pair<uint64_t, double>> sample;
  double target = 0;
  for (RowKind kind = 0; kind < stripe.kinds; ++kind) {
    const Shelf& shelf = stripe.shelves[kind];
    if (!wanted(kind) || shelf.size() == 0) continue;
    const size_t before = sample.size();
    for (uint32_t slot = 0; slot < shelf.slots(); slot += std::max(1U, shelf.slots() / kSample))
      if (shelf.used(slot)) sample.emplace_back(warmth(stripe, shelf.row(slot)), 0);
    const double bytes = static_cast<double>(shelf.size()) * static_cast<double>(shelf.row_bytes());
    for (size_t i = before; i < sample.size(); ++i)
      sample[i].second = bytes / static_cast<double>(sample.size() - before);
    target += bytes / part;
  }
  if (sample.empty()) return;
  std::sort(sample.begin(), sample.end());
  size_t last = 0;
  for (double bytes = sample[0].second; bytes < target && last + 1 < sample.size();) bytes += sample[++last].second;
  const uint64_t coldest = sample[last].first;

  // Rows that were not written since an open cut are as they were at that moment (disk.h: cuts).
  const uint32_t now = history_.now(), at_cut = cut_ == nullptr ? now : cut_->clock_;
  Victims victims[2] = {Victims(stripe.kinds), Victims(stripe.kinds)};  // not written since the cut, written
  std::vector<std::vector<uint32_t>> slots(stripe.kinds);
  for (RowKind kind = 0; kind < stripe.kinds; ++kind) {
    const Shelf& shelf = stripe.shelves[kind];
    if (!wanted(kind)) continue;
    for (uint32_t slot = 0; slot < shelf.slots(); ++slot) {
      if (!shelf.used(slot)) continue;
      const Row row = shelf.row(slot);
      if (static_cast<uint8_t>(stripe.spills - row.round()) > 200)
        row.round() = static_cast<uint8_t>(stripe.spills - 200);
      if (warmth(stripe, row) > coldest) continue;
      const bool written = at_cut == now || row.epoch() == epoch_;
      victims[written][kind].push_back({mix64(row.key()), row.hot, row.cold});
      slots[kind].push_back(slot);
    }
  }
  write_segment(stripe, victims[0], at_cut);
  write_segment(stripe, victims[1], now);
  for (RowKind kind = 0; kind < stripe.kinds; ++kind) {
    for (const uint32_t slot : slots[kind]) stripe.shelves[kind].erase(slot);
    disk_->spilled += slots[kind].size();
  }
  ++stripe.spills;
}

// Creates a segment of rows. The caller holds the lock, and the rows are no longer anywhere else once it releases it.
void Table::write_segment(Stripe& stripe, Victims& rows, uint32_t clock) {
  RowCounts counts;
  for (const auto& some : rows) counts.push_back(static_cast<uint32_t>(some.size()));
  if (std::all_of(counts.begin(), counts.end(), [](uint32_t n) { return n == 0; })) return;
  disk_->wait_for_writes(Segment::file_bytes(layout_, counts));
  const auto segment = std::make_shared<Segment>(disk_->new_id(), clock, layout_, index_, counts);
  segment->hold(disk_->scratch());
  for (RowKind kind = 0; kind < stripe.kinds; ++kind) {
    auto& some = rows[kind];
    std::sort(some.begin(), some.end(), [](const Victim& a, const Victim& b) { return a.hash < b.hash; });
    const auto hot = static_cast<size_t>(layout_.hot_bytes(kind)), cold = static_cast<size_t>(layout_.cold_bytes(kind));
    uint32_t position = 0;
    for (const Victim& row : some) {
      char* const record = segment->record(kind, position++);
      std::memcpy(record, row.hot, hot);
      std::memcpy(record + hot, row.cold, cold);
      segment->extremes().add({row.hot, row.cold}, config_.policy);
      segment->index(kind).append(row.hash);
    }
    segment->index(kind).finish();
  }
  stripe.cold->add(segment);
  disk_->write_later(segment);
}

// Gives a shelf that is nearly full free slots. The caller holds the lock, in the midst of a push.
void Table::make_space(Stripe& stripe, RowKind kind) {
  Shelf& shelf = stripe.shelves[kind];
  const bool many = stripe.cold->segments.size() > kManySegments;
  const int part = many ? 2 : 16;  // a push that spills so often is large: fewer and larger segments
  if (many) unmerged_ |= 1U << stripe.number;
  spill(stripe, ~uint64_t{0}, part);
  for (RowKind other = 0; other < stripe.kinds; ++other)
    if (other != kind) fit_shelf(stripe.shelves[other]);  // its memory may serve this one
  if (stripe.shelf_bytes() > shelf_room()) fit_shelf(shelf);
  if (!shelf.crowded()) return;
  if (may_grow(stripe, kind))
    shelf.resize(shelf.larger(true));
  else
    spill(stripe, uint64_t{1} << kind, part);
}

// Returns memory of a shelf that lost many rows.
void Table::fit_shelf(Shelf& shelf) {
  const uint32_t buckets = shelf.trimmed();
  const bool worth = shelf.buckets() - buckets > shelf.buckets() / 40;
  if (worth && fits(shelf.bytes_if(buckets))) shelf.resize(buckets);
}

// ---- disk to memory ----

// Moves the row of a key that has none in memory from disk to memory. Returns nothing if it is not on disk, or, with
// `later`, if it must first be read; with `wait` this reads it at once. The caller holds the lock.
Ref Table::bring(Stripe& stripe, uint64_t hash, uint64_t key, bool wait, bool& later) {
  thread_local std::vector<char> image;
  Cold& cold = *stripe.cold;
  image.resize(static_cast<size_t>(layout_.most_bytes()));
  Stage::Origin origin;
  const bool staged = cold.stage.copy(key, image.data(), origin) == Stage::State::ready;
  Segment* from = staged ? cold.segment(origin.segment) : nullptr;
  if (staged && from == nullptr) {  // it was merged; if only one row may be the right one, no read is needed
    bool several = false;
    cold.find(hash, [&](const auto& segment, RowKind, uint32_t position) {
      several = from != nullptr;
      from = segment.get();
      origin.position = position;
      return several;
    });
    if (several) from = nullptr;
  }
  if (from == nullptr)
    cold.find(hash, [&](const auto& segment, RowKind kind, uint32_t position) {
      if (!staged && !wait && segment->memory() == nullptr) {
        later = true;
        return false;
      }
      segment->copy(kind, position, image.data());
      if (load<uint64_t>(image.data()) != key) return false;
      from = segment.get();
      origin = {segment->id(), position, segment->clock(), kind};
      return true;
    });
  if (from == nullptr) return {};
  later = false;
  const RowKind kind = origin.kind;
  cold.kill(*from, kind, origin.position);
  cold.stage.erase(key);  // also if it is still being read: a later fill would be stale
  const Ref ref = add(stripe, kind, hash, key);
  const Row row = stripe.row(ref);
  std::memcpy(row.hot, image.data(), static_cast<size_t>(layout_.hot_bytes(kind)));
  std::memcpy(row.cold, image.data() + layout_.hot_bytes(kind), static_cast<size_t>(layout_.cold_bytes(kind)));
  row.round() = stripe.spills;
  refresh(stripe, row, kind, origin.clock);
  ++disk_->fetched;
  return ref;
}

// ---- events ----

void Table::replay(const History::Events& events, const Stripe& stripe, Row row, uint32_t from, uint32_t to) const {
  for (uint32_t i = from; i < to; ++i) {
    const Event& event = events[i];
    switch (event.kind) {
      case Event::shrink:
        decay(row);
        if (event.tracking && unpublishable(row)) row.flags() |= kChanged;
        break;
      case Event::end_day:
        grow_older(row);
        if (event.tracking && unpublishable(row)) row.flags() |= kChanged;
        break;
      case Event::mark_base: {
        const uint32_t at = upper(mix64(row.key()));
        const bool marked = event.marked != nullptr
                                ? at < (*event.marked)[static_cast<size_t>(stripe_of(mix64(row.key())))]
                                : cut_->swept_ || at < stripe.read_below;
        if (marked) Cut::mark_in_base(row, publishable(row));
        break;
      }
      case Event::list_base:
        list(row);
        break;
      case Event::unmark_base:
        if ((row.flags() & kPending) != 0) row.flags() &= static_cast<uint8_t>(~(kPending | kEmitted));
        break;
      case Event::forget_base:
        row.flags() &= static_cast<uint8_t>(~(kChanged | kPending | kEmitted));
        break;
      case Event::reset_epochs:
        row.epoch() = 0;
        break;
    }
  }
}

// Brings a row up to date that is about to be written. If an event has changed it since the cut, the cut needs the
// image from before.
void Table::refresh(Stripe& stripe, Row row, RowKind kind, uint32_t clock) {
  const auto events = history_.events();
  const auto now = static_cast<uint32_t>(events->size());
  if (clock == now) return;
  const uint32_t at_cut = cut_ == nullptr ? now : std::max(clock, cut_->clock_);
  replay(*events, stripe, row, clock, at_cut);
  if (at_cut < now) touch(stripe, row, kind, mix64(row.key()));
  replay(*events, stripe, row, at_cut, now);
}

// Whether an event may delete a row of this segment, or concern consumers that have one.
bool Table::may_remove(const Segment& segment, const Event& event) const {
  const Policy& policy = config_.policy;
  const Extremes& extremes = segment.extremes();
  double score = extremes.least_score;
  double unseen = extremes.most_unseen_days;
  bool published = (extremes.flags & (kListed | kEmitted | kPending)) != 0;
  const auto events = history_.events();
  const auto apply = [&](const Event& one) {
    if (one.kind == Event::shrink) score *= policy.decay_rate;
    if (one.kind == Event::end_day) unseen += 1;
    published = published || one.kind == Event::mark_base;
  };
  for (size_t i = segment.clock(); i < events->size(); ++i) apply((*events)[i]);
  apply(event);
  // Adding up in another order may differ in the last bits. Anything strange counts as low.
  const double least = score >= 0 ? score * (1 - 1e-9) : -std::numeric_limits<double>::infinity();
  if (event.kind == Event::shrink && (least < policy.delete_threshold || unseen > policy.delete_after_unseen_days))
    return true;
  return event.tracking && published && (least < policy.base_threshold || unseen > policy.delta_keep_days);
}

// Visits every row on disk, brought up to date, in the segments that are needed. The caller is alone in the gate. If
// visit(stripe, row, kind) returns true, the row is removed.
template <class Needs, class Visit>
uint64_t Table::sweep_cold(const Needs& needs, const Visit& visit) {
  uint64_t removed = 0;
  const auto events = history_.events();
  const auto now = static_cast<uint32_t>(events->size());
  std::vector<char> before(static_cast<size_t>(layout_.most_bytes()));
  std::unique_ptr<Sectors> buffer;
  // Returns false if the list of segments has changed. Visiting a row twice does no harm.
  const auto sweep_segment = [&](Stripe& stripe, Segment& segment, RowKind kind, uint64_t version) {
    const auto hot = static_cast<size_t>(layout_.hot_bytes(kind)), bytes = static_cast<size_t>(layout_.bytes(kind));
    const uint32_t rows = segment.index(kind).rows();
    const auto chunk = static_cast<uint32_t>(std::max<size_t>(1, disk_->memory().chunk / segment.record_bytes(kind)));
    for (uint32_t start = 0; start < rows; start += chunk) {
      const uint32_t end = std::min(rows, start + chunk);
      buffer.reset();
      char* const records = segment.records(kind, start, end, disk_->scratch(), buffer);
      for (uint32_t at = start; at < end; at += kPiece) {
        const uint32_t n = std::min(end - at, kPiece);
        take_undo(n);
        bool valid = false;
        {
          const std::unique_lock guard(stripe.lock);
          valid = stripe.cold->version == version;
          for (uint32_t i = at; valid && i < at + n; ++i) {
            if (!segment.index(kind).is_live(i)) continue;
            char* const image = records + (i - start) * segment.record_bytes(kind);
            const Row row{image, image + hot};
            const uint32_t at_cut = cut_ == nullptr ? now : std::max(segment.clock(), cut_->clock_);
            replay(*events, stripe, row, segment.clock(), at_cut);
            if (cut_ != nullptr) std::memcpy(before.data(), image, bytes);
            replay(*events, stripe, row, at_cut, now);
            if (!visit(stripe, row, kind)) continue;
            Row removal = row;
            if (cut_ != nullptr) {  // a base that is being read marks it first
              removal = {before.data(), before.data() + hot};
              touch(stripe, removal, kind, mix64(row.key()));
              replay(*events, stripe, removal, at_cut, now);
            }
            record_removal(stripe, removal);
            count_row(kind, -1);
            stripe.cold->stage.erase(row.key());
            stripe.cold->kill(segment, kind, i);
            ++removed;
          }
        }
        give_back_undo(n);
        if (!valid) return false;
      }
    }
    return true;
  };
  for (const auto& stripe : stripes_)
    for (bool done = false; !done;) {
      const auto [segments, version] = [&] {
        const std::shared_lock guard(stripe->lock);
        return std::pair(stripe->cold->segments, stripe->cold->version);
      }();
      done = true;
      for (const auto& segment : segments)
        if (needs(*segment))
          for (RowKind kind = 0; kind < stripe->kinds && done; ++kind)
            done = sweep_segment(*stripe, *segment, kind, version);
    }
  return removed;
}

uint64_t Table::follow(const Event& event) {
  if (disk_ == nullptr) return 0;
  uint64_t removed = 0;
  if (cut_ != nullptr) cut_->swept_ = true;
  if (event.kind == Event::shrink || event.kind == Event::end_day)
    removed = sweep_cold([&](const Segment& segment) { return may_remove(segment, event); },
                         [&](Stripe& stripe, Row row, RowKind) {
                           if (event.kind == Event::shrink) {
                             decay(row);
                             if (outlived(row)) return true;
                           } else {
                             grow_older(row);
                           }
                           // The row gets its flag when it is next read, from the history. Changes that are being
                           // read will take the flag that it has now.
                           const bool open = cut_ != nullptr && cut_->kind_ == Cut::changes;
                           if (event.tracking && (open || (row.flags() & kChanged) == 0) && unpublishable(row))
                             stripe.changed.push_back(row.key());
                           return false;
                         });
  history_.add(event);
  return removed;
}

// ---- the disk limit ----

// Deletes the lowest-scored rows of both tiers that take this many bytes on disk. The rank up to which they go comes
// from a range of hashes: scores do not depend on hashes, and the rows of a range are adjacent on disk.
void Table::evict_from_both(size_t bytes) {
  constexpr uint64_t kSample = 1 << 18;
  const Stats now = stats();
  const uint64_t part = std::max<uint64_t>(1, now.rows / kSample);
  const auto last = static_cast<uint32_t>((uint64_t{1} << 32) / part - 1);
  std::vector<std::pair<uint64_t, size_t>> ranks;
  const auto events = history_.events();
  for (const auto& stripe : stripes_) {
    ColdRows cold;
    const auto guard = lock_with_range(*stripe, 0, last, cold);
    const auto take = [&](Row row, RowKind kind) {
      if (upper(mix64(row.key())) <= last) ranks.emplace_back(rank(row), Segment::record_size(layout_, kind));
    };
    for (RowKind kind = 0; kind < stripe->kinds; ++kind)
      stripe->shelves[kind].scan(0, last, [&](uint32_t slot) { take(stripe->shelves[kind].row(slot), kind); });
    for (const ColdRow& one : cold.rows) {
      if (!one.segment->index(one.kind).is_live(one.position)) continue;
      const Row row = one.row(layout_);
      replay(*events, *stripe, row, one.clock, static_cast<uint32_t>(events->size()));
      take(row, one.kind);
    }
  }
  if (ranks.empty()) return;
  std::sort(ranks.begin(), ranks.end());
  size_t n = 0;
  for (size_t freed = ranks[0].second; freed < bytes / part && n + 1 < ranks.size();) freed += ranks[++n].second;
  const uint64_t lowest = ranks[n].first;
  uint64_t removed = 0;
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    if (rank(row) > lowest) return;
    touch(stripe, row, ref.kind(), mix64(row.key()));
    remove(stripe, ref, row);
    ++removed;
  });
  removed +=
      sweep_cold([](const Segment&) { return true; }, [&](Stripe&, Row row, RowKind) { return rank(row) <= lowest; });
  evicted_ += removed;
  disk_->merge_soon();
}

// ---- ranges of hashes ----

void Table::list_range(const Stripe& stripe, uint32_t first, uint32_t last, ColdRows& rows) const {
  rows.first = first;
  rows.last = last;
  rows.version = stripe.cold->version;
  rows.pieces.clear();
  for (const auto& segment : stripe.cold->segments)
    for (RowKind kind = 0; kind < stripe.kinds; ++kind) {
      const SegmentIndex& index = segment->index(kind);
      if (index.live() == 0) continue;
      const auto [begin, end] = index.range(first, last);
      ColdRows::Piece piece{segment, kind, begin, std::vector<bool>(end - begin)};
      for (uint32_t i = begin; i < end; ++i) piece.live[i - begin] = index.is_live(i);
      if (begin < end) rows.pieces.push_back(std::move(piece));
    }
}

void Table::read_listed(ColdRows& rows) const {
  rows.buffers.clear();
  rows.rows.clear();
  for (const auto& piece : rows.pieces) {
    const auto end = piece.first + static_cast<uint32_t>(piece.live.size());
    std::unique_ptr<Sectors>& buffer = rows.buffers.emplace_back();
    char* image = piece.segment->records(piece.kind, piece.first, end, disk_->scratch(), buffer);
    for (uint32_t i = piece.first; i < end; ++i, image += piece.segment->record_bytes(piece.kind)) {
      const uint32_t at = upper(mix64(load<uint64_t>(image)));
      if (piece.live[i - piece.first] && at >= rows.first && at <= rows.last)
        rows.rows.push_back({piece.segment, i, piece.segment->clock(), piece.kind, image});
    }
  }
}

// Locks a stripe and returns copies of its rows on disk in a range of hashes. Some may have been removed since they
// were read; their tags tell. Reads before it locks, and again if the segments have changed.
std::unique_lock<std::shared_mutex> Table::lock_with_range(Stripe& stripe, uint32_t first, uint32_t last,
                                                           ColdRows& rows) {
  if (disk_ == nullptr) return std::unique_lock(stripe.lock);
  for (int tries = 0; tries < 3; ++tries) {
    {
      const std::shared_lock guard(stripe.lock);
      list_range(stripe, first, last, rows);
    }
    read_listed(rows);
    std::unique_lock guard(stripe.lock);
    if (stripe.cold->version == rows.version) return guard;
  }
  std::unique_lock guard(stripe.lock);
  list_range(stripe, first, last, rows);
  read_listed(rows);
  return guard;
}

// ---- reading ahead ----

void Table::announce(const uint64_t* keys, size_t n) {
  if (disk_ != nullptr) disk_->announce(keys, n);
}

void Table::wait_for_disk() {
  if (disk_ != nullptr) disk_->wait_until_idle();
}

void Table::look_ahead(std::vector<uint64_t>& keys) {
  thread_local Plan plan;
  constexpr uint32_t kAhead = 16;
  plan.make(keys.data(), keys.size());
  std::vector<uint32_t> missing;  // places in the plan
  std::vector<Read> reads;
  for (int s = 0; s < kStripes; ++s) {
    const Stripe& stripe = *stripes_[static_cast<size_t>(s)];
    const std::shared_lock guard(stripe.lock);
    Cold& cold = *stripe.cold;
    if (cold.segments.empty()) continue;
    const uint32_t begin = plan.begin[s], end = plan.end[s];
    missing.clear();
    for (uint32_t i = begin; i < end + kAhead; ++i) {
      if (i < end) stripe.prefetch_tags(plan.hash[i]);
      if (i < begin + kAhead || stripe.guess(plan.hash[i - kAhead])) continue;  // in memory, almost surely
      if (cold.stage.holds(keys[plan.where[i - kAhead]])) continue;
      cold.prefetch(plan.hash[i - kAhead], false);
      missing.push_back(i - kAhead);
    }
    for (size_t i = 0; i < missing.size() + kAhead; ++i) {
      if (i < missing.size()) cold.prefetch(plan.hash[missing[i]], true);
      if (i < kAhead) continue;
      const uint64_t hash = plan.hash[missing[i - kAhead]], key = keys[plan.where[missing[i - kAhead]]];
      Read read;
      bool several = false;
      cold.find(hash, [&](const auto& segment, RowKind kind, uint32_t position) {
        several = read.segment != nullptr;
        read.segment = segment;
        read.position = position;
        read.kind = kind;
        return several;
      });
      if (read.segment == nullptr || several || read.segment->memory() != nullptr) continue;
      if (!cold.stage.reserve(key, read.slot, read.ticket)) continue;
      read.key = key;
      read.stage = &cold.stage;
      reads.push_back(std::move(read));
    }
  }
  disk_->reads().add(std::move(reads), false);
}

// ---- restoring ----

// Inserts saved rows of one stripe: the most shown ones into memory, as many as there is room for, and the others as a
// segment.
void Table::restore_tiered(Stripe& stripe, const Rows& rows, size_t start, const Plan& plan, int s, int first,
                           int last) {
  const auto bytes = static_cast<size_t>(layout_.bytes(rows.kind)),
             hot = static_cast<size_t>(layout_.hot_bytes(rows.kind));
  std::vector<uint32_t> wanted;
  for (uint32_t i = plan.begin[s]; i < plan.end[s]; ++i)
    if (const auto shard = static_cast<int>(plan.hash[i] % kVirtualShards); shard >= first && shard < last)
      wanted.push_back(i);
  const auto piece = static_cast<size_t>(std::max<size_t>(kPiece, disk_->memory().unwritten / 8 / bytes));
  std::vector<char> images;
  for (size_t at = 0; at < wanted.size(); at += piece) {
    const size_t n = std::min(piece, wanted.size() - at);
    const auto begin = wanted.begin() + static_cast<std::ptrdiff_t>(at), end = begin + static_cast<std::ptrdiff_t>(n);
    auto keep = begin + static_cast<std::ptrdiff_t>(
                            std::min(static_cast<double>(n), kept_share_ * static_cast<double>(n) + 0.5));
    const auto show = [&](uint32_t i) { return rows.show[start + plan.where[i]]; };
    if (keep != end) std::nth_element(begin, keep, end, [&](uint32_t a, uint32_t b) { return show(a) > show(b); });
    if (cut_ != nullptr) keep = end;  // rows that are replaced go to the undo log, a few at a time
    wait_for_space(n * (bytes + Segment::kChecksum));
    disk_->wait_for_room(n * (bytes + Segment::kChecksum));
    for (auto from = begin; from != keep;) {
      const auto to = from + std::min<std::ptrdiff_t>(keep - from, kPiece);
      take_undo(static_cast<size_t>(to - from));
      {
        const std::unique_lock guard(stripe.lock);
        for (auto i = from; i != to; ++i) restore_row(stripe, plan.hash[*i], rows, start + plan.where[*i]);
      }
      give_back_undo(static_cast<size_t>(to - from));
      from = to;
    }
    if (keep == end) continue;
    images.assign(static_cast<size_t>(end - keep) * bytes, 0);
    const std::unique_lock guard(stripe.lock);
    if (!stripe.cold->stage.allocated())
      stripe.cold->stage.allocate(disk_->scratch(), layout_, disk_->memory().stage_slots);
    Victims cold(layout_.kinds());
    for (auto i = keep; i != end; ++i) {
      const uint64_t hash = plan.hash[*i], key = rows.key[start + plan.where[*i]];
      if (stripe.find(hash, key) || stripe.cold->may_hold(hash)) {  // rarely: it replaces a row
        restore_row(stripe, hash, rows, start + plan.where[*i]);
        continue;
      }
      char* const image = images.data() + static_cast<size_t>(i - keep) * bytes;
      const Row row{image, image + hot};
      row.set_key(key);
      row.epoch() = epoch_;
      row.round() = stripe.spills;
      fill(row, rows, start + plan.where[*i]);
      count_row(rows.kind, 1);
      cold[rows.kind].push_back({hash, row.hot, row.cold});
    }
    // A file that holds a key twice must not do so here: the last one counts.
    auto& fresh = cold[rows.kind];
    std::stable_sort(fresh.begin(), fresh.end(), [](const Victim& a, const Victim& b) { return a.hash < b.hash; });
    const auto twice =
        std::unique(fresh.rbegin(), fresh.rend(), [](const Victim& a, const Victim& b) { return a.hash == b.hash; });
    count_row(rows.kind, -(fresh.rend() - twice));
    fresh.erase(fresh.begin(), twice.base());
    write_segment(stripe, cold, history_.now());
  }
}

// ---- merging ----

// Merges the segments of the stripe that needs it most, of those it looks at. Returns false if none does.
bool Table::merge_one() {
  const uint32_t reach = history_.reachable().second;
  const bool scarce_disk = config_.disk_limit != 0 && disk_->files().used() > config_.disk_limit / 100 * 85;
  Stripe* worst = nullptr;
  std::vector<std::shared_ptr<Segment>> chosen;
  uint64_t most_waste = 0;
  for (const auto& stripe : stripes_) {
    std::vector<std::shared_ptr<Segment>> segments;
    uint64_t live = 0, total = 0;
    {
      const std::shared_lock guard(stripe->lock);
      for (const auto& segment : stripe->cold->segments) {
        if (segment->memory() != nullptr || segment->clock() > reach) continue;
        segments.push_back(segment);
        live += segment->live_bytes();
        total += segment->file_bytes();
      }
      std::sort(segments.begin(), segments.end(),
                [](const auto& a, const auto& b) { return a->live_bytes() < b->live_bytes(); });
      std::vector<std::shared_ptr<Segment>> some;
      // Those that hold nothing, or are too far behind.
      for (const auto& segment : segments)
        if (segment->live() == 0 || reach - segment->clock() > kOldEvents) some.push_back(segment);
      // Too many: the smaller ones, as long as the next is not much larger than all before it.
      if (some.empty() && segments.size() > kFewSegments) {
        uint64_t sum = 0;
        for (const auto& segment : segments) {
          if (some.size() >= 4 && segment->live_bytes() > 2 * sum) break;
          sum += segment->live_bytes();
          some.push_back(segment);
        }
      }
      // Too many dead rows.
      const uint64_t waste = total - std::min(total, live);
      if (some.empty() && waste > total / 100 * (scarce_disk ? 15 : 35))
        for (const auto& segment : segments)
          if (segment->live() < segment->rows() - segment->rows() / 4 ||
              (scarce_disk && segment->live() < segment->rows()))
            some.push_back(segment);
      if (some.empty() || (worst != nullptr && waste <= most_waste)) continue;
      if (some.size() > DiskMemory::kMergeInputs) some.resize(DiskMemory::kMergeInputs);
      worst = stripe.get();
      most_waste = waste;
      chosen = std::move(some);
    }
  }
  if (worst == nullptr) return false;
  size_t rows = 0;
  for (const auto& segment : chosen) rows += segment->rows();
  if (!fits(rows * 4)) {  // the new index and the lists below; pushes then give up memory of shelves
    starved_ = true;
    return false;
  }
  merge_segments(*worst, chosen);
  return true;
}

void Table::merge_segments(Stripe& stripe, const std::vector<std::shared_ptr<Segment>>& inputs) {
  const auto [events, reach] = history_.reachable();
  Budget& scratch = disk_->scratch();
  using Bits = CountedVector<uint64_t>;
  std::vector<std::vector<Bits>> live(layout_.kinds());  // by kind: the rows that were live when the merge began
  RowCounts count(layout_.kinds());
  {
    const std::shared_lock guard(stripe.lock);
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind)
      for (const auto& input : inputs) {
        const SegmentIndex& index = input->index(kind);
        Bits bits(index.rows() / 64 + 1, 0, CountingAllocator<uint64_t>(&scratch));
        for (uint32_t i = 0; i < index.rows(); ++i) bits[i / 64] |= uint64_t{index.is_live(i)} << i % 64;
        count[kind] += index.live();
        live[kind].push_back(std::move(bits));
      }
  }
  const auto next_live = [](const Bits& bits, uint32_t at, uint32_t end) {
    while (at < end) {
      const uint64_t word = bits[at / 64] >> at % 64;
      if (word != 0) return std::min(end, at + static_cast<uint32_t>(std::countr_zero(word)));
      at = (at / 64 + 1) * 64;
    }
    return end;
  };

  std::shared_ptr<Segment> output;
  std::vector<CountedVector<uint8_t>> origin(layout_.kinds(),
                                             CountedVector<uint8_t>(CountingAllocator<uint8_t>(&scratch)));
  if (std::any_of(count.begin(), count.end(), [](uint32_t n) { return n > 0; })) {
    output = std::make_shared<Segment>(disk_->new_id(), reach, layout_, index_, count);
    auto file = disk_->new_file();
    const size_t chunk = disk_->memory().chunk;
    const Sectors buffer(scratch, chunk);
    size_t used = 0;
    uint64_t written = 0;
    const auto put = [&](const char* bytes, size_t n) {
      for (size_t done = 0; done < n;) {
        const size_t some = std::min(n - done, buffer.size() - used);
        std::memcpy(buffer.data() + used, bytes + done, some);
        used += some;
        done += some;
        if (used == buffer.size()) {
          file->write(buffer.data(), used, written);
          written += used;
          used = 0;
        }
      }
    };
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
      struct Cursor {
        uint32_t at, begin, end;  // of the records in memory
        std::unique_ptr<Sectors> buffer;
        char* records;
        uint64_t hash;
      };
      const size_t record = Segment::record_size(layout_, kind);
      const auto step = static_cast<uint32_t>(std::max<size_t>(1, (chunk - kSector) / record));
      std::vector<Cursor> cursors(inputs.size());
      const auto settle = [&](size_t i) {  // reads the record at the cursor
        Cursor& cursor = cursors[i];
        const uint32_t rows = inputs[i]->index(kind).rows();
        if (cursor.at >= rows) return;
        if (cursor.at >= cursor.end) {
          if (disk_->stopping()) throw Error("stopped");
          cursor.begin = cursor.at;
          cursor.end = std::min(rows, cursor.at + step);
          cursor.buffer.reset();
          cursor.records = inputs[i]->records(kind, cursor.begin, cursor.end, scratch, cursor.buffer);
        }
        cursor.hash = mix64(load<uint64_t>(cursor.records + (cursor.at - cursor.begin) * record));
      };
      for (size_t i = 0; i < inputs.size(); ++i) {
        cursors[i] = {next_live(live[kind][i], 0, inputs[i]->index(kind).rows()), 0, 0, nullptr, nullptr, 0};
        settle(i);
      }
      origin[kind].reserve(count[kind]);
      for (uint32_t position = 0; position < count[kind]; ++position) {
        size_t least = inputs.size();
        for (size_t i = 0; i < inputs.size(); ++i)
          if (cursors[i].at < inputs[i]->index(kind).rows() &&
              (least == inputs.size() || cursors[i].hash < cursors[least].hash))
            least = i;
        Cursor& cursor = cursors[least];
        char* const image = cursor.records + (cursor.at - cursor.begin) * record;
        const Row row{image, image + layout_.hot_bytes(kind)};
        replay(*events, stripe, row, inputs[least]->clock(), reach);
        output->extremes().add(row, config_.policy);
        output->index(kind).append(cursor.hash);
        output->seal(image, kind, position);
        put(image, record);
        origin[kind].push_back(static_cast<uint8_t>(least));
        cursor.at = next_live(live[kind][least], cursor.at + 1, inputs[least]->index(kind).rows());
        settle(least);
      }
      output->index(kind).finish();
      static constexpr char kZeros[kSector] = {};
      if (const size_t rest = used % kSector; rest != 0) put(kZeros, kSector - rest);
    }
    if (used > 0) file->write(buffer.data(), used, written);
    output->adopt(std::move(file));
  }

  const std::unique_lock guard(stripe.lock);
  // Rows that moved to memory during the merge are dead in the output too.
  for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
    std::vector<uint32_t> at(inputs.size(), 0);
    for (uint32_t position = 0; position < count[kind]; ++position) {
      const size_t i = origin[kind][position];
      at[i] = next_live(live[kind][i], at[i], inputs[i]->index(kind).rows());
      if (!inputs[i]->index(kind).is_live(at[i]++)) output->index(kind).kill(position);
    }
  }
  auto& segments = stripe.cold->segments;
  std::erase_if(segments,
                [&](const auto& one) { return std::find(inputs.begin(), inputs.end(), one) != inputs.end(); });
  if (output != nullptr) segments.push_back(std::move(output));
  ++stripe.cold->version;
}

}  // namespace clickfleet
