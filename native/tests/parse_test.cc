// The parsers accept any bytes: every line becomes a row or a bad line, and no access leaves its array (checked by
// sanitizers).
#include <random>
#include <string>

#include "check.h"
#include "parse/columnar.h"
#include "parse/delimited.h"
#include "parse/slotted.h"
#include "parse/weighted.h"
#include "unique.h"

using namespace clickfleet;
using namespace clickfleet::parse;

namespace {

Layout layout(KeyRule rule, bool multi) {
  Layout made;
  made.rule = rule;
  made.modulus = 1000001;
  made.dense = {{"x", Scale::log1p, 0, 1, 0}, {"y", Scale::minmax, 0, 10, -1}};
  made.add_slot("a", false, "14");
  made.add_slot("b", multi, "15");
  made.add_slot("c", false, "16");
  made.buckets = {{2, 1, 0, 1, 10, {}, 100}};
  return made;
}

Delimited delimited(KeyRule rule, bool multi, bool quotes) {
  Delimited plan;
  plan.layout = layout(rule, multi);
  plan.separator = quotes ? ',' : '\t';
  plan.list_separator = '|';
  plan.quotes = quotes;
  plan.fields = {{Role::label, 0}, {Role::dense, 0}, {Role::dense, 1},
                 {Role::slot, 0},  {Role::slot, 1},  {Role::skip, 0}};
  plan.layout.group = true;
  plan.further_uses = {{3, {Role::group, 0}}, {5, {Role::group, 0}}};
  return plan;
}

Slotted slotted(KeyRule rule, Slotted::Token token) {
  Slotted plan;
  plan.layout = layout(rule, true);
  plan.layout.values = token == Slotted::Token::name_key_value;
  plan.token = token;
  plan.groups = {{0, 1}};
  plan.name("label", {Role::label, 0});
  plan.name("d", {Role::dense, 0});
  plan.name("a", {Role::slot, 0});
  plan.name("b", {Role::slot, 1});
  return plan;
}

MultiSlot multislot(KeyRule rule) {
  MultiSlot plan;
  plan.layout = layout(rule, true);
  plan.groups = {{0, 1}};
  plan.steps = {{{{Role::dense, 0}}, 2}, {{{Role::slot, 0}}, 1}, {{{Role::slot, 1}}, 0}, {{{Role::label, 0}}, 1}};
  return plan;
}

// Copied to memory of exactly its size, so that sanitizers detect a read beyond its end.
template <class Plan>
Rows parse_exactly(const Plan& plan, const std::string& text, OnBad on_bad) {
  const std::vector<char> block(text.begin(), text.end());
  return plan.parse({block.data(), block.size()}, on_bad);
}

void check_whole(Rows& rows, const Layout& plan, size_t lines, OnBad on_bad) {
  CHECK(rows.rows + rows.bad_lines == rows.lines);
  CHECK(rows.lines == lines || (on_bad == OnBad::stop && rows.bad_lines == 1));
  CHECK(rows.labels.size == rows.rows * plan.labels.size());
  CHECK(!plan.group || rows.groups.size == rows.rows);
  CHECK(rows.dense.size == rows.rows * plan.dense.size());
  for (size_t i = 0; i < rows.dense.size; ++i) CHECK(std::isfinite(rows.dense.data()[i]));
  if (!rows.one_each) {
    CHECK(rows.offsets.size == rows.rows * plan.slots.size() + 1);
    for (size_t i = 1; i < rows.offsets.size; ++i) CHECK(rows.offsets.data()[i - 1] <= rows.offsets.data()[i]);
    CHECK(static_cast<size_t>(rows.offsets.data()[rows.offsets.size - 1]) == rows.keys.size);
  } else {
    CHECK(rows.keys.size == rows.rows * plan.slots.size());
  }
  if (plan.values) CHECK(rows.values.size == rows.keys.size);
}

template <class Plan>
void fuzz(const Plan& plan, const std::string& good, const char* alphabet, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  const std::string letters(alphabet);
  CHECK(parse_exactly(plan, good + "\n", OnBad::stop).rows == 1);
  for (int round = 0; round < 400; ++round) {
    std::string text;
    for (size_t n = below(6) + 1; n > 0; --n) {
      std::string line = good;
      for (size_t changes = below(4); changes > 0; --changes) {
        const size_t at = below(line.size() + 1);
        switch (below(4)) {
          case 0:
            line.insert(at, 1, static_cast<char>(random()));
            break;
          case 1:
            line.insert(at, below(30), letters[below(letters.size())]);
            break;
          case 2:
            line.erase(at, below(10));
            break;
          default:
            line = line.substr(0, at) + std::to_string(random()) + line.substr(at);
        }
      }
      text += line + "\n";
    }
    const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
    for (const OnBad on_bad : {OnBad::stop, OnBad::some, OnBad::all}) {
      Rows rows = parse_exactly(plan, text, on_bad);
      check_whole(rows, plan.layout, lines, on_bad);
      for (const Bad& bad : rows.bad) {
        CHECK(bad.offset >= 0 && bad.length >= 0 && static_cast<size_t>(bad.offset + bad.length) < text.size());
        CHECK(bad.value >= 0 && bad.value_length >= 0 &&
              static_cast<size_t>(bad.value + bad.value_length) <= text.size());
      }
    }
  }
}

}  // namespace

