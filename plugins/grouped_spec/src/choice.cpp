#include "choice.hpp"

#include <algorithm>
#include <string>

#include "errors.hpp"

namespace seer {

namespace {

// What a second may have to earn to be spent on drafts, in tokens at the speed of a step without any.
constexpr double PRICES[] = {0.4, 0.7, 1.0, 1.3, 1.7, 2.5};

}  // namespace

TokenChoice::TokenChoice(StepModel model, double priority_factor, double least_gain)
    : steps(std::move(model)), priority_factor_(priority_factor), threshold_(1 + least_gain) {}

void TokenChoice::open(int32_t handle, bool probe) {
  if (handle < 0 || handle >= MAX_HANDLES) {
    throw IndexError("handle is " + std::to_string(handle) + "; pass 0 to " +
                     std::to_string(MAX_HANDLES - 1));
  }
  if (size_t(handle) >= slots_.size()) {
    slots_.resize(size_t(handle) + 1);
    predicted_.resize(slots_.size() * steps.longest());
  }
  slots_[size_t(handle)] = {probe, 0};
}

TokenChoice::Slot& TokenChoice::slot(int32_t handle) {
  if (handle < 0 || size_t(handle) >= slots_.size()) {
    throw IndexError("handles has " + std::to_string(handle) + ", which was not opened; open it first");
  }
  return slots_[size_t(handle)];
}

void TokenChoice::choose(const Drafts& drafts) {
  batch_.clear();  // if this throws, no step follows from it
  Step step;
  step.batch = double(drafts.size);
  for (size_t b = 0; b < drafts.size; b++) {
    slot(drafts.handles[b]);
    step.context_tokens += drafts.lengths[b];
  }
  trees_ = drafts.parents != nullptr;
  if (trees_) {
    tokens_.resize(predicted_.size());
    parents_.resize(predicted_.size());
  }
  if (drafts.size) {
    const double plain_s = steps.seconds(step);
    weigh(drafts);
    std::fill(drafts.counts, drafts.counts + drafts.size, 0);
    if (std::any_of(there_.begin(), there_.end(), [](int there) { return there > 0; })) {
      if (best_step(drafts, step, plain_s) * plain_s > threshold_ * step.batch) {
        plain_steps_ = 0;
        std::copy(best_.begin(), best_.end(), drafts.counts);
      } else {
        explore(drafts);
      }
    }
  }
  for (size_t b = 0; b < drafts.size; b++) {
    const int count = drafts.counts[b];
    slots_[size_t(drafts.handles[b])].drafted = count;
    if (!count) continue;
    step.drafting += 1;
    step.drafting_context_tokens += drafts.lengths[b];
    step.draft_tokens += count;
    const size_t from = b * drafts.columns, to = size_t(drafts.handles[b]) * steps.longest();
    std::copy_n(drafts.chances + from, count, predicted_.data() + to);
    if (!trees_) continue;
    std::copy_n(drafts.tokens + from, count, tokens_.data() + to);
    for (int j = 0; j < count; j++) {
      const int32_t parent = drafts.parents[from + size_t(j)];
      if (parent < -1 || parent >= j) {
        throw IndexError("parents of request " + std::to_string(b) + " has " + std::to_string(parent) + " at " +
                         std::to_string(j) + "; parents come before their children, and -1 is none");
      }
      parents_[to + size_t(j)] = parent;
    }
  }
  step_ = step;
  batch_.assign(drafts.handles, drafts.handles + drafts.size);
}

// How many tokens of each draft could be taken, and how many accepted ones 0, 1, 2, ... of them give.
void TokenChoice::weigh(const Drafts& drafts) {
  const size_t width = drafts.columns + 1;
  const int longest = int(std::min(drafts.columns, steps.longest()));
  there_.resize(drafts.size);
  gains_.resize(drafts.size * width);
  for (size_t b = 0; b < drafts.size; b++) {
    there_[b] = std::clamp(drafts.counts[b], 0, longest);
    double* gains = gains_.data() + b * width;
    gains[0] = 0;
    for (int j = 0; j < there_[b]; j++) {
      gains[j + 1] = gains[j] + calibration.calibrate(double(drafts.chances[b * drafts.columns + size_t(j)]));
    }
  }
}

// Put the best lengths into best_ and return their tokens per second; 0 if no drafts are best.
double TokenChoice::best_step(const Drafts& drafts, const Step& plain, double plain_s) {
  const size_t width = drafts.columns + 1;
  const Costs costs = steps.costs(drafts.size);
  double best_speed = 0;
  bool best_drafts = false;
  for (const double factor : PRICES) {
    const double price = factor * (plain.batch / plain_s);
    Step step = plain;
    double gained = 0;
    lengths_.assign(drafts.size, 0);
    for (size_t b = 0; b < drafts.size; b++) {
      const double* gains = gains_.data() + b * width;
      const double worth = slots_[size_t(drafts.handles[b])].probe ? priority_factor_ : 1;
      const double once = costs.request + costs.context_token * double(drafts.lengths[b]);
      double most = 0;
      for (int n = 1; n <= there_[b]; n++) {
        const double left = gains[n] * worth - price * (costs.draft_token * n + once);
        if (left > most) most = left, lengths_[b] = n;
      }
      if (!lengths_[b]) continue;
      gained += gains[lengths_[b]];
      step.drafting += 1;
      step.drafting_context_tokens += drafts.lengths[b];
      step.draft_tokens += lengths_[b];
    }
    const double speed = (plain.batch + gained) / steps.seconds(step);
    if (speed > best_speed) {
      best_speed = speed;
      best_drafts = step.drafting > 0;
      best_.swap(lengths_);
    }
  }
  return best_drafts ? best_speed : 0;
}

// Draft nothing, or now and then the one token most likely to be accepted.
void TokenChoice::explore(const Drafts& drafts) {
  if (++plain_steps_ % EXPLORE_EVERY) return;
  size_t best = 0;
  double most = 0;
  for (size_t b = 0; b < drafts.size; b++) {
    const double chance = there_[b] ? gains_[b * (drafts.columns + 1) + 1] : 0;
    if (chance > most) most = chance, best = b;
  }
  drafts.counts[best] = most > 0;
}

void TokenChoice::learn(const Outcome& outcome, double seconds) {
  const int32_t *handles = outcome.handles, *written = outcome.written;
  const size_t size = outcome.size;
  const bool same = size && size == batch_.size() && std::equal(handles, handles + size, batch_.begin());
  bool made = same;
  for (size_t b = 0; made && b < size; b++) made = written[b] && written[b] <= slot(handles[b]).drafted + 1;
  if (made) steps.learn(step_, seconds);
  if (++calls_ % LEARN_EVERY) return;
  verdicts_.clear();
  size_t at = 0;  // of the request's tokens in new_tokens
  for (size_t b = 0; b < size; b++) {
    const Slot& request = slot(handles[b]);
    const int tokens = std::max(written[b], 0), accepted = std::max(tokens, 1) - 1;
    if (trees_ && outcome.new_count - at < size_t(tokens)) {
      throw IndexError("new_tokens has " + std::to_string(outcome.new_count) +
                       " tokens, fewer than written adds up to; pass those of all requests");
    }
    judge(request, size_t(handles[b]) * steps.longest(), outcome.new_tokens + at, accepted);
    if (trees_) at += size_t(tokens);
  }
  calibration.learn(verdicts_);
}

// Say of each token that was verified whether it was accepted; a request's drafts begin at `first`.
void TokenChoice::judge(const Slot& request, size_t first, const int32_t* written, int accepted) {
  const float* predicted = predicted_.data() + first;
  if (!trees_) {
    if (accepted > request.drafted) return;  // of several steps
    for (int j = 0; j < request.drafted; j++) verdicts_.push_back({double(predicted[j]), j < accepted});
    return;
  }
  depths_.assign(size_t(request.drafted), 0);
  for (int j = 0; j < request.drafted; j++) {
    const int parent = parents_[first + size_t(j)], above = parent < 0 ? 0 : depths_[size_t(parent)];
    const bool follows = (parent < 0 || above) && above < accepted && written[above] == tokens_[first + size_t(j)];
    if (follows) depths_[size_t(j)] = above + 1;
    verdicts_.push_back({double(predicted[j]), follows});
  }
}

}  // namespace seer
