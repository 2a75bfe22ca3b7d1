// Reads contents of frames, and frames, of arbitrary bytes.
#include "fuzz.h"
#include "shows.h"

using namespace clickfleet;
using clickfleet::fuzz::raw;

FUZZ(shows, raw("\x91\x9a\xa7predict\xa1r\x07\xa1m\x05\xc4\x04\0\0\x80\x3f\xc4\x0e{\"rows\": [{}]}\xc0\xc0\xc0"),
     raw("\x91\x9a\xa4rank\xa1r\x07\xa1m\x05\xc4\x04\0\0\x80\x3f\xc4\x1e{\"candidates\":[{}],\"user\":1}\x91\xa1"
         "a\x91\0\x91\xa1"
         "a")) {
  ShowColumns shows;
  const std::string content = in.rest();
  for (int i = 0; i < 3; ++i) {
    const size_t before = shows.rows();
    const std::vector<char> exact(content.begin(), content.end());
    const bool good = shows.add_content({exact.data(), exact.size()});
    CHECK(good || shows.rows() == before);
  }
  const auto whole = [](const TextColumn& column, size_t values) {
    return column.offsets.size() == values + 1 && static_cast<size_t>(column.offsets.back()) == column.bytes.size();
  };
  const size_t requests = shows.requests(), rows = shows.rows();
  for (const TextColumn* column : {&shows.request, &shows.model, &shows.route, &shows.user})
    CHECK(whole(*column, requests));
  for (const TextColumn* column : {&shows.item, &shows.features}) CHECK(whole(*column, rows));
  CHECK(shows.rows_until.size() == requests + 1 && static_cast<size_t>(shows.rows_until.back()) == rows);
  CHECK(shows.sequence.size() == requests && shows.has_user.bits.size() == (requests + 7) / 8);
  CHECK(shows.position.size() == rows && shows.has_position.bits.size() == (rows + 7) / 8);
  const std::vector<char> exact(content.begin(), content.end());
  const auto progress = shows.add({exact.data(), exact.size()});
  CHECK(progress.taken <= exact.size());
}
