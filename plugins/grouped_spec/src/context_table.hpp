// Where has this context occurred?  A hash table from the last 1, 2 or 4 tokens to the newest places.
//
// Keys are 32-bit hashes; two contexts that share one only cost time, as every place is compared with
// the text before it counts.  A value is one place, or a ring of the newest 3, 7, 15, 31 or 63 places
// in a pooled block that doubles as it fills.
//
// The table grows by extendible hashing (Fagin et al. 1979): a directory over sub-tables of 4 KiB; a
// full one is split in two, so an append waits for the rehashing of 448 keys at most, a few microseconds.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace seer {

constexpr int ORDERS[] = {1, 2, 4};  // context lengths, tokens; more of them did not draft better
constexpr int ORDER_COUNT = 3;
constexpr int LONGEST_ORDER = ORDERS[ORDER_COUNT - 1];

// A place in a group's text: segment number and position in it.
using Place = uint32_t;
constexpr int POSITION_BITS = 20;
constexpr int MAX_POSITIONS = 1 << POSITION_BITS;         // of one segment, its lead included
constexpr int MAX_SEGMENTS = 1 << (31 - POSITION_BITS);   // of one group; the top bit marks a block
inline Place place_of(int segment, int position) {
  return uint32_t(segment) << POSITION_BITS | uint32_t(position);
}
inline int segment_of(Place place) { return int(place >> POSITION_BITS); }
inline int position_of(Place place) { return int(place & (MAX_POSITIONS - 1)); }

// Hashes of the contexts that end with *last; LONGEST_ORDER tokens are read, backwards.
inline void hash_contexts(const int32_t* last, uint32_t hashes[ORDER_COUNT]) {
  uint64_t state = 0;
  int order = 0;
  for (int back = 0; back < LONGEST_ORDER; back++) {
    state = (state ^ (uint32_t(last[-back]) + 1)) * 0x9E3779B97F4A7C15ull;  // 2^64 / golden ratio
    state ^= state >> 29;
    if (back + 1 == ORDERS[order]) hashes[order++] = uint32_t((state * 0xD6E8FEB86659FD93ull) >> 32);
  }
}

class ContextTable {
 public:
  static constexpr uint32_t NONE = 0xffffffffu;

  ContextTable();

  void add(uint32_t hash, Place place);

  // The context's value, or NONE.  Read it with `newest`.
  uint32_t find(uint32_t hash) const {
    const SubTable& table = *directory_[hash >> shift_];
    for (uint32_t line = hash & (LINES - 1);; line = (line + 1) & (LINES - 1)) {
      const Line& here = table.lines[line];
      const int way = here.way_of(hash);
      if (way >= 0) return here.values[way];
      if (here.values[WAYS - 1] == NONE) return NONE;  // the line was never full: the search ends here
    }
  }

  void prefetch(uint32_t hash) const {
    __builtin_prefetch(&directory_[hash >> shift_]->lines[hash & (LINES - 1)], 1);
  }
  void prefetch_places(uint32_t value) const {
    if (value == NONE || !(value & BLOCK)) return;
    const uint32_t* data = block(value);
    __builtin_prefetch(data);
    __builtin_prefetch(data + 16);
  }

  // Call visit(place) for up to `limit` places of a value, newest first.
  template <class Visit>
  void newest(uint32_t value, int limit, Visit&& visit) const {
    if (value == NONE || limit <= 0) return;
    if (!(value & BLOCK)) {
      visit(Place(value));
      return;
    }
    const uint32_t* data = block(value);
    const Header head{data[0]};
    const int capacity = head.capacity();
    int at = (head.count < capacity ? head.count : head.oldest) - 1;
    for (int left = std::min<int>(head.count, limit); left-- > 0; at--) {
      if (at < 0) at += capacity;
      visit(Place(data[1 + at]));
    }
  }

  size_t bytes() const { return bytes_; }
  size_t directory_bytes() const { return directory_.size() * sizeof(SubTable*); }

 private:
  static constexpr uint32_t BLOCK = 1u << 31;
  static constexpr int WAYS = 8, LINES = 64, FULL = 448;  // of 512: 7/8
  static constexpr int BLOCK_CLASSES = 5;                 // blocks of 4, 8, 16, 32, 64 words
  static constexpr uint32_t CHUNK_QUADS = 1024;           // blocks are counted in quads of 4 words

  struct alignas(64) Line {  // one cache line; ways fill in order and are never emptied
    uint32_t hashes[WAYS];
    uint32_t values[WAYS];

    // The way that holds `hash`, or -1.
    int way_of(uint32_t hash) const {
#if defined(__SSE2__)
      const __m128i key = _mm_set1_epi32(int(hash));
      const auto* at = reinterpret_cast<const __m128i*>(hashes);
      const __m128i equal = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_load_si128(at), key),
                                            _mm_cmpeq_epi32(_mm_load_si128(at + 1), key));
      int mask = _mm_movemask_epi8(_mm_packs_epi16(equal, equal)) & 0xff;
#else
      int mask = 0;
      for (int way = 0; way < WAYS; way++) mask |= int(hashes[way] == hash) << way;
#endif
      while (mask) {  // an empty way may hold the hash 0 by chance
        const int way = __builtin_ctz(unsigned(mask));
        if (values[way] != NONE) return way;
        mask &= mask - 1;
      }
      return -1;
    }
  };
  struct SubTable {
    Line lines[LINES];
    int used = 0;
    int depth = 0;  // leading hash bits that all its keys share
    SubTable();
    void insert(uint32_t hash, uint32_t value);
  };
  struct Header {  // a block's first word
    uint8_t size_class;
    uint8_t oldest;
    uint16_t count;
    explicit Header(uint32_t word)
        : size_class(word & 255), oldest(word >> 8 & 255), count(uint16_t(word >> 16)) {}
    Header(int c, int o, int n) : size_class(uint8_t(c)), oldest(uint8_t(o)), count(uint16_t(n)) {}
    int capacity() const { return (4 << size_class) - 1; }
    uint32_t word() const { return size_class | uint32_t(oldest) << 8 | uint32_t(count) << 16; }
  };
  struct Release {
    void operator()(uint32_t* chunk) const { ::operator delete(chunk, std::align_val_t(64)); }
  };

  const uint32_t* block(uint32_t value) const {
    const uint32_t quad = value & ~BLOCK;
    return chunks_[quad / CHUNK_QUADS].get() + size_t(quad % CHUNK_QUADS) * 4;
  }
  uint32_t* block(uint32_t value) { return const_cast<uint32_t*>(std::as_const(*this).block(value)); }
  uint32_t allocate(int size_class);
  void push(uint32_t& value, Place place);
  void split(uint32_t hash);

  std::vector<std::unique_ptr<SubTable>> tables_;
  std::vector<SubTable*> directory_;
  int shift_;  // 32 - directory bits
  std::vector<std::unique_ptr<uint32_t[], Release>> chunks_;
  uint32_t next_quad_ = 0, end_quad_ = 0;
  std::vector<uint32_t> free_[BLOCK_CLASSES];
  size_t bytes_ = 0;
};

}  // namespace seer
