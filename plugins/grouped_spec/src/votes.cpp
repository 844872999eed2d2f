#include "votes.hpp"

#include <algorithm>
#include <tuple>

namespace seer {

Voters::Voters() {
  // Enough for usual trees, so that a draft allocates nothing.
  ids_.reserve(size_t(1) << 16);
  open_.reserve(size_t(1) << 12);
  ranked_.reserve(MAX_GATHER * 2);
}

// Set shares_[i] to the probability that candidate ids[i] casts; return their sum, 1 - escape.
//
// With classes of equal match length from the longest down, and C_y the weight of classes 0..y, class
// y is reached with chance E_y = prod_{z<y} escape / (C_z + escape), and every candidate seen so far
// gets E_y * weight / (C_y + escape) there.
float Voters::share(const Candidate* items, const Index* ids, int count, float escape) {
  int starts[MAX_MATCH + 1];
  float gains[MAX_MATCH];  // per unit of weight, in this class
  int classes = 0;
  float reach = 1, weight = 0;
  for (int i = 0; i < count;) {
    starts[classes] = i;
    const int match = items[ids[i]].match;
    do weight += items[ids[i]].weight;
    while (++i < count && items[ids[i]].match == match);
    const float per_unit = reach / (weight + escape);
    gains[classes++] = per_unit;
    reach = per_unit * escape;
  }
  starts[classes] = count;
  float gain = 0;
  for (int y = classes; y-- > 0;) {
    gain += gains[y];
    for (int i = starts[y]; i < starts[y + 1]; i++) shares_[i] = gain * items[ids[i]].weight;
  }
  return 1 - reach;
}

// The token of tokens_ with the largest sum of shares_, the earliest among equals, and that sum.
std::pair<int32_t, float> Voters::elect(int count) {
  // Every voter collects the shares of those who say the same: quadratic, but without a branch, and
  // the compiler turns it into vector instructions.  Beyond this many a hash table is faster.
  constexpr int FEW = 64;
  float sums[FEW];
  int winner = 0;
  if (count <= FEW) {
    std::fill(sums, sums + count, 0.0f);
    for (int j = 0; j < count; j++) {
      const int32_t token = tokens_[j];
      const float share = shares_[j];
      for (int i = 0; i < count; i++) sums[i] += tokens_[i] == token ? share : 0.0f;
    }
    for (int i = 1; i < count; i++) winner = sums[i] > sums[winner] ? i : winner;
    return {tokens_[winner], sums[winner]};
  }
  for (int i = 0; i < count; i++) tally_.weight[tally_.cell(tokens_[i])] += shares_[i];
  winner = tally_.used[0];
  for (int u = 1; u < tally_.count; u++) {
    const int cell = tally_.used[u];
    winner = tally_.weight[cell] > tally_.weight[winner] ? cell : winner;
  }
  const std::pair<int32_t, float> elected{tally_.token[winner], tally_.weight[winner]};
  tally_.clear();
  return elected;
}

int Voters::draft_path(const Candidates& from, const Voting& voting, int limit, DraftOut out) {
  const Candidate* items = from.items;
  Index ids[MAX_GATHER * 2];
  int count = from.size;
  for (int i = 0; i < count; i++) ids[i] = Index(i);

  float probability = 1;
  int drafted = 0;
  while (drafted < limit && count > 0) {
    if (count == 1) {  // one voter left: copy
      const Candidate& last = items[ids[0]];
      const float factor = last.weight / (last.weight + voting.escape);
      for (; drafted < limit && last.next[drafted] >= 0; drafted++) {
        probability *= factor;
        if (probability < voting.min_probability) return drafted;
        out.tokens[drafted] = last.next[drafted];
        out.probabilities[drafted] = probability;
      }
      return drafted;
    }
    float mass = share(items, ids, count, voting.escape);
    int32_t differ = 0;
    for (int i = 0; i < count; i++) {
      tokens_[i] = items[ids[i]].next[drafted];
      differ |= tokens_[i] ^ tokens_[0];
    }
    int32_t best = tokens_[0];
    if (differ) std::tie(best, mass) = elect(count);
    probability *= mass;
    if (probability < voting.min_probability) break;
    out.tokens[drafted] = best;
    out.probabilities[drafted] = probability;
    int kept = 0;
    for (int i = 0; i < count; i++) {
      const int32_t* next = items[ids[i]].next + drafted;
      ids[kept] = ids[i];
      kept += next[0] == best && next[1] >= 0;
    }
    count = kept;
    drafted++;
  }
  return drafted;
}

// Open the nodes that the candidates ids_[first, last) vote for, `depth` tokens after the root.
void Voters::expand(const Candidates& from, const Voting& voting, float probability, int parent, int depth,
                    uint32_t first, uint32_t last, int children) {
  const Candidate* items = from.items;
  const int count = int(last - first);
  auto open = [&](float p, int32_t token, uint32_t begin, uint32_t end) {
    if (p < voting.min_probability) return;
    open_.push_back({p, token, parent, depth, begin, end});
    std::push_heap(open_.begin(), open_.end());
  };
  if (count == 1) {
    const Candidate& only = items[ids_[first]];
    open(probability * only.weight / (only.weight + voting.escape), only.next[depth], first,
         only.next[depth + 1] >= 0 ? last : first);
    return;
  }
  share(items, &ids_[first], count, voting.escape);
  for (int i = 0; i < count; i++) {
    const int32_t* next = items[ids_[first + uint32_t(i)]].next + depth;
    const int cell = tally_.cell(next[0]);
    tally_.weight[cell] += shares_[i];
    tally_.voters[cell] = Index(tally_.voters[cell] + (next[1] >= 0));
    cells_[i] = Index(cell);
  }
  // Sort the voters by token: each node gets its list, in the order they had.
  uint32_t starts[Tally::CELLS];
  uint32_t end = uint32_t(ids_.size());
  for (int u = 0; u < tally_.count; u++) {
    starts[tally_.used[u]] = end;
    end += tally_.voters[tally_.used[u]];
  }
  ids_.resize(end);
  for (int i = 0; i < count; i++) {
    const Index id = ids_[first + uint32_t(i)];
    if (items[id].next[depth + 1] >= 0) ids_[starts[cells_[i]]++] = id;
  }
  ranked_.clear();
  for (int u = 0; u < tally_.count; u++) ranked_.emplace_back(-tally_.weight[tally_.used[u]], tally_.used[u]);
  if (children > 0 && children < tally_.count) {
    std::partial_sort(ranked_.begin(), ranked_.begin() + children, ranked_.end());
    ranked_.resize(size_t(children));
  }
  for (const auto& [negative, cell] : ranked_) {
    open(probability * -negative, tally_.token[cell], starts[cell] - tally_.voters[cell], starts[cell]);
  }
  tally_.clear();
}

int Voters::draft_tree(const Candidates& from, const Voting& voting, int limit, TreeLimits limits, DraftOut out) {
  ids_.clear();
  open_.clear();
  for (int i = 0; i < from.size; i++) ids_.push_back(Index(i));
  if (from.size && limit > 0) expand(from, voting, 1, -1, 0, 0, uint32_t(from.size), limits.children);
  inner_.assign(1, false);
  int drafted = 0, paths = 1;
  while (drafted < limit && !open_.empty()) {
    std::pop_heap(open_.begin(), open_.end());
    const Node node = open_.back();
    open_.pop_back();
    const size_t above = size_t(node.parent + 1);
    if (inner_[above]) {  // it has a child, so this one begins another path
      if (limits.paths && paths == limits.paths) continue;
      paths++;
    }
    inner_[above] = true;
    inner_.push_back(false);
    out.tokens[drafted] = node.token;
    out.parents[drafted] = node.parent;
    out.probabilities[drafted] = node.probability;
    const int self = drafted++;
    const int depth = node.depth + 1;
    if (node.last > node.first && drafted < limit && (limits.depth == 0 || depth < limits.depth)) {
      expand(from, voting, node.probability, self, depth, node.first, node.last, limits.children);
    }
  }
  return drafted;
}

}  // namespace seer
