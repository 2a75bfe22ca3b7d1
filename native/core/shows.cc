#include "shows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "hash.h"
#include "parse/scan.h"

namespace clickfleet {
namespace {

constexpr size_t kMaxText = size_t{1} << 30;  // of a column: its offsets have 31 bits

// Reads values of msgpack one after another. A value of another type than expected makes it fail; it then stays failed.
class Unpacker {
 public:
  explicit Unpacker(std::string_view content) : at_(content.data()), end_(content.data() + content.size()) {}
  bool failed() const { return failed_; }
  bool at_end() const { return !failed_ && at_ == end_; }

  size_t array() {
    const uint8_t type = byte();
    if ((type & 0xf0) == 0x90) return type & 0x0f;
    return type == 0xdc ? number<uint16_t>() : type == 0xdd ? number<uint32_t>() : fail<size_t>();
  }
  std::string_view text() {
    const uint8_t type = byte();
    if ((type & 0xe0) == 0xa0) return span(type & 0x1f);
    return type == 0xd9   ? span(number<uint8_t>())
           : type == 0xda ? span(number<uint16_t>())
           : type == 0xdb ? span(number<uint32_t>())
                          : fail<std::string_view>();
  }
  std::string_view binary() {
    const uint8_t type = byte();
    return type == 0xc4   ? span(number<uint8_t>())
           : type == 0xc5 ? span(number<uint16_t>())
           : type == 0xc6 ? span(number<uint32_t>())
                          : fail<std::string_view>();
  }
  int64_t integer() {
    const uint8_t type = byte();
    if (type < 0x80 || type >= 0xe0) return static_cast<int8_t>(type);
    switch (type) {
      case 0xcc:
        return number<uint8_t>();
      case 0xcd:
        return number<uint16_t>();
      case 0xce:
        return number<uint32_t>();
      case 0xcf: {
        const auto value = number<uint64_t>();
        return value <= INT64_MAX ? static_cast<int64_t>(value) : fail<int64_t>();
      }
      case 0xd0:
        return number<int8_t>();
      case 0xd1:
        return number<int16_t>();
      case 0xd2:
        return number<int32_t>();
      case 0xd3:
        return number<int64_t>();
      default:
        return fail<int64_t>();
    }
  }
  // Skips nil if it comes next, and returns whether it did.
  bool nil() {
    if (at_ == end_ || static_cast<uint8_t>(*at_) != 0xc0) return false;
    ++at_;
    return true;
  }

 private:
  template <class T>
  T fail() {
    failed_ = true;
    at_ = end_;
    return T{};
  }
  uint8_t byte() { return at_ == end_ ? fail<uint8_t>() : static_cast<uint8_t>(*at_++); }
  template <class T>
  T number() {  // big-endian
    if (static_cast<size_t>(end_ - at_) < sizeof(T)) return fail<T>();
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value = value << 8 | static_cast<uint8_t>(*at_++);
    return static_cast<T>(value);
  }
  std::string_view span(size_t n) {
    if (static_cast<size_t>(end_ - at_) < n) return fail<std::string_view>();
    at_ += n;
    return {at_ - n, n};
  }

