// Parses text and columns under plans that also come from the input.
#include <cmath>
#include <cstdlib>

#include "bounds.h"
#include "fuzz.h"
#include "parse/check.h"
#include "parse/columnar.h"
#include "parse/sentences.h"

using namespace clickfleet;
using namespace clickfleet::parse;
using clickfleet::fuzz::Block;
using clickfleet::fuzz::Input;
using clickfleet::fuzz::raw;

namespace {

// With bit 64, a history of slots `a` and `b` and one of `a` follow the slots. With bit 128, there are three labels.
Layout small_layout(size_t kind) {
  Layout made;
  made.rule = static_cast<KeyRule>(kind % 3);
  if ((kind & 128) != 0) made.labels = {LabelKind::click, LabelKind::number, LabelKind::count};
  made.modulus = 1000001;
  made.values = (kind & 4) != 0;
  made.show = made.click = made.weight = made.time = made.group = (kind & 8) != 0;
  made.dense = {{"x", Scale::log1p, 0, 1, 0}, {"y", Scale::minmax, 0, 10, NAN}};
  made.add_slot("a", false, "14");
  made.add_slot("b", (kind & 16) != 0, "15");
  made.add_slot("c", false, "16");
  made.buckets = {{2, 1, 0, 1, 10, {}, 100}};
  if ((kind & 64) != 0) {
    made.add_slot("a", true, "14");
    made.add_slot("b", true, "15");
    made.add_history(2, 3, true);
    made.add_slot("a", true, "14");
    made.add_history(1, 1, false);
  }
  return made;
}

// Adds fields for the further labels and the columns of histories of a small layout.
template <class Add>
void add_more(const Layout& layout, const Add& add) {
  for (int i = 1; i < static_cast<int>(layout.labels.size()); ++i) add("n" + std::to_string(i), {Role::label, i});
  for (int s = 3; s < static_cast<int>(layout.slots.size()); ++s) add("h" + std::to_string(s), {Role::slot, s});
}

// A layout that may contradict itself.
Layout any_layout(Input& in) {
  Layout made;
  const size_t flags = in.take<uint8_t>();
  made.rule = static_cast<KeyRule>(flags % 3);
  made.modulus = in.take<int8_t>();
  made.label = (flags & 4) != 0;
  made.show = (flags & 8) != 0;
  made.time = (flags & 16) != 0;
  made.group = (flags & 32) != 0;
  made.values = (flags & 64) != 0;
  for (size_t n = in.below(4); n > 0; --n)
    made.dense.push_back({"d", static_cast<Scale>(in.below(4)), in.take<float>(), in.take<float>(), in.take<float>()});
  if (made.modulus < 1) made.rule = KeyRule::hash64;  // no key is computed before the plan is checked
  for (size_t n = in.below(4); n > 0; --n) made.add_slot("s", in.below(2) != 0, "p");
  for (size_t n = in.below(3), count = in.below(3); n > 0 && count > 0; --n) {
    for (size_t i = 0; i < count; ++i) made.add_slot("s", true, "p");
    made.add_history(count, 1 + in.below(4), in.below(2) != 0);
  }
  made.labels.resize(in.below(4));
  for (size_t n = in.below(3); n > 0; --n) {
    Bucket bucket{in.take<int8_t>(), in.take<int8_t>(), in.take<float>(), in.take<float>(), in.take<int8_t>(), {}, 7};
    if (in.below(2) != 0) bucket.boundaries = {in.take<float>(), in.take<float>()};
    check(bucket);
    made.buckets.push_back(bucket);
  }
  return made;
}

Field any_field(Input& in) { return {static_cast<Role>(in.below(9)), in.take<int8_t>() % 8}; }

template <class Plan>
void parse_all(const Plan& plan, Input& in) {
  const auto on_bad = static_cast<OnBad>(in.below(3));
  const Block block(in.rest());
  Rows rows = plan.parse(block.view(), on_bad);
  const auto lines = static_cast<size_t>(std::count(block.bytes.begin(), block.bytes.end(), '\n'));
  CHECK(on_bad == OnBad::stop || rows.lines == lines);
  CHECK(rows.rows + rows.bad_lines == rows.lines);
  CHECK(rows.dense.size == rows.rows * plan.layout.dense.size());
  CHECK(!plan.layout.label || rows.labels.size == rows.rows * plan.layout.labels.size());
  if (rows.one_each) {
    CHECK(rows.keys.size == rows.rows * plan.layout.slots.size());
  } else {
    CHECK(rows.offsets.size == rows.rows * plan.layout.slots.size() + 1);
    CHECK(ascending(rows.offsets.data(), rows.offsets.size, rows.keys.size));
    CHECK(static_cast<size_t>(rows.offsets.data()[rows.offsets.size - 1]) == rows.keys.size);
    for (const History& history : plan.layout.histories)
      for (size_t r = 0; r < rows.rows; ++r)
        for (size_t c = 0; c < history.count; ++c) {
          const int64_t* const ends = rows.offsets.data() + r * plan.layout.slots.size() + history.first;
          CHECK(ends[c + 1] - ends[c] == ends[1] - ends[0] && ends[1] - ends[0] <= static_cast<int64_t>(history.max));
        }
  }
  for (const Bad& bad : rows.bad)
    CHECK(bad.offset >= 0 && bad.length >= 0 && bad.offset + bad.length < static_cast<int64_t>(block.bytes.size()));
  // Uses every number, so that a sanitizer reports any that was never written.
  volatile float sum = 0;
  for (size_t i = 0; i < rows.dense.size; ++i) sum = sum + rows.dense.data()[i];
  for (size_t i = 0; i < rows.labels.size; ++i) sum = sum + rows.labels.data()[i];
  volatile uint64_t all = 0;
  for (size_t i = 0; i < rows.keys.size; ++i) all = all ^ rows.keys.data()[i];
}

}  // namespace

