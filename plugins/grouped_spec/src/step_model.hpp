// How long the next step will take: the profile, corrected by the steps that are really made.
//
// T(B, gamma) is measured on short contexts and on drafts of one length.  Real steps differ: contexts are
// long, and only some requests draft.  With vLLM's CPU attention, a request that verifies one draft token
// costs three times one that verifies none, in proportion to its context, and seven more cost little.  So
// the profile is corrected by a linear model of what a step is made of, fitted to the measured steps.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace seer {

// What one decoding step is made of: `batch` requests with `context_tokens` in all; `drafting` of them, with
// `drafting_context_tokens` in all, verify `draft_tokens`.
struct Step {
  double batch = 0, context_tokens = 0, drafting = 0, drafting_context_tokens = 0, draft_tokens = 0;
};

// What drafting adds, in seconds: per request, per token of its context, per draft token.
struct Costs {
  double request, context_token, draft_token;
};

class StepModel {
 public:
  static constexpr double HALF_LIFE_STEPS = 1024;  // steps after which what was learnt of them counts half
  static constexpr double PRIOR_STEPS = 8;         // steps that trust in the profile counts for
  static constexpr int REFRESH = 32;               // steps between two fits
  static constexpr double OUTLIER = 2;             // a step counts as at most so many times what was
                                                   // expected: others use the machine too
  // `profile` holds T(B, 0), T(B, 1), ..., T(B, longest) in seconds for B = 1, 2, ..., row by row.
  StepModel(std::vector<double> profile, size_t longest);

  // The seconds of a step; never less than a tenth of what the profile says.
  double seconds(const Step& step) const;

  // The cost of a draft token is the mean over the profile's draft lengths.
  Costs costs(size_t batch) const;

  // Take in how long a step really took.
  void learn(const Step& step, double seconds);

  size_t longest() const { return longest_; }

 private:
  static constexpr int SIZE = 6;  // features of a step: 1 and those of Step
  using Features = std::array<double, SIZE>;

  static Features features(const Step& step);
  const double* curve(double batch) const;
  double profile_s(const Step& step) const;
  void fit();

  std::vector<double> profile_;
  size_t longest_;
  Features scale_, weights_{};
  // Normal equations of what was learnt, and of the steps since the last fit.
  std::array<Features, SIZE> moments_{}, new_moments_{};
  Features target_{}, new_target_{};
  int new_steps_ = 0;
};

}  // namespace seer
