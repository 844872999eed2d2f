// One prompt group: the texts of its requests and the table of their contexts.
//
// Segment 0 is the prompt; each request has a segment of its own that leads with the prompt's end.
#pragma once

#include <vector>

#include "context_table.hpp"
#include "segment.hpp"

namespace seer {

class Group {
 public:
  explicit Group(int prompt_tokens) : prompt_tokens_(prompt_tokens) { segments_.emplace_back(nullptr, 0); }

  // Add a segment for one more request.  The prompt must be complete.
  int open_request() {
    const Segment& prompt = segments_[0];
    segments_.emplace_back(prompt.text(), prompt.size());
    return int(segments_.size()) - 1;
  }

  // Add tokens to a segment and every context whose continuation is now known to the table.
  void append(int segment, const int32_t* tokens, int k);

  // Give back a complete text's spare memory.
  void shrink(int segment) {
    const size_t before = segments_[size_t(segment)].bytes();
    segments_[size_t(segment)].shrink();
    segment_bytes_ -= before - segments_[size_t(segment)].bytes();
  }

  // Ask for the memory that the next append to this segment will touch.
  void prefetch_append(int segment) const {
    const Segment& text = segments_[size_t(segment)];
    uint32_t hashes[ORDER_COUNT];
    hash_contexts(text.at(text.end() - 1), hashes);
    for (uint32_t hash : hashes) contexts_.prefetch(hash);
  }

  int prompt_tokens() const { return prompt_tokens_; }
  size_t tokens() const { return tokens_; }
  size_t bytes() const;
  // An upper estimate of what appending k <= 256 tokens may add to bytes().
  size_t growth(int segment, int k) const {
    return segments_[size_t(segment)].growth(k) + contexts_.directory_bytes() + (size_t(64) << 10);
  }
  bool full() const { return segments_.size() >= MAX_SEGMENTS; }

  const std::vector<Segment>& segments() const { return segments_; }
  const Segment& segment(int number) const { return segments_[size_t(number)]; }
  std::vector<Segment> take_segments() { return std::move(segments_); }
  const ContextTable& contexts() const { return contexts_; }
  const int32_t* text_at(Place place) const {
    return segments_[size_t(segment_of(place))].at(position_of(place));
  }

 private:
  int prompt_tokens_;
  size_t tokens_ = 0;
  size_t segment_bytes_ = 0;  // of texts, beyond what each is born with (modulo 2^64)
  std::vector<Segment> segments_;
  ContextTable contexts_;
};

}  // namespace seer
