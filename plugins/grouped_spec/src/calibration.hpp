// What predicted probabilities turn out to be worth, learnt online.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace seer {

struct Verdict {  // on one verified draft token
  double predicted;
  bool accepted;
};

// What became of tokens drafted with a given probability; monotone, and the identity at first.
class Calibration {
 public:
  static constexpr int BINS = 16;                   // equal bins of predicted probability
  static constexpr double HALF_LIFE_TOKENS = 4096;  // after so many, what was learnt counts half
  static constexpr double PRIOR_TOKENS = 8;         // per bin, that trust in the prediction counts for

  // What was learnt shows after `refresh` calls.
  explicit Calibration(int refresh = 16);

  // The observed acceptance of tokens with this probability; order is kept.
  double calibrate(double probability) const;

  void learn(const std::vector<Verdict>& verdicts);

 private:
  static int bin_of(double probability);
  void draw();

  int refresh_;
  long learnt_ = 0;
  std::array<double, BINS> count_{}, predicted_{}, accepted_{};  // sums that decay
  std::array<double, BINS + 2> from_{}, to_{};                   // the curve: its corners, linear between
};

}  // namespace seer
