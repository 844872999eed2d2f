// Objects by handle.  A handle is generation * 2^20 + slot: once its object is gone it is stale for
// good, and never names the object that took the slot.  Slots are reused in turn, late, so that
// handles stay below 2^31 for millions of objects and fit an int32 array.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace seer {

using Handle = int64_t;

template <class T>
class Slots {
 public:
  static constexpr int SLOT_BITS = 20;
  static constexpr size_t LIMIT = size_t(1) << SLOT_BITS;  // objects at a time
  static constexpr size_t REST = 1024;                     // free slots before one is reused

  bool full() const { return entries_.size() == LIMIT && free_.empty(); }
  size_t size() const { return entries_.size() - free_.size(); }

  Handle add(std::unique_ptr<T> object) {
    size_t slot = entries_.size();
    if (free_.size() >= REST || slot == LIMIT) {
      slot = free_.front();
      free_.pop_front();
    } else {
      entries_.emplace_back();
    }
    entries_[slot].object = std::move(object);
    return handle_of(slot);
  }

  // The object, or nullptr for a handle that is stale or was never given out.
  T* find(Handle handle) const {
    const size_t slot = size_t(handle) & (LIMIT - 1);
    if (handle < 0 || slot >= entries_.size()) return nullptr;
    const Entry& entry = entries_[slot];
    return entry.generation == handle >> SLOT_BITS ? entry.object.get() : nullptr;
  }

  std::unique_ptr<T> remove(Handle handle) {
    Entry& entry = entries_[size_t(handle) & (LIMIT - 1)];
    entry.generation++;
    free_.push_back(uint32_t(size_t(handle) & (LIMIT - 1)));
    return std::move(entry.object);
  }

  template <class Visit>
  void each(Visit&& visit) const {
    for (size_t slot = 0; slot < entries_.size(); slot++) {
      if (entries_[slot].object) visit(handle_of(slot), *entries_[slot].object);
    }
  }

 private:
  struct Entry {
    int64_t generation = 0;
    std::unique_ptr<T> object;
  };
  Handle handle_of(size_t slot) const { return entries_[slot].generation << SLOT_BITS | int64_t(slot); }

  std::vector<Entry> entries_;
  std::deque<uint32_t> free_;
};

}  // namespace seer
