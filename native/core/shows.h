// What workers scored, as columns: reads the frames that they append to a file (serve/frames.py), without Python
// objects in between. The recorder shares cores with the workers, so its time per row is part of the latency of
// replies.
//
// A frame is its length (u32), the hash of its content (u64), both little-endian, and the content: a msgpack array of
// entries, each an array of 10 values (Scored in serve/show_log.py). The features of a row are cut out of the JSON body
// of its request as they are.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace clickfleet {

// Texts as Arrow has them: text i is bytes[offsets[i], offsets[i + 1]).
struct TextColumn {
  std::vector<int32_t> offsets{0};
  std::string bytes;

  void add(std::string_view text) {
    bytes.append(text);
    offsets.push_back(static_cast<int32_t>(bytes.size()));
  }
  void shrink(size_t values) {
    offsets.resize(values + 1);
    bytes.resize(static_cast<size_t>(offsets.back()));
  }
};

// One bit per place, the lowest bit first: whether it has a value.
struct ValidityColumn {
  std::vector<uint8_t> bits;
  size_t missing = 0;

  void add(size_t place, bool valid) {
    if (place % 8 == 0) bits.push_back(0);
    bits[place / 8] |= static_cast<uint8_t>(valid ? 1U << (place % 8) : 0);
    missing += valid ? 0 : 1;
  }
};

// What the rows of a request share is there once: a ranking has a hundred rows and one user.
struct ShowColumns {
  // Of requests. The rows of request i are [rows_until[i], rows_until[i + 1]).
  TextColumn request, model, route, user;
  std::vector<int64_t> time, sequence;
  ValidityColumn has_user;
  std::vector<int32_t> rows_until{0};
  // Of rows.
  TextColumn item, features;
  std::vector<int32_t> position;
  std::vector<float> score;
  ValidityColumn has_position;
  size_t shared_bytes = 0;  // of the texts of requests, if each of their rows had them

  std::vector<std::string> others;  // contents of frames that only Python can convert: tensors, unusual JSON, damage

  struct Progress {
    size_t taken = 0;      // bytes of whole frames
    size_t next = 0;       // bytes of the frame after them, if its length is known
    bool damaged = false;  // what follows is no frame
  };

  // Appends the requests of all whole frames. Those without rows are left out.
  Progress add(std::string_view frames);
  // Appends the requests of the content of one frame, or leaves the columns as they were and returns false.
  bool add_content(std::string_view content);

  size_t requests() const { return time.size(); }
  size_t rows() const { return score.size(); }
  // Returns about how many bytes the rows have, with the texts of its request in each.
  size_t bytes() const;
};

inline constexpr size_t kFrameHead = 12;
inline constexpr size_t kMaxFrame = size_t{1} << 30;

// Returns the hash in the head of a frame.
uint64_t frame_hash(std::string_view content);

// A scored request whose rows have no ids: what a worker appends before most replies.
struct PlainShow {
  std::string_view route, request, model, scores, body;
  int64_t time = 0, sequence = 0;
};

// Returns the frame of a show, in memory of the calling thread until its next call.
std::string_view frame_of(const PlainShow& show);

}  // namespace clickfleet