// A layout with one slot, a history of two columns and two labels.
Layout with_history(KeyRule rule, size_t max, bool last) {
  Layout made;
  made.rule = rule;
  made.modulus = 1000001;
  made.labels = {LabelKind::click, LabelKind::count};
  made.add_slot("a", false, "14");
  made.add_slot("a", true, "14");
  made.add_slot("b", true, "15");
  made.add_history(2, max, last);
  return made;
}

Delimited history_lines(KeyRule rule, size_t max, bool last) {
  Delimited plan;
  plan.layout = with_history(rule, max, last);
  plan.list_separator = '|';
  plan.fields = {{Role::label, 0}, {Role::label, 1}, {Role::slot, 0}, {Role::slot, 1}, {Role::slot, 2}};
  return plan;
}

Slotted history_tokens(KeyRule rule, size_t max, bool last) {
  Slotted plan;
  plan.layout = with_history(rule, max, last);
  plan.name("y", {Role::label, 0});
  plan.name("n", {Role::label, 1});
  plan.name("a", {Role::slot, 0});
  plan.name("p", {Role::slot, 1});
  plan.name("q", {Role::slot, 2});
  return plan;
}

MultiSlot history_blocks(KeyRule rule, size_t max, bool last) {
  MultiSlot plan;
  plan.layout = with_history(rule, max, last);
  plan.steps = {{{{Role::label, 0}}, 1},
                {{{Role::label, 1}}, 1},
                {{{Role::slot, 0}}, 1},
                {{{Role::slot, 1}}, 0},
                {{{Role::slot, 2}}, 0}};
  return plan;
}

std::vector<uint64_t> keys_of(Rows& rows) { return {rows.keys.data(), rows.keys.data() + rows.keys.size}; }

TEST(histories_keep_their_last_or_first_events) {
  const std::vector<uint64_t> all = {9, 1, 2, 3, 4, 5, 6}, end = {9, 2, 3, 5, 6}, begin = {9, 1, 2, 4, 5};
  for (const auto& [max, last, wanted] : {std::tuple{size_t{3}, true, all}, {2, true, end}, {2, false, begin}}) {
    Rows fields = parse_exactly(history_lines(KeyRule::raw, max, last), "1\t5\t9\t1|2|3\t4|5|6\n", OnBad::stop);
    Rows tokens =
        parse_exactly(history_tokens(KeyRule::raw, max, last), "q:4 p:1 y:1 p:2 a:9 q:5 q:6 p:3 n:5\n", OnBad::stop);
    Rows blocks = parse_exactly(history_blocks(KeyRule::raw, max, last), "1 1 1 5 1 9 3 1 2 3 3 4 5 6\n", OnBad::stop);
    for (Rows* rows : {&fields, &tokens, &blocks}) {
      CHECK(rows->rows == 1 && keys_of(*rows) == wanted);
      CHECK(rows->labels.data()[0] == 1.0f && rows->labels.data()[1] == 5.0f);
    }
  }
}

