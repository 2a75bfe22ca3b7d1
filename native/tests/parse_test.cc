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
  CHECK(rows.labels.size == rows.rows);
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
