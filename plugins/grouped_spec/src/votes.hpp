// Votes: candidates become a draft.
//
// Prediction by partial matching with blending (Cleary & Witten 1984): candidates of the longest match
// share the probability among their next tokens, and an escape share goes to the shorter matches.
// A match that agrees with the chosen token votes again on the one after it.  A path is a greedy walk; a
// tree expands the most probable open node first, until its budget of nodes is spent.
#pragma once

#include <cstdint>
#include <vector>

#include "candidates.hpp"
#include "voting.hpp"

namespace seer {

// Where drafts go: `probabilities[i]` is the estimated chance that the draft is accepted up to and
// including token i.  `parents` is used by trees only: index of a node's parent, -1 for the first level.
struct DraftOut {
  int32_t* tokens;
  int32_t* parents;
  float* probabilities;
};

struct TreeLimits {  // 0: no limit
  int children = 0;  // most per node
  int depth = 0;     // most tokens on a path
  int paths = 0;     // most paths, each from the root to a leaf
};

class Voters {
 public:
  Voters();

  // Both return the number of tokens written, at most `limit`.
  int draft_path(const Candidates& from, const Voting& voting, int limit, DraftOut out);
  int draft_tree(const Candidates& from, const Voting& voting, int limit, TreeLimits limits, DraftOut out);

 private:
  using Index = uint16_t;

  // Votes by token: an open-addressing table that remembers which cells it used.
  class Tally {
   public:
    static constexpr int CELLS = 1024;  // twice the most candidates there can be
    int32_t token[CELLS];
    float weight[CELLS];
    Index voters[CELLS];  // candidates that can go on after this token
    Index used[MAX_GATHER * 2];
    int count = 0;

    Tally() { std::fill(token, token + CELLS, NO_TOKEN); }
    int cell(int32_t t) {
      unsigned at = (uint32_t(t) * 2654435761u) >> 22;
      while (token[at] != t) {
        if (token[at] == NO_TOKEN) {
          token[at] = t;
          weight[at] = 0;
          voters[at] = 0;
          used[count++] = Index(at);
          break;
        }
        at = (at + 1) & (CELLS - 1);
      }
      return int(at);
    }
    void clear() {
      while (count) token[used[--count]] = NO_TOKEN;
    }
  };

  struct Node {  // a token that could be drafted next, with the candidates that go on after it
    float probability;
    int32_t token;
    int32_t parent;
    int32_t depth;
    uint32_t first, last;  // in ids_
    bool operator<(const Node& other) const { return probability < other.probability; }
  };

  float share(const Candidate* items, const Index* ids, int count, float escape);
  std::pair<int32_t, float> elect(int count);
  void expand(const Candidates& from, const Voting& voting, float probability, int parent, int depth,
              uint32_t first, uint32_t last, int children);

  Tally tally_;
  float shares_[MAX_GATHER * 2];
  int32_t tokens_[MAX_GATHER * 2];
  Index cells_[MAX_GATHER * 2];
  std::vector<Index> ids_;    // lists of candidates, one per node
  std::vector<Node> open_;    // a heap
  std::vector<std::pair<float, Index>> ranked_;
  std::vector<bool> inner_;  // of the root, then of each node: it has a child
};

}  // namespace seer