TEST(columns_of_unequal_length_are_refused) {
  const auto reason = [](Rows rows) {
    CHECK(rows.bad_lines == 1 && rows.bad[0].why == Why::unequal);
    return rows.bad[0].detail;
  };
  const int64_t wanted = Unequal{2, 2, 1}.detail();
  CHECK(reason(parse_exactly(history_lines(KeyRule::hash64, 9, true), "1\t\tx\ta|b\tc\n", OnBad::stop)) == wanted);
  CHECK(reason(parse_exactly(history_tokens(KeyRule::hash64, 9, true), "y:1 p:a q:c p:b\n", OnBad::stop)) == wanted);
  CHECK(reason(parse_exactly(history_blocks(KeyRule::hash64, 9, true), "1 1 0 1 x 2 a b 1 c\n", OnBad::stop)) ==
        wanted);
  const Unequal many{1, SIZE_MAX, 3};
  CHECK(many.detail() == (int64_t{1} << 42 | int64_t{0x1FFFFF} << 21 | 3));
}

TEST(empty_fields_have_no_events_and_empty_values_are_events) {
  const Delimited plan = history_lines(KeyRule::hash64, 9, true);
  // Lines long enough for the fast path, and the same as the first line, which takes the other.
  const std::string line = "1\t\tsome value\t|a|\tb||c\n", none = "0\t\tsome value\t\t\n";
  Rows many = parse_exactly(plan, none + line + none + line + none, OnBad::stop);
  Rows alone = parse_exactly(plan, line, OnBad::stop);
  CHECK(many.rows == 5 && alone.rows == 1 && alone.keys.size == 7);
  const std::vector<uint64_t> keys = keys_of(many), one = keys_of(alone);
  CHECK(std::equal(one.begin(), one.end(), keys.begin() + 1) && std::equal(one.begin(), one.end(), keys.begin() + 9));
  CHECK(keys[2] == hash64(slot_seed("a", 1), nullptr, 0) && keys[3] == hash64(slot_seed("a", 1), "a", 1));
  CHECK(std::isnan(many.labels.data()[1]));
}

TEST(lists_of_every_length_take_any_bytes) {
  std::mt19937 random(5);
  const Delimited plan = history_lines(KeyRule::hash64, 50, false);
  for (size_t n = 0; n < 150; ++n) {
    std::string list;
    std::vector<std::string> values(n);
    for (size_t i = 0; i < n; ++i) {
      values[i] = std::string(random() % 12, static_cast<char>('a' + i % 26));
      list += (i == 0 ? "" : "|") + values[i];
    }
    if (n == 1 && list.empty()) continue;  // an empty field has no events
    const std::string line = "1\t2\tvalue\t" + list + "\t" + list + "\n";
    Rows rows = parse_exactly(plan, line + line + line, OnBad::stop);
    CHECK(rows.rows == 3);
    const size_t kept = std::min<size_t>(n, 50), width = 1 + 2 * kept;
    for (size_t r = 0; r < 3; ++r)
      for (size_t i = 0; i < kept; ++i) {
        const std::string& value = values[i];
        CHECK(rows.keys.data()[r * width + 1 + i] == hash64(slot_seed("a", 1), value.data(), value.size()));
        CHECK(rows.keys.data()[r * width + 1 + kept + i] == hash64(slot_seed("b", 1), value.data(), value.size()));
      }
  }
  unsigned seed = 200;
  for (const KeyRule rule : {KeyRule::hash64, KeyRule::py2, KeyRule::raw}) {
    fuzz(history_lines(rule, 2, true), "1\t2\t5\t1|2|3\t4|5|6", "\t\n\r|-", seed++);
    fuzz(history_tokens(rule, 2, true), "y:1 n:2 a:5 p:1 p:2 q:3 q:4", " :\n\t-", seed++);
    fuzz(history_blocks(rule, 2, false), "1 1 1 2 1 5 3 1 2 3 3 4 5 6", " \n\t-0", seed++);
  }
}