  const char* at_;
  const char* end_;
  bool failed_ = false;
};

enum : uint8_t { kQuote = 1, kOpen = 2, kClose = 4, kSpace = 8, kComma = 16 };

constexpr std::array<uint8_t, 256> kJson = [] {
  std::array<uint8_t, 256> kinds{};
  kinds['"'] = kQuote;
  kinds['{'] = kinds['['] = kOpen;
  kinds['}'] = kinds[']'] = kClose;
  kinds[' '] = kinds['\t'] = kinds['\n'] = kinds['\r'] = kSpace;
  kinds[','] = kComma;
  return kinds;
}();

// Finds where the values of JSON begin and end. A server has parsed the text before, so it is not checked; but whatever
// it is, nothing is read beyond it.
class JsonScanner {
 public:
  explicit JsonScanner(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  // Skips space, and this character if it comes next. Returns whether it did.
  bool skip(char c) {
    space();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool at_end() {
    space();
    return at_ == end_;
  }
  // Returns the characters of a string as they are written; nothing if there is none, or if it has an escape.
  std::optional<std::string_view> plain_string() {
    space();
    const char* const first = at_;
    if (at_ == end_ || *at_ != '"' || !string()) return std::nullopt;
    const std::string_view inner(first + 1, static_cast<size_t>(at_ - first) - 2);
    return inner.find('\\') == std::string_view::npos ? std::optional(inner) : std::nullopt;
  }
  // Returns the text of the next value, or an empty one.
  std::string_view value() {
    space();
    const char* const first = at_;
    if (at_ == end_) return {};
    const uint8_t kind = kJson[static_cast<uint8_t>(*at_)];
    if (kind == kQuote) {
      if (!string()) return {};
    } else if (kind == kOpen) {
      if (!nested()) return {};
    } else {
      while (at_ != end_ && kJson[static_cast<uint8_t>(*at_)] == 0) ++at_;
    }
    return {first, static_cast<size_t>(at_ - first)};
  }

 private:
  void space() {
    while (at_ != end_ && kJson[static_cast<uint8_t>(*at_)] == kSpace) ++at_;
  }
  bool string() {
    for (++at_; at_ != end_; ++at_) {
      if (*at_ == '"') {
        ++at_;
        return true;
      }
      if (*at_ == '\\') {
        ++at_;
        if (at_ == end_) return false;
      }
    }
    return false;
  }
  // Skips an object or an array: to the bracket that closes the first one. Brackets inside strings do not count.
  bool nested() {
    size_t depth = 0;
    bool in_string = false, escaped = false;
    while (at_ != end_) {
      const auto n = std::min(static_cast<size_t>(end_ - at_), kBlock);
      if (n == kBlock && !escaped && parse::match(at_, '\\') == 0) {
        const uint64_t inside = up_to(parse::match(at_, '"')) ^ (in_string ? ~0ULL : 0);
        const uint64_t opens = (parse::match(at_, '{') | parse::match(at_, '[')) & ~inside;
        const uint64_t closes = (parse::match(at_, '}') | parse::match(at_, ']')) & ~inside;
        for (uint64_t left = opens | closes; left != 0; left &= left - 1) {
          depth += (opens & left & (~left + 1)) != 0 ? 1 : -1ULL;
          if (depth == 0) {
            at_ += std::countr_zero(left) + 1;
            return true;
          }
        }
        in_string = inside >> 63 != 0;
        at_ += kBlock;
        continue;
      }
      for (const char* const last = at_ + n; at_ != last; ++at_) {
        if (in_string) {
          in_string = escaped || *at_ != '"';
          escaped = !escaped && *at_ == '\\';
          continue;
        }
        const uint8_t kind = kJson[static_cast<uint8_t>(*at_)];
        in_string = kind == kQuote;
        if (kind == kOpen) ++depth;
        if (kind == kClose && --depth == 0) {
          ++at_;
          return true;
        }
      }
    }
    return false;
  }
  // Returns for every bit whether an odd number of bits up to it are set: whether the byte is in a string, by quotes.
  static uint64_t up_to(uint64_t bits) {
    for (int shift = 1; shift < 64; shift *= 2) bits ^= bits << shift;
    return bits;
  }

  static constexpr size_t kBlock = 64;
  const char* at_;
  const char* end_;
};

// Calls take(name, json) for every member of an object, which must skip its value. Returns false for anything else.
template <class Take>
bool members_of(std::string_view text, const Take& take) {
  JsonScanner json(text);
  if (!json.skip('{')) return false;
  if (json.skip('}')) return json.at_end();
  do {
    const auto name = json.plain_string();
    if (!name || !json.skip(':') || !take(*name, json)) return false;
  } while (json.skip(','));
  return json.skip('}') && json.at_end();
}

bool elements_of(JsonScanner& json, std::vector<std::string_view>& out) {
  out.clear();
  if (!json.skip('[')) return false;
  if (json.skip(']')) return true;
  do {
    out.push_back(json.value());
    if (out.back().empty()) return false;
  } while (json.skip(','));
  return json.skip(']');
}

bool texts_of(Unpacker& from, std::vector<std::string_view>& out) {
  out.clear();
  for (size_t n = from.array(); n > 0 && !from.failed(); --n) out.push_back(from.text());
  return !from.failed();
}

// The parts of one entry, and room for them that is used again.
struct Entry {
  std::string_view route, request, model, scores, body, user;
  int64_t time = 0, sequence = 0;
  bool has_items = false, has_places = false, has_ranked = false, has_user = false;
  std::vector<std::string_view> items, ranked, features;
  std::vector<int64_t> places;
  std::unordered_map<std::string_view, int32_t> place_of;

  bool read(Unpacker& from) {
    if (from.array() != 10) return false;
    route = from.text();
    if (route != "predict" && route != "rank") return false;
    request = from.text();
    time = from.integer();
    model = from.text();
    sequence = from.integer();
    scores = from.binary();
    body = from.binary();
    has_items = !from.nil();
    if (has_items && !texts_of(from, items)) return false;
    has_places = !from.nil();
    places.clear();
    for (size_t n = has_places ? from.array() : 0; n > 0 && !from.failed(); --n) places.push_back(from.integer());
    has_ranked = !from.nil();
    if (has_ranked && !texts_of(from, ranked)) return false;
    return !from.failed() && scores.size() % 4 == 0 && cut();
  }

 private:
  // Cuts the features of the rows out of the body.
  bool cut() {
    const bool is_rank = route == "rank";
    features.clear();
    has_user = false;
    const bool whole = members_of(body, [&](std::string_view name, JsonScanner& json) {
      if (name == (is_rank ? "candidates" : "rows")) return elements_of(json, features);
      const std::string_view value = json.value();
      if (is_rank && name == "user") user = value, has_user = true;
      return !value.empty();
    });
    if (!whole || has_places != is_rank || (has_ranked && !has_items)) return false;
    if (is_rank) {
      std::vector<std::string_view> chosen;
      chosen.reserve(places.size());
      for (const int64_t place : places) {
        if (place < 0 || static_cast<size_t>(place) >= features.size()) return false;
        chosen.push_back(features[static_cast<size_t>(place)]);
      }
      features = std::move(chosen);
    }
    place_of.clear();
    for (size_t i = 0; has_ranked && i < ranked.size(); ++i) place_of[ranked[i]] = static_cast<int32_t>(i + 1);
    const size_t n = scores.size() / 4;
    return features.size() == n && (!has_items || items.size() == n);
  }
};

uint64_t little(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

// Appends an entry. Returns false if a column would be too long.
bool append(ShowColumns& to, const Entry& from) {
  const size_t rows = from.scores.size() / 4;
  if (rows == 0) return true;
  const size_t shared =
      from.request.size() + from.model.size() + from.route.size() + (from.has_user ? from.user.size() : 0);
  if (shared > kMaxText / rows) return false;
  size_t texts = to.bytes() + shared * rows + from.body.size() + rows * 24;
  for (const std::string_view item : from.items) texts += item.size();
  if (texts > kMaxText) return false;
  to.shared_bytes += shared * rows;
  to.has_user.add(to.requests(), from.has_user);
  to.user.add(from.has_user ? from.user : std::string_view{});
  to.request.add(from.request);
  to.model.add(from.model);
  to.route.add(from.route);
  to.sequence.push_back(from.sequence);
  to.time.push_back(from.time);
  for (size_t i = 0; i < rows; ++i) {
    to.features.add(from.features[i]);
    if (from.has_items) {
      to.item.add(from.items[i]);
    } else {
      char digits[24];
      const char* const end = std::to_chars(digits, digits + sizeof digits, i).ptr;
      to.item.add({digits, static_cast<size_t>(end - digits)});
    }
    const auto place = from.has_ranked ? from.place_of.find(from.items[i]) : from.place_of.end();
    const bool shown = !from.has_ranked || place != from.place_of.end();
    to.position.push_back(from.has_ranked ? (shown ? place->second : 0) : static_cast<int32_t>(i + 1));
    to.has_position.add(to.rows(), shown);
    const auto bits = static_cast<uint32_t>(little(from.scores.substr(4 * i, 4)));
    to.score.push_back(std::bit_cast<float>(bits));
  }
  to.rows_until.push_back(static_cast<int32_t>(to.rows()));
  return true;
}

// Appends values as msgpack.
class Packer {
 public:
  explicit Packer(std::string& out) : out_(out) {}
  void byte(unsigned value) { out_.push_back(static_cast<char>(value)); }
  void text(std::string_view value) { sized(0xdb, value); }
  void binary(std::string_view value) { sized(0xc6, value); }
  void integer(int64_t value) {
    byte(0xd3);
    number(static_cast<uint64_t>(value), 8);
  }

 private:
  void sized(unsigned type, std::string_view value) {
    byte(type);
    number(value.size(), 4);
    out_.append(value);
  }
  void number(uint64_t value, int bytes) {  // big-endian
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) byte(static_cast<uint8_t>(value >> shift));
  }
  std::string& out_;
};

void shrink(ValidityColumn& column, size_t values, size_t missing) {
  column.bits.resize((values + 7) / 8);
  if (values % 8 != 0) column.bits.back() &= static_cast<uint8_t>((1U << (values % 8)) - 1);
  column.missing = missing;
}

void shrink(ShowColumns& to, size_t requests, size_t without_user, size_t without_position) {
  to.rows_until.resize(requests + 1);
  const auto rows = static_cast<size_t>(to.rows_until.back());
  for (TextColumn* column : {&to.request, &to.model, &to.route, &to.user}) column->shrink(requests);
  for (TextColumn* column : {&to.item, &to.features}) column->shrink(rows);
  to.time.resize(requests);
  to.sequence.resize(requests);
  to.position.resize(rows);
  to.score.resize(rows);
  shrink(to.has_user, requests, without_user);
  shrink(to.has_position, rows, without_position);
}

}  // namespace

uint64_t frame_hash(std::string_view content) { return hash64(slot_seed("frame", 5), content.data(), content.size()); }

std::string_view frame_of(const PlainShow& show) {
  thread_local std::string frame;
  frame.assign(kFrameHead, '\0');
  Packer to(frame);
  to.byte(0x91);  // one entry
  to.byte(0x9a);  // of ten values
  to.text(show.route);
  to.text(show.request);
  to.integer(show.time);
  to.text(show.model);
  to.integer(show.sequence);
  to.binary(show.scores);
  to.binary(show.body);
  for (int i = 0; i < 3; ++i) to.byte(0xc0);  // no ids, places or order
  const std::string_view content = std::string_view(frame).substr(kFrameHead);
  const uint64_t length = content.size(), hash = frame_hash(content);
  for (int i = 0; i < 4; ++i) frame[static_cast<size_t>(i)] = static_cast<char>(length >> (8 * i));
  for (int i = 0; i < 8; ++i) frame[static_cast<size_t>(4 + i)] = static_cast<char>(hash >> (8 * i));
  return frame;
}

size_t ShowColumns::bytes() const { return shared_bytes + item.bytes.size() + features.bytes.size() + rows() * 48; }

bool ShowColumns::add_content(std::string_view content) {
  const size_t before = requests(), without_user = has_user.missing, without_position = has_position.missing;
  const size_t shared = shared_bytes;
  Unpacker from(content);
  thread_local Entry entry;
  bool good = true;
  for (size_t n = from.array(); good && n > 0; --n) good = entry.read(from) && append(*this, entry);
  if (good && from.at_end()) return true;
  shrink(*this, before, without_user, without_position);
  shared_bytes = shared;
  return false;
}

ShowColumns::Progress ShowColumns::add(std::string_view frames) {
  Progress at;
  while (frames.size() - at.taken >= kFrameHead) {
    const std::string_view rest = frames.substr(at.taken);
    const size_t length = little(rest.substr(0, 4));
    at.next = kFrameHead + length;
    at.damaged = length > kMaxFrame;
    if (at.damaged || rest.size() < at.next) return at;
    const std::string_view content = rest.substr(kFrameHead, length);
    at.damaged = frame_hash(content) != little(rest.substr(4, 8));
    if (at.damaged) return at;
    if (!add_content(content)) others.emplace_back(content);
    at.taken += at.next;
    at.next = 0;
  }
  return at;
}

}  // namespace clickfleet
