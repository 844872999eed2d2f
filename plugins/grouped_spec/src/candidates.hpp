// Candidates: places whose context matches the end of a request's text, and how much each may say.
//
// One query runs in stages (hash, look up, list places, compare), each of which only touches memory
// that the stage before has prefetched; a batch runs stage by stage over several requests at a time,
// so their cache misses overlap.
#pragma once

#include <vector>

#include "group.hpp"
#include "recent_text.hpp"
#include "voting.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace seer {

constexpr int MAX_GATHER = 256;

struct Candidate {
  const int32_t* next;  // what followed; ends with NO_TOKEN, the first one is a token
  float weight;
  int match;  // tokens equal, backwards from here, 1..MAX_MATCH
};

// Candidates of one draft, longest match first, newest first among equals.
class Candidates {
 public:
  int size = 0;
  Candidate items[MAX_GATHER * 2];

  void clear() { found_ = 0; }
  void add_if(bool wanted, const Candidate& candidate) {
    unsorted_[found_] = candidate;
    found_ += wanted;
  }

  // A stable counting sort over the few match lengths there are.
  void sort() {
    int counts[MAX_MATCH + 1] = {};
    uint64_t lengths = 0;  // bit m-1: match length m occurs
    for (int i = 0; i < found_; i++) {
      counts[unsorted_[i].match]++;
      lengths |= uint64_t(1) << (unsorted_[i].match - 1);
    }
    int at = 0;
    while (lengths) {
      const int match = 64 - __builtin_clzll(lengths);
      lengths ^= uint64_t(1) << (match - 1);
      at += std::exchange(counts[match], at);
    }
    for (int i = 0; i < found_; i++) items[counts[unsorted_[i].match]++] = unsorted_[i];
    size = found_;
  }

 private:
  int found_ = 0;
  Candidate unsorted_[MAX_GATHER * 2 + 1];
};

// The end of a request's text, as a pattern to compare places with.
struct Pattern {
  int length;
  int32_t tokens[MAX_MATCH];  // right-aligned; what is missing in front equals nothing

  void set(const int32_t* end, int n) {  // the n tokens before `end`
    length = std::min(n, MAX_MATCH);
    std::fill(tokens, tokens + MAX_MATCH - length, NO_TOKEN - 1);
    std::memcpy(tokens + MAX_MATCH - length, end - length, sizeof(int32_t) * size_t(length));
  }
  const int32_t* last() const { return tokens + MAX_MATCH - 1; }

  // Which of the last 16 tokens equal those that end with *place; bit 15 is the newest.
  unsigned equal_mask(const int32_t* place) const {
#if defined(__SSE2__)
    auto four = [&](int back) {
      return _mm_cmpeq_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(last() - back)),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(place - back)));
    };
    return unsigned(_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(four(15), four(11)),
                                                      _mm_packs_epi32(four(7), four(3)))));
#else
    unsigned mask = 0;
    for (int back = 0; back < 16; back++) mask |= unsigned(last()[-back] == place[-back]) << (15 - back);
    return mask;
#endif
  }
};

inline int count_bits8(unsigned x) {  // without -mpopcnt the builtin is a library call
  x -= x >> 1 & 0x55;
  x = (x & 0x33) + (x >> 2 & 0x33);
  return int((x + (x >> 4)) & 15);
}

// One request's query, from hash to candidates.
class Query {
 public:
  // Stage 1: hash the contexts.
  void start(const Group& group, const RecentText* common, int segment) {
    group_ = &group;
    common_ = common && common->used() ? common : nullptr;
    segment_ = segment;
    const Segment& text = group.segment(segment);
    here_ = text.end();
    pattern_.set(text.at(here_), group.prompt_tokens() + text.size());
    hash_contexts(pattern_.last(), hashes_);
    for (uint32_t hash : hashes_) group.contexts().prefetch(hash);
    if (common_) common_->prefetch(hashes_);
  }

