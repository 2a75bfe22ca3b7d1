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
  const size_t rows = shows.rows();
  for (const TextColumn* column :
       {&shows.request, &shows.item, &shows.features, &shows.model, &shows.route, &shows.user})
    CHECK(column->offsets.size() == rows + 1 && static_cast<size_t>(column->offsets.back()) == column->bytes.size());
  CHECK(shows.position.size() == rows && shows.time.size() == rows && shows.sequence.size() == rows);
  CHECK(shows.has_user.bits.size() == (rows + 7) / 8 && shows.has_position.bits.size() == (rows + 7) / 8);
  const std::vector<char> exact(content.begin(), content.end());
  const auto progress = shows.add({exact.data(), exact.size()});
  CHECK(progress.taken <= exact.size());
}