FUZZ(delimited,
     raw("\1\0"
         "1\t2.5\t3\tu\tv|w\tz\n0\t\t \t  \t \t\n"),
     raw("\x31\2"
         "1,2,3,\"a,\"\"b\",c|d,e\r\n"),
     raw("\x08\1"
         "1\t1\t1\t1\t1\t1\t1\t1\t1\n"),
     raw("\xc0\1"
         "1\t2.5\t3\tu\tv\tz\t\t3\ta|b|c|d\te||f|g\tx|y\n0\t\t\t\t\t\t1\t\ta\t\tx\n"),
     raw("\xe1\2"
         "1,2,3,4,5|6,7,8,9,\"1|2|3\",4|5|6,\r\n,2,3,4,5,6,,,,,\r\n")) {
  const size_t kind = in.take<uint8_t>();
  Delimited plan;
  plan.layout = small_layout(kind);
  plan.separator = (kind & 32) != 0 ? ',' : '\t';
  plan.list_separator = '|';
  plan.quotes = plan.missing_words = (kind & 32) != 0;
  plan.blank_is_missing = (kind & 32) == 0;
  plan.fields = {{Role::label, 0}, {Role::dense, 0}, {Role::dense, 1},
                 {Role::slot, 0},  {Role::slot, 1},  {Role::skip, 0}};
  if (plan.layout.time) {
    for (const Role role : {Role::show, Role::click, Role::weight}) plan.fields.push_back({role, 0});
    plan.further_uses = {{3, {Role::group, 0}}, {5, {Role::time, 0}}};
  }
  add_more(plan.layout, [&plan](const std::string&, Field field) { plan.fields.push_back(field); });
  check(plan);
  parse_all(plan, in);
}

FUZZ(slotted,
     raw("\0\0\0"
         "label:1 x:2.5 y:1 a:7 b:8 b:9\nlabel:0\tx:1\tx:2\ta:7 b:8\n"),
     raw("\1\x18\0"
         "id\t1:label 2:x 7:a 8:b\n"),
     raw("\2\4\1"
         "1 a:7:0.5 b:8:1e3\n0 a:9:1\n"),
     raw("\0\0\0"
         "::: a:: :\n \n"),
     raw("\0\xc0\1"
         "label:1 n1:2 x:1 x:2 a:7 h3:1 h4:2 h3:3 h4:4 h3: h4: h3:5 h4:6 h5:9\nn2:0 h3:1\n")) {
  Slotted plan;
  plan.token = static_cast<Slotted::Token>(in.below(3));
  plan.layout = small_layout(in.take<uint8_t>());
  plan.groups = {{0, 1}};
  plan.name("label", {Role::label, 0});
  plan.name("x", {Role::dense, 0});
  plan.name("a", {Role::slot, 0});
  plan.name("b", {Role::slot, 1});
  if (plan.layout.time) {
    plan.name("a", {Role::group, 0});
    plan.name("t", {Role::time, 0});
    plan.name("x", {Role::show, 0});
  }
  add_more(plan.layout, [&plan](const std::string& name, Field field) { plan.name(name, field); });
  check(plan);
  parse_all(plan, in);
}

