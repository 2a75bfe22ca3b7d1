#include "shows.h"

#include "check.h"

namespace clickfleet {
namespace {

std::string frame(const std::string& content) {
  std::string head;
  for (int i = 0; i < 4; ++i) head += static_cast<char>(content.size() >> (8 * i));
  for (int i = 0; i < 8; ++i) head += static_cast<char>(frame_hash(content) >> (8 * i));
  return head + content;
}

std::string text(const std::string& value) { return static_cast<char>(0xa0 + value.size()) + value; }

std::string binary(const std::string& value) {
  return std::string("\xc5") + static_cast<char>(value.size() >> 8) + static_cast<char>(value.size()) + value;
}

// An entry with the fields up to the body; `rest` has items, places and ranked.
std::string entry(const std::string& route, const std::string& body, size_t rows, const std::string& rest) {
  std::string scores;
  for (size_t i = 0; i < rows; ++i) scores += std::string("\0\0\x80\x3f", 4);  // 1.0
  return "\x9a" + text(route) + text("r1") + "\x07" + text("m") + "\x05" + binary(scores) + binary(body) + rest;
}

std::string_view at(const TextColumn& column, size_t row) {
  const auto first = static_cast<size_t>(column.offsets[row]), end = static_cast<size_t>(column.offsets[row + 1]);
  return std::string_view(column.bytes).substr(first, end - first);
}

TEST(rows_are_cut_out_of_their_body_as_they_are) {
  ShowColumns shows;
  const std::string first = R"({"a": "]}\"", "b": [1, {"c": 2}]})", second = "{ }";
  const std::string body = R"( {"x": {"rows": [9]}, "rows" : [ )" + first + " ," + second + R"(], "y": 1e3 } )";
  const std::string frames = frame("\x91" + entry("predict", body, 2, "\xc0\xc0\xc0"));
  const auto progress = shows.add(frames);
  CHECK(progress.taken == frames.size() && progress.next == 0 && !progress.damaged);
  CHECK(shows.rows() == 2 && shows.others.empty());
  CHECK(at(shows.features, 0) == first && at(shows.features, 1) == second);
  CHECK(shows.requests() == 1 && shows.rows_until == (std::vector<int32_t>{0, 2}));
  CHECK(at(shows.item, 1) == "1" && at(shows.request, 0) == "r1" && at(shows.route, 0) == "predict");
  CHECK(shows.position[1] == 2 && shows.has_position.missing == 0 && shows.has_user.missing == 1);
  CHECK(shows.time[0] == 7 && shows.sequence[0] == 5 && shows.score[1] == 1.0F);
}

TEST(a_ranking_has_the_places_of_its_reply) {
  ShowColumns shows;
  const std::string body = R"({"candidates": [{"id": "a"}, {"id": "b"}, {"id": "c"}], "user": {"u": 1}})";
  const std::string rest = "\x92" + text("c") + text("a") + "\x92\x02" + std::string(1, '\0') + "\x91" + text("a");
  CHECK(shows.add_content("\x91" + entry("rank", body, 2, rest)));
  CHECK(at(shows.features, 0) == R"({"id": "c"})" && at(shows.features, 1) == R"({"id": "a"})");
  CHECK(shows.has_position.bits[0] == 2 && shows.has_position.missing == 1 && shows.position[1] == 1);
  CHECK(at(shows.user, 0) == R"({"u": 1})" && shows.has_user.missing == 0);
}

TEST(what_rows_share_is_there_once_and_counts_for_each) {
  ShowColumns shows;
  const std::string user(200, 'u'), two = "\x92" + text("a") + text("b") + "\x92" + std::string("\0\1", 2) + "\xc0";
  const std::string ranking = entry("rank", R"({"candidates": [{}, {}], "user": ")" + user + R"("})", 2, two);
  const std::string none = entry("predict", R"({"rows": []})", 0, "\xc0\xc0\xc0");
  CHECK(shows.add_content("\x93" + ranking + none + ranking));
  CHECK(shows.requests() == 2 && shows.rows() == 4 && shows.rows_until == (std::vector<int32_t>{0, 2, 4}));
  CHECK(at(shows.user, 1).size() == 202 && shows.user.bytes.size() == 404);
  CHECK(shows.bytes() > 4 * user.size() && shows.bytes() < 8 * user.size());
  const size_t before = shows.bytes();
  CHECK(!shows.add_content("\x92" + ranking + "x") && shows.bytes() == before);
}

TEST(what_the_core_cannot_convert_leaves_no_trace) {
  ShowColumns shows;
  const std::string good = entry("predict", R"({"rows": [{}]})", 1, "\xc0\xc0\xc0");
  for (int i = 0; i < 11; ++i) CHECK(shows.add_content("\x91" + good));
  const std::string escaped = entry("predict", R"({"r\u006fws": [{}]})", 1, "\xc0\xc0\xc0");
  const std::string short_of_rows = entry("predict", R"({"rows": [{}, {}]})", 1, "\xc0\xc0\xc0");
  const std::string beyond =
      entry("rank", R"({"candidates": [{}]})", 1, "\x91" + text("a") + "\x91\x01\x91" + text("a"));
  for (const std::string& bad : {escaped, short_of_rows, beyond, entry("infer", "{}", 0, "\xc0\xc0\xc0"), good + "x"})
    CHECK(!shows.add_content("\x92" + good + bad));
  CHECK(shows.rows() == 11 && shows.has_user.missing == 11 && shows.has_position.missing == 0);
  CHECK(shows.features.offsets.size() == 12 && shows.features.bytes.size() == 22);
  CHECK(shows.has_position.bits.size() == 2 && shows.has_position.bits[1] == 7);
  const std::string content = "\x91" + escaped;
  CHECK(shows.add(frame(content)).taken == frame(content).size());
  CHECK(shows.others.size() == 1 && shows.others[0] == content);
}

TEST(a_plain_show_is_read_as_it_was_written) {
  ShowColumns shows;
  const std::string request(300, 'r'), body = R"({"rows": [{"a": 1}]})", score("\0\0\x80\x3f", 4);
  for (const int64_t time : {int64_t{0}, INT64_MAX, INT64_MIN})
    CHECK(!shows.add(frame_of({"predict", request, "m", score, body, time, 7})).damaged);
  CHECK(shows.rows() == 3 && shows.others.empty() && shows.time[1] == INT64_MAX && shows.time[2] == INT64_MIN);
  CHECK(at(shows.request, 2) == request && at(shows.model, 0) == "m" && shows.sequence[0] == 7);
  CHECK(at(shows.features, 1) == R"({"a": 1})" && shows.score[0] == 1.0F);
}

TEST(frames_are_taken_whole) {
  const std::string one = frame("\x91" + entry("predict", R"({"rows": [{}]})", 1, "\xc0\xc0\xc0")), both = one + one;
  for (size_t size = 0; size < both.size(); ++size) {
    ShowColumns shows;
    const auto progress = shows.add(std::string_view(both).substr(0, size));
    CHECK(progress.taken == size / one.size() * one.size() && !progress.damaged);
    CHECK(progress.next == (size % one.size() < kFrameHead ? 0 : one.size()));
    CHECK(shows.rows() == size / one.size());
  }
  for (const size_t damaged : {size_t{3}, size_t{5}, one.size() - 1}) {
    std::string bytes = both;
    bytes[one.size() + damaged] ^= 0x40;
    ShowColumns shows;
    const auto progress = shows.add(bytes);
    CHECK(progress.damaged && progress.taken == one.size() && shows.rows() == 1);
  }
}

}  // namespace
}  // namespace clickfleet