  // Stage 2: look the contexts up.
  void find(const Voting& voting) {
    for (int order = 0; order < ORDER_COUNT; order++) {
      const bool usable = ORDERS[order] <= pattern_.length && ORDERS[order] <= voting.lookup_max;
      values_[order] = usable ? group_->contexts().find(hashes_[order]) : ContextTable::NONE;
      group_->contexts().prefetch_places(values_[order]);
    }
  }

  // Stage 3: list the places, of long contexts first.
  void list(const Voting& voting) {
    count_ = 0;
    for (int order = ORDER_COUNT; order-- > 0;) {
      group_->contexts().newest(values_[order], voting.gather - count_, [&](Place place) {
        const int32_t* last = group_->text_at(place);
        __builtin_prefetch(last - 15);
        __builtin_prefetch(last + 8);
        places_[count_++] = place;
      });
      ends_[order] = count_;
    }
    common_count_ = 0;
    if (!common_) return;
    for (int order = ORDER_COUNT; order-- > RecentText::ORDER_FIRST;) {
      if (ORDERS[order] <= pattern_.length && ORDERS[order] <= voting.lookup_max) {
        common_->newest(hashes_[order], voting.common_gather - common_count_, [&](uint32_t place) {
          __builtin_prefetch(common_->text_at(place) - 15);
          __builtin_prefetch(common_->text_at(place) + 8);
          common_places_[common_count_++] = place;
        });
      }
      common_ends_[order] = common_count_;
    }
  }

  // Stage 4: compare, weigh and sort.
  void evaluate(const Voting& voting, const Weights& weights, Candidates& out) const {
    out.clear();
    int below = MAX_MATCH + 1;  // a longer match was listed under a longer context already
    int i = 0;
    for (int order = ORDER_COUNT; order-- > 0;) {
      const int least = std::max(ORDERS[order], voting.lookup_min);
      for (; i < ends_[order]; i++) {
        const Place place = places_[i];
        const float* by_age = segment_of(place) == segment_ ? weights.own : weights.sibling;
        const int bucket = age_bucket(uint32_t(std::abs(here_ - position_of(place))));
        consider(group_->text_at(place), by_age[bucket], least, below, voting, weights, out);
      }
      if (ORDERS[order] <= voting.lookup_max) below = ORDERS[order];
    }
    if (!common_) return out.sort();
    below = MAX_MATCH + 1;
    i = 0;
    for (int order = ORDER_COUNT; order-- > RecentText::ORDER_FIRST;) {
      const int least = std::max({ORDERS[order], voting.common_lookup_min, voting.lookup_min});
      for (; i < common_ends_[order]; i++) {
        consider(common_->text_at(common_places_[i]), weights.common, least, below, voting, weights, out);
      }
      if (ORDERS[order] <= voting.lookup_max) below = ORDERS[order];
    }
    out.sort();
  }

 private:
  // Mispredicted branches are what a draft spends most of its time on, so there is one, rarely taken.
  void consider(const int32_t* last, float weight, int least, int below, const Voting& voting,
                const Weights& weights, Candidates& out) const {
    const unsigned equal = pattern_.equal_mask(last);
    int match = __builtin_clz((~equal & 0xffff) << 16 | 0x8000);  // 16 if all are equal
    const unsigned soft = equal & (0xffffu >> match);
    weight *= weights.near[count_bits8(soft >> 8)] * weights.far[count_bits8(soft & 255)];
    if (match == 16) {
      while (match < voting.lookup_max && pattern_.last()[-match] == last[-match]) match++;
    }
    // The whole match decides the order's list; the part of it that counts decides its use.
    const bool counts = (match >= least) & (match < below) & (last[1] >= 0);
    out.add_if(counts, {last + 1, weight, std::min(match, voting.lookup_max)});
  }

  const Group* group_;
  const RecentText* common_;
  int segment_, here_;
  Pattern pattern_;
  uint32_t hashes_[ORDER_COUNT], values_[ORDER_COUNT];
  int count_, common_count_, ends_[ORDER_COUNT], common_ends_[ORDER_COUNT];
  Place places_[MAX_GATHER];
  uint32_t common_places_[MAX_GATHER];
};

}  // namespace seer
