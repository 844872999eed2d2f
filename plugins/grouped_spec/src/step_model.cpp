#include "step_model.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "errors.hpp"

namespace seer {

namespace {

// Sizes of a step's features at which a correction is as likely as any other's, by magnitude.
constexpr double UNITS[] = {1, 32, 16384, 8, 8192, 32};

}  // namespace

StepModel::StepModel(std::vector<double> profile, size_t longest)
    : profile_(std::move(profile)), longest_(longest) {
  if (profile_.empty() || profile_.size() % (longest + 1)) {
    throw IndexError("profile has " + std::to_string(profile_.size()) + " items; pass rows of " +
                     std::to_string(longest + 1));
  }
  for (const double seconds : profile_) {
    if (!(seconds > 0 && std::isfinite(seconds))) {
      throw IndexError("profile is not positive; pass seconds above 0");
    }
  }
  for (size_t i = 0; i < SIZE; i++) {
    scale_[i] = profile_[0] / UNITS[i];
    moments_[i][i] = PRIOR_STEPS;
  }
}

double StepModel::seconds(const Step& step) const {
  const double profile = profile_s(step);
  const Features of = features(step);
  double correction = 0;
  for (size_t i = 0; i < SIZE; i++) correction += weights_[i] * of[i];
  const double corrected = profile + correction, least = profile / 10;
  return corrected > least ? corrected : least;
}

Costs StepModel::costs(size_t batch) const {
  const double* row = curve(double(batch));
  const double slope = (row[longest_] - row[0]) / double(batch * std::max<size_t>(1, longest_));
  return {weights_[3], weights_[4], slope + weights_[5]};
}

void StepModel::learn(const Step& step, double seconds) {
  if (!(seconds >= 0)) throw IndexError("seconds is " + std::to_string(seconds) + "; pass a duration");
  // Relative to the step's size, so that small steps count as much as large ones.
  const double profile = profile_s(step);
  const double missed = std::min(seconds, OUTLIER * this->seconds(step)) / profile - 1;
  Features seen = features(step);
  for (size_t i = 0; i < SIZE; i++) seen[i] *= scale_[i] / profile;
  for (size_t i = 0; i < SIZE; i++) {
    for (size_t j = 0; j < SIZE; j++) new_moments_[i][j] += seen[i] * seen[j];
    new_target_[i] += seen[i] * missed;
  }
  if (++new_steps_ == REFRESH) fit();
}

StepModel::Features StepModel::features(const Step& step) {
  return {1, step.batch, step.context_tokens, step.drafting, step.drafting_context_tokens, step.draft_tokens};
}

const double* StepModel::curve(double batch) const {
  const size_t rows = profile_.size() / (longest_ + 1);
  if (!(batch >= 1 && batch <= double(rows))) {
    throw IndexError("batch is " + std::to_string(batch) + "; pass 1 to " + std::to_string(rows) +
                     ", as step times were given for");
  }
  return profile_.data() + (size_t(batch) - 1) * (longest_ + 1);
}

// The profile at a fractional draft length: step times are given at whole ones and linear between.
double StepModel::profile_s(const Step& step) const {
  const double* row = curve(step.batch);
  const double drafts = step.draft_tokens / step.batch;
  if (!(drafts > 0)) return row[0];
  if (drafts >= double(longest_)) return row[longest_];
  const size_t below = size_t(drafts);
  return (row[below + 1] - row[below]) * (drafts - double(below)) + row[below];
}

// Ridge regression: solve moments * w = target by Cholesky; the prior keeps the moments positive definite.
void StepModel::fit() {
  const double keep = std::pow(0.5, REFRESH / HALF_LIFE_STEPS);
  std::array<Features, SIZE> root{};
  Features solved;
  for (size_t i = 0; i < SIZE; i++) {
    for (size_t j = 0; j < SIZE; j++) moments_[i][j] = keep * moments_[i][j] + new_moments_[i][j];
    moments_[i][i] += (1 - keep) * PRIOR_STEPS;
    target_[i] = keep * target_[i] + new_target_[i];
  }
  for (size_t i = 0; i < SIZE; i++) {
    for (size_t j = 0; j <= i; j++) {
      double rest = moments_[i][j];
      for (size_t k = 0; k < j; k++) rest -= root[i][k] * root[j][k];
      root[i][j] = i == j ? std::sqrt(std::max(rest, 1e-12 * moments_[i][i])) : rest / root[j][j];
    }
    solved[i] = target_[i];
    for (size_t k = 0; k < i; k++) solved[i] -= root[i][k] * solved[k];
    solved[i] /= root[i][i];
  }
  for (size_t i = SIZE; i-- > 0;) {
    for (size_t k = i + 1; k < SIZE; k++) solved[i] -= root[k][i] * solved[k];
    solved[i] /= root[i][i];
    weights_[i] = solved[i] * scale_[i];
  }
  new_moments_ = {};
  new_target_ = {};
  new_steps_ = 0;
}

}  // namespace seer
