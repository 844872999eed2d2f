#include "group.hpp"

#include <cstring>

namespace seer {

void Group::append(int number, const int32_t* tokens, int k) {
  if (k <= 0) return;
  Segment& segment = segments_[size_t(number)];
  const int first = segment.end() - 1;  // the context that the first new token continues
  segment_bytes_ += segment.growth(k);
  segment.append(tokens, k);
  tokens_ += size_t(k);

  // The lines of the next context are fetched while the ones of this context are worked on.
  const int last = segment.end() - 2;
  uint32_t hashes[ORDER_COUNT], next[ORDER_COUNT] = {};
  hash_contexts(segment.at(first), hashes);
  for (uint32_t hash : hashes) contexts_.prefetch(hash);
  for (int position = first; position <= last; position++) {
    if (position < last) {
      hash_contexts(segment.at(position + 1), next);
      for (uint32_t hash : next) contexts_.prefetch(hash);
    }
    for (uint32_t hash : hashes) contexts_.add(hash, place_of(number, position));
    std::memcpy(hashes, next, sizeof hashes);
  }
}

size_t Group::bytes() const {
  // A segment is born with this capacity; `segment_bytes_` holds the rest, so that no loop is needed.
  static const size_t born = Segment(nullptr, 0).bytes();
  return sizeof(*this) + segments_.size() * born + segment_bytes_ + contexts_.bytes();
}

}  // namespace seer
