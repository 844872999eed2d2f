#include "context_table.hpp"

#include <algorithm>
#include <cstring>

namespace seer {

ContextTable::SubTable::SubTable() { std::memset(lines, 0xff, sizeof lines); }

void ContextTable::SubTable::insert(uint32_t hash, uint32_t value) {
  for (uint32_t line = hash & (LINES - 1);; line = (line + 1) & (LINES - 1)) {
    Line& here = lines[line];
    for (int way = 0; way < WAYS; way++) {
      if (here.values[way] != NONE) continue;
      here.hashes[way] = hash;
      here.values[way] = value;
      used++;
      return;
    }
  }
}

ContextTable::ContextTable() : shift_(31) {
  for (int half = 0; half < 2; half++) {
    tables_.push_back(std::make_unique<SubTable>());
    tables_.back()->depth = 1;
    directory_.push_back(tables_.back().get());
    bytes_ += sizeof(SubTable) + 2 * sizeof(SubTable*);
  }
}

void ContextTable::add(uint32_t hash, Place place) {
  SubTable* table = directory_[hash >> shift_];
  for (uint32_t line = hash & (LINES - 1);; line = (line + 1) & (LINES - 1)) {
    Line& here = table->lines[line];
    const int way = here.way_of(hash);
    if (way >= 0) return push(here.values[way], place);
    if (here.values[WAYS - 1] == NONE) break;
  }
  while (table->used >= FULL) {
    split(hash);
    table = directory_[hash >> shift_];
  }
  table->insert(hash, place);
}

// Add a place to a value that holds some; its block doubles until it is a ring of 63.
void ContextTable::push(uint32_t& value, Place place) {
  if (!(value & BLOCK)) {
    const uint32_t made = allocate(0);
    uint32_t* data = block(made);
    data[0] = Header(0, 0, 2).word();
    data[1] = value;
    data[2] = place;
    value = made;
    return;
  }
  uint32_t* data = block(value);
  Header head{data[0]};
  const int capacity = head.capacity();
  if (head.count < capacity) {
    data[1 + head.count++] = place;
    data[0] = head.word();
  } else if (head.size_class + 1 < BLOCK_CLASSES) {
    const uint32_t made = allocate(head.size_class + 1);
    uint32_t* larger = block(made);
    data = block(value);
    std::memcpy(larger + 1, data + 1, sizeof(uint32_t) * size_t(capacity));
    larger[1 + capacity] = place;
    larger[0] = Header(head.size_class + 1, 0, capacity + 1).word();
    free_[head.size_class].push_back(value);
    value = made;
  } else {
    data[1 + head.oldest] = place;
    head.oldest = head.oldest + 1 == capacity ? 0 : uint8_t(head.oldest + 1);
    data[0] = head.word();
  }
}

uint32_t ContextTable::allocate(int size_class) {
  if (!free_[size_class].empty()) {
    const uint32_t value = free_[size_class].back();
    free_[size_class].pop_back();
    return value;
  }
  const uint32_t quads = 1u << size_class;
  uint32_t quad = (next_quad_ + quads - 1) & ~(quads - 1);  // aligned, so that it spans few cache lines
  if (quad + quads > end_quad_) {
    const size_t size = sizeof(uint32_t) * 4 * CHUNK_QUADS;
    chunks_.emplace_back(static_cast<uint32_t*>(::operator new(size, std::align_val_t(64))));
    bytes_ += size + sizeof(void*);
    quad = uint32_t(chunks_.size() - 1) * CHUNK_QUADS;
    end_quad_ = quad + CHUNK_QUADS;
  }
  next_quad_ = quad + quads;
  return quad | BLOCK;
}

// Split the sub-table that `hash` belongs to by the next bit of its keys.
void ContextTable::split(uint32_t hash) {
  SubTable* old = directory_[hash >> shift_];
  if (old->depth == 32 - shift_) {
    std::vector<SubTable*> doubled(directory_.size() * 2);
    for (size_t i = 0; i < doubled.size(); i++) doubled[i] = directory_[i / 2];
    bytes_ += directory_.size() * sizeof(SubTable*);
    directory_ = std::move(doubled);
    shift_--;
  }
  auto upper = std::make_unique<SubTable>();
  SubTable lower;
  lower.depth = upper->depth = old->depth + 1;
  const uint32_t bit = 1u << (31 - old->depth);
  for (const Line& line : old->lines) {
    for (int way = 0; way < WAYS && line.values[way] != NONE; way++) {
      (line.hashes[way] & bit ? *upper : lower).insert(line.hashes[way], line.values[way]);
    }
  }
  *old = lower;
  const uint32_t prefix = hash >> (31 - (old->depth - 1)) | 1u;  // the upper half's leading bits
  const int spare = 32 - shift_ - old->depth;                    // directory bits it does not use
  for (uint32_t i = 0; i < 1u << spare; i++) directory_[(prefix << spare) + i] = upper.get();
  bytes_ += sizeof(SubTable) + sizeof(void*);
  tables_.push_back(std::move(upper));
}

}  // namespace seer
