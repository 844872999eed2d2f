// A small index over the text of groups that are gone: better than nothing while siblings are young.
//
// Text goes into a ring; the places of each context of 2 and 4 tokens go into a cache line of a fixed
// table, with 8 bits of the context's hash, where the newest push out the oldest, as a compressor's
// match finder does it.  Nothing grows and nothing is deleted: a place whose text has been overwritten
// fails the comparison with the text.
// Texts are parted by NO_TOKEN, so no continuation leaves its own text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "context_table.hpp"
#include "segment.hpp"

namespace seer {

class RecentText {
 public:
  static constexpr int ORDER_FIRST = 1;  // contexts of ORDERS[1..]; one token alone says too little
  static constexpr int WAYS = 15;
  static constexpr int PLACE_BITS = 24;

  // Bytes per token: 4 of text, and 2 contexts in lines of 64 bytes for 16 contexts each.
  explicit RecentText(size_t max_bytes) {
    size_t tokens = 1 << 10;
    while (tokens * 2 * 12 <= max_bytes && tokens < size_t(1) << (PLACE_BITS - 1)) tokens *= 2;
    size_ = tokens * 12 <= max_bytes ? uint32_t(tokens) : 0;
  }

  bool used() const { return text_ != nullptr; }
  uint32_t capacity() const { return size_; }
  size_t reserved_bytes() const { return size_ ? text_bytes() + line_bytes() : 0; }
  size_t bytes() const { return used() ? text_bytes() + line_bytes() : 0; }
  void clear() { memory_.reset(), text_ = nullptr, lines_ = nullptr, next_ = LEAD; }

  // Append tokens; a new text begins where `first` is set.  Its memory is taken at the first call.
  void append(const int32_t* tokens, int k, bool first) {
    if (!size_) return;
    if (!used()) allocate();
    if (first) part();
    for (int i = 0; i < k; i++) {
      if (next_ >= uint32_t(LEAD) + size_) part();
      text_[next_] = tokens[i];
      // The context that ends before this token has a continuation now.
      if (text_[next_ - 1] >= 0) add(next_ - 1);
      text_[++next_] = NO_TOKEN;
    }
  }

  void prefetch(const uint32_t hashes[ORDER_COUNT]) const {
    for (int order = ORDER_FIRST; order < ORDER_COUNT; order++) __builtin_prefetch(&line(hashes[order]));
  }

  // Call visit(place) for up to `limit` places where this context may have occurred, newest first.
  template <class Visit>
  void newest(uint32_t hash, int limit, Visit&& visit) const {
    const Line& here = line(hash);
    int at = int(here.oldest);
    for (int way = 0; way < WAYS && limit > 0; way++) {
      at = at == 0 ? WAYS - 1 : at - 1;
      const uint32_t place = here.entries[at] & ((1u << PLACE_BITS) - 1);
      if (place == 0 || here.entries[at] >> PLACE_BITS != tag(hash)) continue;
      visit(place);
      limit--;
    }
  }
  const int32_t* text_at(uint32_t place) const { return text_ + place; }

 private:
  struct alignas(64) Line {
    uint32_t oldest;
    uint32_t entries[WAYS];  // tag and place; place 0: none
  };
  static uint32_t tag(uint32_t hash) { return hash & 255; }  // the upper bits choose the line
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  size_t line_count() const { return size_ / 8; }  // a power of two
  size_t line_bytes() const { return line_count() * sizeof(Line); }
  size_t text_bytes() const { return (size_t(LEAD) + size_ + 1) * sizeof(int32_t); }
  Line& line(uint32_t hash) const { return lines_[size_t(uint64_t(hash) * line_count() >> 32)]; }

  // calloc's pages are zero until they are touched: no pause here, however large the ring.
  void allocate() {
    memory_.reset(std::calloc(1, line_bytes() + text_bytes() + alignof(Line)));
    if (!memory_) throw std::bad_alloc();
    const auto start = (reinterpret_cast<uintptr_t>(memory_.get()) + alignof(Line) - 1) & ~(alignof(Line) - 1);
    lines_ = reinterpret_cast<Line*>(start);
    text_ = reinterpret_cast<int32_t*>(start + line_bytes());
    std::fill(text_, text_ + LEAD + 1, NO_TOKEN);
  }

  void add(uint32_t place) {
    uint32_t hashes[ORDER_COUNT];
    hash_contexts(text_ + place, hashes);
    for (int order = ORDER_FIRST; order < ORDER_COUNT; order++) {
      Line& here = line(hashes[order]);
      here.entries[here.oldest] = tag(hashes[order]) << PLACE_BITS | place;
      here.oldest = here.oldest + 1 == WAYS ? 0 : here.oldest + 1;
    }
  }
  void part() {
    next_ = next_ + 2 >= uint32_t(LEAD) + size_ ? uint32_t(LEAD) : next_ + 1;
    text_[next_ - 1] = NO_TOKEN;
    text_[next_] = NO_TOKEN;
  }

  uint32_t size_;
  uint32_t next_ = LEAD;
  std::unique_ptr<void, Free> memory_;
  Line* lines_ = nullptr;
  int32_t* text_ = nullptr;
};

}  // namespace seer