FUZZ(multislot,
     raw("\0\0"
         "2 0.5 3 1 7 2 8 9 1 1\n"),
     raw("\x10\1"
         "2 1 2 1 3 99999999999999999999 4 1 0\n"),
     raw("\xd0\1"
         "2 0.5 3 1 7 2 8 9 0 1 5 0 4 1 2 3 4 4 5 6 7 8 0\n2 1 1 1 7 1 8 1 1 0 0 0 0 1 9\n")) {
  MultiSlot plan;
  plan.layout = small_layout(in.take<uint8_t>());
  plan.layout.time = plan.layout.show = false;
  plan.groups = {{0, 1}};
  plan.steps = {{{{Role::dense, 0}}, 2}, {{{Role::slot, 0}}, 1}, {{{Role::slot, 1}}, 0}, {{{Role::label, 0}}, 1}};
  add_more(plan.layout, [&plan](const std::string&, Field field) {
    plan.steps.push_back({{field}, field.role == Role::label ? 1 : 0});
  });
  check(plan);
  parse_all(plan, in);
}

FUZZ(weighted,
     raw("\0\1\1"
         "1 qid:3 5:0.5 7:2 # text\n0 8:1\n"),
     raw("\1\2\1"
         "-1 5:1 7:1\n+1 6:1 7:1\n"),
     raw("\2\2\0"
         "1 0.5 'tag | x y:2 |a:3 a3 price:0.5\n0 |a z\n|a x\n")) {
  Weighted plan;
  plan.grammar = static_cast<Weighted::Grammar>(in.below(3));
  const size_t slots = plan.grammar == Weighted::Grammar::bag ? 1 : in.below(3);
  for (size_t i = 0; i < slots; ++i) plan.layout.add_slot(std::string(1, static_cast<char>('a' + i)), i == 0, "");
  const size_t kind = in.take<uint8_t>();
  plan.layout.values = (kind & 1) != 0;
  plan.layout.label = (kind & 2) == 0;
  plan.layout.negative = (kind & 4) != 0 ? -1 : 0;
  plan.layout.group = plan.layout.weight = (kind & 8) != 0;
  if (plan.layout.group) plan.names = {{"qid", {Role::group, 0}}, {"|", {Role::weight, 0}}};
  if (slots > 0) plan.names[""] = plan.names["a"] = {Role::slot, 0};
  check(plan);
  parse_all(plan, in);
}

FUZZ(times, "2026-01-31", "2026-01-31T10:20:30.5+02:00", "1700000000", "-5", "1e300", "2026-01-31 10:20Z",
     "0000-00-00") {
  const std::string text = in.rest();
  const std::vector<char> exact(text.begin(), text.end());
  int64_t time = 0;
  if (to_moment(exact.data(), exact.data() + exact.size(), time)) CHECK(time > -99999999999 && time < 999999999999);
  (void)to_time(exact.data(), exact.data() + exact.size(), time);
}

FUZZ(any_plan,
     raw("\4\1\1\0\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\2\1\0\2\0\3\0"
         "1\t2\t3\n"),
     raw("\0")) {
  const Layout layout = any_layout(in);
  switch (in.below(3)) {
    case 0: {
      Delimited plan{layout, '\t', '|', in.below(2) != 0, {}, {}, true, in.below(2) != 0};
      for (size_t n = in.below(6); n > 0; --n) plan.fields.push_back(any_field(in));
      for (size_t n = in.below(3); n > 0; --n) plan.further_uses.push_back({in.below(8), any_field(in)});
      check(plan);
      parse_all(plan, in);
      break;
    }
    case 1: {
      Slotted plan;
      plan.layout = layout;
      plan.token = static_cast<Slotted::Token>(in.below(3));
      for (size_t n = in.below(3); n > 0; --n) plan.groups.push_back({in.take<int8_t>() % 4, in.take<int8_t>() % 4});
      for (size_t n = in.below(4); n > 0; --n)
        plan.name(std::string(1, static_cast<char>('a' + in.below(4))), any_field(in));
      check(plan);
      parse_all(plan, in);
      break;
    }
    default: {
      MultiSlot plan{layout, {}, {}};
      for (size_t n = in.below(3); n > 0; --n) plan.groups.push_back({in.take<int8_t>() % 4});
      for (size_t n = in.below(4); n > 0; --n) plan.steps.push_back({{any_field(in)}, in.take<int8_t>() % 4});
      check(plan);
      parse_all(plan, in);
    }
  }
}

