// Which draft tokens to verify: the most probable of the whole batch, as many as pay.
//
// The paper's policy gives every request of a class the same draft length.  But the index has the probability
// of each single token, and a step's cost is measured: so each step takes the tokens that give the most
// tokens per second in expectation.  A request in the middle of a phrase drafts eight, its neighbour none.
//
// At a price per second, each request drafts as many tokens as are worth their time: that is the best a step
// can do for that price.  Of several prices, the one whose step gives the most tokens per second wins.
#pragma once

#include <cstdint>
#include <vector>

#include "calibration.hpp"
#include "step_model.hpp"

namespace seer {

// One step's drafts.  Request b is handles[b] and lengths[b] tokens long; chances[b * columns + j] is
// the chance, as the index says, that its draft is accepted up to and including token j.
//
// Drafts are trees if `parents` is given, most probable nodes first.  The first n nodes of such a tree are a
// tree, and n better ones there are not; what they give is the sum of their chances, as it is on a line.  So
// both are cut alike, and only their outcomes are reported differently.
struct Drafts {
  size_t size = 0, columns = 0;
  const int32_t* handles = nullptr;
  const int32_t* lengths = nullptr;
  const float* chances = nullptr;
  const int32_t* tokens = nullptr;   // [size, columns], as is the next; of trees only
  const int32_t* parents = nullptr;  // index of a token's parent, -1 for the first ones
  int32_t* counts = nullptr;         // in: tokens drafted; out: tokens to verify
};

// What requests have written since `choose` was last called: written[b] tokens each, all in new_tokens, one
// request's after the other's.  The tokens are looked at after trees only.
struct Outcome {
  size_t size = 0;
  const int32_t* handles = nullptr;
  const int32_t* written = nullptr;
  const int32_t* new_tokens = nullptr;
  size_t new_count = 0;
};

// Chooses for one instance.  Not thread-safe.
class TokenChoice {
 public:
  static constexpr int LEARN_EVERY = 4;     // steps between those whose verdicts are learnt from
  static constexpr int EXPLORE_EVERY = 64;  // steps without drafts after which one token is drafted only to
                                            // learn what drafts are worth, and cost
  static constexpr int32_t MAX_HANDLES = 1 << 20;

  // `priority_factor` is what a probe's token is worth in tokens of others when tokens compete (the paper's
  // lambda); whether drafts pay at all is judged by plain tokens.  They do if they give `least_gain` more
  // tokens per second than a step without.
  TokenChoice(StepModel steps, double priority_factor, double least_gain);

  // A request runs under this handle from now on; nothing of it has been drafted.
  void open(int32_t handle, bool probe);

  void choose(const Drafts& drafts);

  // The step for which `choose` was last called has taken so long.  It was made of what was chosen if the same
  // requests were in it, none was in its prefill, and none has written more than one step gives.
  void learn(const Outcome& outcome, double seconds);

  Calibration calibration;
  StepModel steps;

 private:
  struct Slot {
    bool probe = false;
    int drafted = 0;  // draft tokens now being verified
  };

  Slot& slot(int32_t handle);
  void weigh(const Drafts& drafts);
  double best_step(const Drafts& drafts, const Step& plain, double plain_s);
  void explore(const Drafts& drafts);
  void judge(const Slot& slot, size_t first, const int32_t* written, int accepted);

  double priority_factor_, threshold_;
  long calls_ = 0, plain_steps_ = 0;
  std::vector<Slot> slots_;
  std::vector<float> predicted_;  // of each slot's drafts, steps.longest() apiece
  std::vector<int32_t> tokens_, parents_;  // of the same, if they are trees
  bool trees_ = false;
  std::vector<int32_t> batch_;    // handles of the last step
  Step step_;

  // Scratch of a call: per request, the draft tokens there are, what 0, 1, ... of them give, and lengths.
  std::vector<int> there_, lengths_, best_;
  std::vector<double> gains_;
  std::vector<int> depths_;  // of a tree's accepted nodes; 0 is a rejected one
  std::vector<Verdict> verdicts_;
};

}  // namespace seer
