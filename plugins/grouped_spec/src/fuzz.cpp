// Random operations, malformed ones among them, from a seed, under AddressSanitizer and UBSan.
//
//   fuzz SECONDS [SEED]
//
// Every buffer is a heap allocation of its exact size, so that reading or writing one item too many is
// caught.  Beside that: counts within limits, drafts only of tokens that were ever passed in, and no more
// chosen of them than there were.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "choice.hpp"
#include "index.hpp"

namespace {

using namespace seer;

std::mt19937_64 chance;

int64_t below(int64_t n) { return n <= 0 ? 0 : int64_t(chance() % uint64_t(n)); }
bool one_in(int n) { return below(n) == 0; }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

std::vector<int32_t> random_tokens(int64_t most, int32_t kinds) {
  std::vector<int32_t> tokens(static_cast<size_t>(below(most)));
  for (int32_t& token : tokens) token = one_in(5000) ? -int32_t(below(9)) : int32_t(below(kinds));
  return tokens;
}

int32_t malformed() {
  const int32_t choices[] = {-1, -2, INT32_MIN, INT32_MAX, 1 << 20, 65536, 0};
  return choices[below(7)];
}

struct FuzzGroup {
  Handle group;
  std::vector<int32_t> prompt;
  std::vector<Handle> requests;
};

Handle some_request(const std::vector<FuzzGroup>& groups, const FuzzGroup** of) {
  *of = nullptr;
  if (groups.empty() || one_in(20)) return Handle(chance());
  const FuzzGroup& group = groups[size_t(below(int64_t(groups.size())))];
  if (group.requests.empty()) return Handle(below(1 << 20));
  *of = &group;
  return group.requests[size_t(below(int64_t(group.requests.size())))];
}

void draft(DraftIndex& index, const std::vector<FuzzGroup>& groups, int32_t kinds) {
  const size_t size = size_t(below(20)), width = size_t(below(40)) + 1;
  std::vector<int64_t> requests(size);
  std::vector<int32_t> lengths(size), written(size), limits(size), counts(size), new_tokens;
  std::vector<int32_t> out(size * width), parents(size * width);
  std::vector<float> probabilities(size * width);
  for (size_t b = 0; b < size; b++) {
    const FuzzGroup* group;
    requests[b] = some_request(groups, &group);
    limits[b] = int32_t(below(50));
    std::vector<int32_t> text;
    if (group) {  // what goes on from what is stored, if it fits
      try {
        text = group->prompt;
        const std::vector<int32_t> stored = index.tokens(requests[b], 0, index.length(requests[b]));
        text.insert(text.end(), stored.begin(), stored.end());
      } catch (const IndexError&) {
      }
    }
    const std::vector<int32_t> more = random_tokens(one_in(20) ? 600 : 12, kinds);
    text.insert(text.end(), more.begin(), more.end());
    lengths[b] = int32_t(text.size());
    const size_t sent = one_in(9) ? size_t(below(lengths[b] + 1)) : more.size();
    written[b] = int32_t(sent);
    new_tokens.insert(new_tokens.end(), text.end() - std::ptrdiff_t(sent), text.end());
    if (one_in(400)) written[b] = malformed();
    if (one_in(400)) lengths[b] = malformed();
    if (one_in(400)) limits[b] = malformed();
  }
  if (one_in(100)) new_tokens.resize(size_t(below(30)));
  new_tokens.shrink_to_fit();
  Batch batch;
  batch.size = size;
  batch.requests64 = requests.data();
  batch.lengths = lengths.data(), batch.written = written.data(), batch.limits = limits.data();
  batch.new_tokens = new_tokens.data(), batch.new_count = new_tokens.size();
  batch.out = out.data(), batch.probabilities = probabilities.data(), batch.out_columns = width;
  batch.counts = counts.data();
  const size_t paths = size_t(below(5));
  if (one_in(2)) {
    index.draft(batch);
  } else {
    batch.parents = parents.data();
    index.draft_trees(batch, {int(below(4)), int(below(6)), int(paths)});
  }
  for (size_t b = 0; b < size; b++) {
    require(counts[b] >= 0 && counts[b] <= limits[b] && size_t(counts[b]) <= width, "counts within limits");
    for (size_t i = b * width; i < b * width + size_t(counts[b]); i++) {
      require(out[i] >= 0, "drafted tokens are tokens");
      require(probabilities[i] >= 0 && probabilities[i] <= 1.0001f, "probabilities are probabilities");
      const size_t node = i - b * width;
      if (batch.parents) require(parents[i] >= -1 && size_t(parents[i] + 1) <= node, "parents come first");
    }
    if (batch.parents && paths) {
      const auto first = parents.begin() + std::ptrdiff_t(b * width);
      const std::set<int32_t> inner(first, first + counts[b]);
      require(size_t(counts[b]) - (inner.size() - inner.count(-1)) <= paths, "no more paths than wanted");
    }
  }
}

void step(DraftIndex& index, std::vector<FuzzGroup>& groups, int32_t kinds, double& now) {
  const FuzzGroup* group;
  switch (below(16)) {
    case 0: {
      const std::vector<int32_t> prompt = random_tokens(300, kinds);
      groups.push_back({index.open_group(prompt.data(), prompt.size(), now, double(below(500))), prompt, {}});
      break;
    }
    case 1:
    case 2:
      if (!groups.empty()) {
        FuzzGroup& chosen = groups[size_t(below(int64_t(groups.size())))];
        chosen.requests.push_back(index.open_request(chosen.group));
      }
      break;
    case 3:
      if (one_in(4)) index.close_request(some_request(groups, &group));
      break;
    case 4:
      if (one_in(4) && !groups.empty()) index.drop_group(groups[size_t(below(int64_t(groups.size())))].group);
      break;
    case 5:
      now += double(below(20));
      index.expire(now);
      if (one_in(50)) index.clear();
      if (groups.size() > 40) groups.erase(groups.begin(), groups.begin() + 20);
      break;
    case 6: {
      const Handle request = some_request(groups, &group);
      index.tokens(request, below(50) - 5, below(50));
      break;
    }
    case 7:
    case 8:
    case 9:
    case 10: {
      const Handle request = some_request(groups, &group);
      const std::vector<int32_t> tokens = random_tokens(one_in(10) ? 4000 : 80, kinds);
      int64_t before = group ? index.length(request) : 0;
      if (one_in(20)) before += below(7) - 3;
      if (one_in(100)) before = malformed();
      index.append(request, before, tokens.data(), tokens.size());
      break;
    }
    default:
      draft(index, groups, kinds);
  }
}

float malformed_chance() {
  const float choices[] = {-1.0f, 2.0f, NAN, INFINITY, -INFINITY, 1e-38f, 0.0f, 1.0f};
  return choices[below(8)];
}

TokenChoice random_choice() {
  const size_t longest = size_t(below(12)), rows = size_t(below(24)) + 16;
  std::vector<double> profile(rows * (longest + 1));
  for (double& seconds : profile) seconds = double(below(1000) + 1) * (one_in(9) ? 1e9 : 1e-6);
  return {StepModel(profile, longest), double(below(9)) / 2, double(below(3)) / 10};
}

void choose(TokenChoice& choice) {
  const size_t size = size_t(below(24)), columns = size_t(below(12)) + one_in(2);
  std::vector<int32_t> handles(size), lengths(size), written(size), counts(size), new_tokens;
  std::vector<float> chances(size * columns);
  std::vector<int32_t> tokens(size * columns), parents(size * columns);
  const bool trees = one_in(2);
  for (size_t b = 0; b < size; b++) {
    handles[b] = one_in(400) ? malformed() : int32_t(below(24));
    lengths[b] = one_in(50) ? malformed() : int32_t(below(5000));
    written[b] = one_in(200) ? malformed() : int32_t(below(9)) + 1;
    for (int32_t i = 0; i < written[b] && i < 9; i++) new_tokens.push_back(int32_t(below(2)));
    for (size_t j = 0; j < columns; j++) {
      tokens[b * columns + j] = int32_t(below(2));
      parents[b * columns + j] = one_in(500) ? malformed() : int32_t(below(int64_t(j) + 1)) - 1;
    }
    counts[b] = one_in(50) ? malformed() : int32_t(below(int64_t(columns) + 1));
  }
  for (float& probability : chances) {
    probability = one_in(50) ? malformed_chance() : float(below(1001)) / 1000.0f;
  }
  const std::vector<int32_t> drafted = counts;
  if (one_in(4)) choice.open(one_in(20) ? malformed() : int32_t(below(24)), one_in(3));
  // Often twice the same batch: only then are step times learnt.
  for (int64_t turn = below(3); turn >= 0; turn--) {
    counts = drafted;
    choice.choose({size, columns, handles.data(), lengths.data(), chances.data(), tokens.data(),
                   trees ? parents.data() : nullptr, counts.data()});
    for (size_t b = 0; b < size; b++) {
      require(counts[b] >= 0 && counts[b] <= std::max(drafted[b], 0), "no more is chosen than was drafted");
      require(size_t(counts[b]) <= columns, "no more is chosen than there is room for");
    }
    const double took = one_in(50) ? double(malformed_chance()) : double(below(99)) / 1e4;
    choice.learn({size, handles.data(), written.data(), new_tokens.data(), new_tokens.size()}, took);
    const Step some{1, double(below(5000)), 1, double(below(5000)), double(below(9))};
    const double seconds = choice.steps.seconds(some);
    require(seconds > 0 && std::isfinite(seconds), "a step takes time");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return std::fprintf(stderr, "usage: fuzz SECONDS [SEED]\n"), 2;
  const double seconds = std::atof(arguments[1]);
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  uint64_t operations = 0, refused = 0;
  for (uint64_t round = 0; spent() < seconds; round++) {
    chance.seed(seed + round);
    Voting voting;
    voting.gather = int(below(MAX_GATHER)) + 1;
    voting.lookup_min = int(below(5)) + 1;
    voting.lookup_max = voting.lookup_min + int(below(MAX_MATCH + 1 - voting.lookup_min));
    voting.min_probability = one_in(2) ? 0.0f : 0.1f;
    voting.common_weight = one_in(3) ? 0.0f : 0.1f;
    DraftIndex index(size_t(1) << (20 + below(4)), size_t(1) << (10 + below(12)), voting);
    std::vector<FuzzGroup> groups;
    const int32_t kinds = one_in(3) ? INT32_MAX : int32_t(below(60)) + 1;
    double now = 0;
    TokenChoice choice = random_choice();
    for (int32_t handle = 0; handle < 24; handle++) {
      if (!one_in(500)) choice.open(handle, one_in(3));
    }
    for (int i = 0; i < 1500; i++, operations++) {
      try {
        if (one_in(4)) {
          choose(choice);
        } else {
          step(index, groups, kinds, now);
        }
      } catch (const IndexError&) {
        refused++;
      }
    }
    const Stats stats = index.stats();
    require(stats.bytes <= size_t(1) << 24, "memory is bounded");
  }
  std::printf("%llu operations, %llu refused\n", (unsigned long long)operations, (unsigned long long)refused);
}
