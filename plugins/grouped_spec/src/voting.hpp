// The voting parameters, and the weights that follow from them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "segment.hpp"

namespace seer {

// The defaults were tuned on the even ones of 25 prompts x 10 long chain-of-thought responses and
// checked on the odd ones, with 9 finished siblings (tokens per step on a path of 8: 2.255 and 2.368).
// The optimum is flat: doubling or halving one costs at most 0.03 there, and tuning gained only 0.003
// on the even ones and nothing on the odd ones, so they are not fitted to this data.
struct Voting {
  int lookup_min = 1;             // the shortest match that may draft, tokens
  int lookup_max = MAX_MATCH;     // the longest match that counts, tokens
  int gather = 32;                // places looked at per draft; its time and its quality
  float min_probability = 0.0f;   // a path ends where its probability falls below
  float escape = 1.0f;            // weight of "something else follows" against one vote
  float sibling_weight = 0.25f;   // a sibling's vote against one of the request's own
  float own_recency = 0.5f;       // how fast the request's own old text loses weight; 0: not at all
  float sibling_recency = 0.5f;   // how fast siblings' text does with its distance from here
  float soft_match = 0.4f;        // gain per equal token beyond the first unequal one, of the last 8
  float soft_far = 0.1f;          // and of the 8 before those
  float common_weight = 0.04f;    // a vote of another group's text; 0 keeps no such text
  int common_gather = 8;          // places of other groups looked at per draft
  int common_lookup_min = 2;      // the shortest match there that may draft, tokens
};

// log2 buckets of a distance in tokens: 0-63, 64-127, 128-255, ...
constexpr int AGE_BUCKETS = 10;
inline int age_bucket(uint32_t distance) {
  return std::min(AGE_BUCKETS - 1, 31 - __builtin_clz(distance >> 5 | 1));
}

struct Weights {
  float own[AGE_BUCKETS], sibling[AGE_BUCKETS], common;
  float near[9], far[9];  // by equal tokens after the first unequal one

  explicit Weights(const Voting& voting) : common(voting.common_weight) {
    // Log odds that a place at such a distance continues as this request does, fitted once on long
    // reasoning; the recency parameters are exponents on them.
    constexpr float OWN[] = {0, -.67f, -1.32f, -1.63f, -1.80f, -2.04f, -2.39f, -2.71f, -3.20f, -3.60f};
    constexpr float SIBLING[] = {0, -.44f, -.48f, -.54f, -.69f, -.82f, -1.08f, -1.33f, -1.86f, -2.25f};
    for (int bucket = 0; bucket < AGE_BUCKETS; bucket++) {
      own[bucket] = std::exp(voting.own_recency * OWN[bucket]);
      sibling[bucket] = voting.sibling_weight * std::exp(voting.sibling_recency * SIBLING[bucket]);
    }
    for (int equal = 0; equal <= 8; equal++) {
      near[equal] = std::exp(voting.soft_match * float(equal));
      far[equal] = std::exp(voting.soft_far * float(equal));
    }
  }
};

}  // namespace seer
