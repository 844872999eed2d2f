// What a call that cannot be carried out throws: the culprit, the fact and the remedy.
#pragma once

#include <stdexcept>

namespace seer {

class IndexError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace seer