FUZZ(sentences, "the cat\tsat\r\n\n on the mat\n") {
  const Block block(in.rest());
  const Sentences found = parse_sentences(block.view(), 7);
  CHECK(ascending(found.offsets.data(), found.offsets.size(), found.keys.size()));
}

FUZZ(numbers, "123", "-0.5e-3", "+12345678901234567890", "1e400", "99999999.00000001", "0x10", ".", "-", "1_0", "inf") {
  const std::string text = in.rest();
  const std::vector<char> exact(text.begin(), text.end());
  const char *p = exact.data(), *end = p + exact.size();
  double real = 0;
  if (to_double(p, end, real)) {
    CHECK(std::isfinite(real));
    char* stop = nullptr;
    const double expected = std::strtod(text.c_str(), &stop);
    CHECK(stop == text.c_str() + text.size() && expected == real);
  }
  uint64_t natural = 0;
  if (to_u64(p, end, natural)) CHECK(text.size() <= 20 && std::strtoull(text.c_str(), nullptr, 10) == natural);
  int64_t whole = 0;
  if (to_i64(p, end, whole)) CHECK(std::strtoll(text.c_str(), nullptr, 10) == whole);
}

FUZZ(columnar, raw("\0\0\3\0\0\0\0\1\0\0\0\3\0\0\0\3\0\0\0"
                   "abc")) {
  const Layout layout = small_layout(in.take<uint8_t>());
  const size_t slot = in.below(3), n = in.below(8);
  const auto ends = in.some<int32_t>(n + 1);
  const auto wide = in.some<int64_t>(in.below(4));
  const auto numbers = in.some<double>(in.below(4));
  const auto uses = in.some<int32_t>(in.below(4));
  const std::string text = in.rest();
  const std::vector<char> bytes(text.begin(), text.end());
  if (!ends.empty() && ascending(ends.data(), ends.size(), bytes.size())) {
    std::vector<uint64_t> keys(ends.size() - 1);
    text_keys(layout, slot, ends.data(), keys.size(), bytes.data(), keys.data(), 1);
  }
  std::vector<uint64_t> keys(wide.size());
  integer_keys(layout, slot, wide.data(), wide.size(), keys.data(), 1);
  std::vector<float> dense(numbers.size());
  dense_values(layout, 1, numbers.data(), numbers.size(), dense.data(), 1);
  for (const double x : numbers) (void)layout.bucket_key(layout.buckets[0], static_cast<float>(x));
  if (!uses.empty() && !keys.empty()) {
    std::vector<uint64_t> woven(uses.size());
    const bool inside = std::all_of(uses.begin(), uses.end(),
                                    [&](int32_t use) { return use >= 0 && static_cast<size_t>(use) < keys.size(); });
    CHECK(weave({{keys.data(), keys.size(), uses.data()}}, uses.size(), woven.data()) == inside);
  }
}

FUZZ(lists, raw("\2\1\3\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\2\0\0\0"),
     raw("\1\1\1\1\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0\0")) {
  const size_t rows = in.below(4), size = in.below(4);
  const bool valued = in.below(2) != 0;
  const auto starts = in.some<int64_t>(rows), counts = in.some<int64_t>(rows);
  const auto uses = in.some<int32_t>(in.size());
  if (starts.size() != rows || counts.size() != rows) return;
  const std::vector<uint64_t> keys(size, 7);
  const std::vector<float> values(uses.size(), 2.0F);
  std::vector<ListColumn> columns;
  columns.push_back({keys.data(), size, uses.data(), uses.size(), starts.data(), counts.data(), values.data()});
  if (size >= rows) columns.push_back({keys.data(), size, nullptr, size, nullptr, nullptr, nullptr});
  std::vector<int64_t> offsets(rows * columns.size() + 1);
  if (!list_offsets(columns, rows, offsets.data())) return;
  CHECK(ascending(offsets.data(), offsets.size(), SIZE_MAX >> 1));
  if (offsets.back() > 1000000) return;  // a few entries that every row uses
  std::vector<uint64_t> woven(static_cast<size_t>(offsets.back()));
  std::vector<float> weights(woven.size());
  if (weave_lists(columns, rows, woven.data(), valued ? weights.data() : nullptr))
    for (const uint64_t key : woven) CHECK(key == 7);
}