TEST(a_missing_label_needs_another_one) {
  const MultiSlot blocks = history_blocks(KeyRule::raw, 2, true);
  CHECK(parse_exactly(blocks, "0 1 2 1 9 0 0\n", OnBad::stop).rows == 1);
  CHECK(parse_exactly(blocks, "0 0 1 9 0 0\n", OnBad::stop).bad[0].why == Why::no_label);
  CHECK(parse_exactly(blocks, "2 1 1 0 1 9 0 0\n", OnBad::stop).bad[0].why == Why::value_count);
  MultiSlot one = blocks;
  one.layout.labels = {LabelKind::click};
  one.steps.erase(one.steps.begin() + 1);
  CHECK(parse_exactly(one, "0 1 9 0 0\n", OnBad::stop).bad[0].why == Why::bad_count);
}

TEST(weighted_takes_any_bytes) {
  for (const auto grammar : {Weighted::Grammar::bag, Weighted::Grammar::positions, Weighted::Grammar::spaces}) {
    const bool bag = grammar == Weighted::Grammar::bag, spaces = grammar == Weighted::Grammar::spaces;
    Weighted plan;
    plan.grammar = grammar;
    plan.layout.values = grammar != Weighted::Grammar::positions;
    plan.layout.add_slot("a", bag || spaces, "a");
    if (!bag) plan.layout.add_slot("b", spaces, "b");
    if (spaces) plan.names = {{"a", {Role::slot, 0}}, {"", {Role::slot, 1}}};
    fuzz(plan, spaces ? "1 0.5 'tag | x y:2 |a:3 a3 price:0.5" : "1 5:1 7:1", spaces ? " |:'1" : " :#1", 11);
  }
}

TEST(times_are_seconds_since_1970) {
  const auto at = [](const std::string& text) {
    int64_t time = -1;
    CHECK(to_time(text.data(), text.data() + text.size(), time));
    return time;
  };
  CHECK(at("1970-01-01") == 0);
  CHECK(at("2000-02-29T00:00:01Z") == 951782401);
  CHECK(at("1969-12-31 23:59:59") == -1);
  CHECK(at("2026-01-31T10:20:30.75+02:00") == 1769847630);
  CHECK(at("-3") == -3);
  CHECK(at("1700000000.9") == 1700000000);
}

TEST(delimited_takes_any_bytes) {
  unsigned seed = 1;
  for (const KeyRule rule : {KeyRule::hash64, KeyRule::py2, KeyRule::raw})
    for (const bool multi : {false, true}) {
      fuzz(delimited(rule, multi, false), "1\t5\t-3.5\t123\t456\tx", "\t\n\r:-.e", seed++);
      Delimited blanks = delimited(rule, multi, false);
      blanks.blank_is_missing = true;
      fuzz(blanks, "1\t \t-3.5\t  \t456\tx", "\t\n\r: -", seed++);
      fuzz(delimited(rule, multi, true), "1,5,,\"12\",456,\"x,\"\"y\"", ",\"\n\r|-", seed++);
    }
}

TEST(slotted_takes_any_bytes) {
  unsigned seed = 100;
  for (const KeyRule rule : {KeyRule::hash64, KeyRule::py2, KeyRule::raw}) {
    fuzz(slotted(rule, Slotted::Token::name_value), "label:1 d:1 d:2e3 a:5 b:6 b:7 z:9", " :\n\t-", seed++);
    fuzz(slotted(rule, Slotted::Token::value_name), "an id\t1:label 1:d 2:d 5:a 6:b 7:b", " :\n\t-", seed++);
    fuzz(slotted(rule, Slotted::Token::name_key_value), "1 a:5:0.5 b:6:2 b:7:-1", " :\n\t-.e", seed++);
    fuzz(multislot(rule), "2 0.5 7 1 5 3 6 7 8 1 1", " \n\t-0", seed++);
  }
}

