#include "calibration.hpp"

#include <algorithm>
#include <cmath>

namespace seer {

Calibration::Calibration(int refresh) : refresh_(refresh) { draw(); }

int Calibration::bin_of(double probability) {
  if (!(probability > 0)) return 0;  // NaN too
  return probability < 1 ? int(probability * BINS) : BINS - 1;
}

double Calibration::calibrate(double probability) const {
  if (!(probability > 0)) return 0;
  if (probability >= 1) return to_[BINS + 1];
  size_t corner = size_t(bin_of(probability));  // each bin holds one corner inside, its mean: from_[bin + 1]
  if (probability >= from_[corner + 1]) corner++;
  const double slope = (to_[corner + 1] - to_[corner]) / (from_[corner + 1] - from_[corner]);
  return slope * (probability - from_[corner]) + to_[corner];
}

void Calibration::learn(const std::vector<Verdict>& verdicts) {
  if (verdicts.empty()) return;
  std::array<double, BINS> count{}, predicted{}, accepted{};
  for (const Verdict& verdict : verdicts) {
    const size_t bin = size_t(bin_of(verdict.predicted));
    count[bin] += 1;
    predicted[bin] += std::isfinite(verdict.predicted) ? std::clamp(verdict.predicted, 0.0, 1.0) : 0.0;
    accepted[bin] += verdict.accepted;
  }
  const double keep = std::pow(0.5, double(verdicts.size()) / HALF_LIFE_TOKENS);
  for (size_t bin = 0; bin < BINS; bin++) {
    count_[bin] = count_[bin] * keep + count[bin];
    predicted_[bin] = predicted_[bin] * keep + predicted[bin];
    accepted_[bin] = accepted_[bin] * keep + accepted[bin];
  }
  if (++learnt_ % refresh_ == 0) draw();
}

// The curve goes through the bins' means, pooled where they would fall (pool adjacent violators).
void Calibration::draw() {
  struct Pool {
    double mean, weight;
    int bins;
  };
  std::array<Pool, BINS> pools;
  size_t count = 0;
  for (int bin = 0; bin < BINS; bin++) {
    const size_t b = size_t(bin);
    const double centre = (bin + 0.5) / BINS, weight = count_[b] + PRIOR_TOKENS;
    from_[b + 1] = (predicted_[b] + PRIOR_TOKENS * centre) / weight;
    Pool pool{(accepted_[b] + PRIOR_TOKENS * centre) / weight, weight, 1};
    for (; count && pools[count - 1].mean > pool.mean; count--) {
      const Pool& other = pools[count - 1];
      pool.mean = (pool.mean * pool.weight + other.mean * other.weight) / (pool.weight + other.weight);
      pool.weight += other.weight;
      pool.bins += other.bins;
    }
    pools[count++] = pool;
  }
  size_t at = 1;
  for (size_t pool = 0; pool < count; pool++) {
    for (int bin = 0; bin < pools[pool].bins; bin++) to_[at++] = pools[pool].mean;
  }
  from_[BINS + 1] = 1;
  to_[BINS + 1] = std::min(1.0, to_[BINS] / from_[BINS]);
}

}  // namespace seer
