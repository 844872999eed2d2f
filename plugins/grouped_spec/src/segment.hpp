// Text of one request, in one piece.
//
// A group's text is kept per request and never mixed, so all that a draft copies lies inside one
// request's own text: interleaved appends cannot make a path that no request wrote.
//
// Layout:  [ LEAD tokens that came before, padded in front with NO_TOKEN | the text | NO_TOKEN ]
// The lead lets a match run back into the prompt without leaving the array; the NO_TOKEN at the end
// stops a continuation without a length check.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace seer {

constexpr int MAX_MATCH = 64;      // the longest match that is measured, tokens
constexpr int LEAD = MAX_MATCH;    // tokens kept in front of a text
constexpr int32_t NO_TOKEN = -1;   // never equal to a token, as those are >= 0

class Segment {
 public:
  // A text that begins after the n tokens at `before`.
  Segment(const int32_t* before, int n) {
    reserve(0);
    const int kept = std::min(n, LEAD);
    std::fill(data_, data_ + LEAD - kept, NO_TOKEN);
    if (kept > 0) std::memcpy(data_ + LEAD - kept, before + n - kept, sizeof(int32_t) * kept);
    data_[LEAD] = NO_TOKEN;
  }
  Segment(Segment&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_), capacity_(other.capacity_) {}
  Segment& operator=(Segment&&) = delete;
  Segment(const Segment&) = delete;
  ~Segment() { std::free(data_); }

  int size() const { return size_; }                                 // tokens of the text itself
  const int32_t* text() const { return data_ + LEAD; }
  const int32_t* at(int position) const { return data_ + position; } // positions count the lead
  int end() const { return LEAD + size_; }                           // position after the last token
  size_t bytes() const { return sizeof(*this) + sizeof(int32_t) * size_t(capacity_); }

  // Bytes that an append of k tokens would add.
  size_t growth(int k) const { return sizeof(int32_t) * size_t(capacity_for(size_ + k) - capacity_); }

  void append(const int32_t* tokens, int k) {
    reserve(size_ + k);
    std::memcpy(data_ + LEAD + size_, tokens, sizeof(int32_t) * k);
    size_ += k;
    data_[LEAD + size_] = NO_TOKEN;
  }

  // Give back what growth left over: the text is complete.
  void shrink() {
    const int exact = LEAD + size_ + 1;
    if (exact < capacity_) resize(exact);
  }

 private:
  int capacity_for(int size) const {
    const int need = LEAD + size + 1;
    // An eighth more: large arrays are remapped, not copied, by realloc, so growth stays cheap.
    return need <= capacity_ ? capacity_ : std::max(need, capacity_ + capacity_ / 8 + 32);
  }
  void reserve(int size) {
    const int capacity = capacity_for(size);
    if (capacity != capacity_) resize(capacity);
  }
  void resize(int capacity) {
    void* moved = std::realloc(data_, sizeof(int32_t) * size_t(capacity));
    if (!moved) throw std::bad_alloc();
    data_ = static_cast<int32_t*>(moved);
    capacity_ = capacity;
  }

  int32_t* data_ = nullptr;
  int size_ = 0;
  int capacity_ = 0;
};

}  // namespace seer