TEST(tabs_separate_tokens_of_slot_text) {
  const Slotted plan = slotted(KeyRule::raw, Slotted::Token::name_value);
  Rows spaces = parse_exactly(plan, "label:1 d:1 d:2 a:5 b:6 b:7\n", OnBad::stop);
  Rows tabs = parse_exactly(plan, "label:1\td:1 d:2\ta:5\tb:6\tb:7\t\n", OnBad::stop);
  CHECK(spaces.rows == 1 && tabs.rows == 1);
  CHECK(std::equal(spaces.keys.data(), spaces.keys.data() + spaces.keys.size, tabs.keys.data()));
  CHECK(parse_exactly(plan, "label:1\t\td:1\n", OnBad::stop).bad_lines == 1);
}

TEST(blank_fields_are_missing_on_request) {
  Delimited plan = delimited(KeyRule::hash64, false, false);
  const std::string empty = "1\t\t2\t\tv\tz\n", blank = "1\t \t2\t  \tv\tz\n";
  CHECK(parse_exactly(plan, blank, OnBad::stop).bad_lines == 1);
  plan.blank_is_missing = true;
  for (const int before : {0, 3}) {  // the first and last lines of a block take another path
    std::string a, b;
    for (int i = 0; i <= 2 * before; ++i) {
      a += empty;
      b += blank;
    }
    Rows plain = parse_exactly(plan, a, OnBad::stop), same = parse_exactly(plan, b, OnBad::stop);
    CHECK(same.bad_lines == 0 && plain.rows == same.rows);
    CHECK(std::equal(plain.keys.data(), plain.keys.data() + plain.keys.size, same.keys.data()));
    CHECK(std::equal(plain.dense.data(), plain.dense.data() + plain.dense.size, same.dense.data()));
  }
}

TEST(many_lines_and_every_length) {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += "1\t" + std::to_string(i) + "\t\t" + std::string(static_cast<size_t>(i % 40), 'k') + "\t\t\n";
  Rows rows = parse_exactly(delimited(KeyRule::hash64, false, false), text, OnBad::stop);
  CHECK(rows.rows == 300);
  const uint64_t seed = slot_seed("a", 1);
  for (size_t i = 0; i < 300; ++i) {
    const std::string value(i % 40, 'k');
    CHECK(rows.keys.data()[3 * i] == hash64(seed, value.data(), value.size()));
    CHECK(rows.dense.data()[2 * i] == static_cast<float>(std::log1p(static_cast<double>(i))));
    CHECK(rows.dense.data()[2 * i + 1] == -1.0f);
  }
}

TEST(numbers_are_right_to_the_last_bit_or_refused) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    char text[64];
    const double x = static_cast<double>(random() % 10000000) / std::pow(10.0, static_cast<double>(random() % 8));
    const int n = std::snprintf(text, sizeof text, i % 2 ? "%.17g" : "%.6f", i % 3 ? x : -x);
    double got;
    CHECK(to_double(text, text + n, got));
    CHECK(got == std::strtod(text, nullptr));
  }
  double got;
  for (const std::string bad :
       {"", "-", "+", ".", "e5", "1e", "0x1", "nan", "inf", "1 ", " 1", "1e999", "--1", "1.2.3", "+-1"})
    CHECK(!to_double(bad.data(), bad.data() + bad.size(), got));
  uint64_t key;
  const std::string largest = "18446744073709551615", larger = "18446744073709551616";
  CHECK(to_u64(largest.data(), largest.data() + 20, key) && key == UINT64_MAX);
  CHECK(!to_u64(larger.data(), larger.data() + 20, key));
}

TEST(unique_keeps_the_order_of_first_occurrence) {
  std::mt19937_64 random(3);
  for (const size_t n : {0, 1, 17, 1000}) {
    std::vector<uint64_t> keys(n), distinct(n);
    std::vector<int64_t> where(n);
    for (uint64_t& key : keys) key = random() % 300 << 50;
    const size_t count = unique(keys.data(), n, distinct.data(), where.data());
    size_t seen = 0;
    for (size_t i = 0; i < n; ++i) {
      CHECK(distinct[static_cast<size_t>(where[i])] == keys[i]);
      CHECK(where[i] <= static_cast<int64_t>(seen));
      seen += where[i] == static_cast<int64_t>(seen);
    }
    CHECK(seen == count);
  }
}
