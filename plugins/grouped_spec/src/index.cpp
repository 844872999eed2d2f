#include "index.hpp"

#include <cmath>

namespace seer {

namespace {

constexpr int SLICE = 256;  // tokens that are stored, or moved to the common index, at a time

std::string text(int64_t number) { return std::to_string(number); }

void check_tokens(const char* call, const int32_t* tokens, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (tokens[i] >= 0) continue;
    throw IndexError(std::string(call) + ": token " + text(int64_t(i)) + " is " + text(tokens[i]) +
                     ", but token ids are >= 0; pass real tokens only, no padding");
  }
}

void check_time(const char* name, double seconds) {
  if (std::isnan(seconds)) throw IndexError(std::string(name) + " is not a number; pass seconds on one clock");
}

}  // namespace

DraftIndex::DraftIndex(size_t memory_bytes, size_t common_bytes, const Voting& voting)
    : memory_bytes_(memory_bytes),
      voting_(voting),
      weights_(voting),
      common_(voting.common_weight > 0 ? std::min(common_bytes, memory_bytes / 4) : 0) {
  if (memory_bytes < LEAST_MEMORY) {
    throw IndexError("memory_bytes is " + text(int64_t(memory_bytes)) + ", but the least that holds a group is " +
                     text(int64_t(LEAST_MEMORY)) + "; raise it");
  }
}

// ---- groups ----

DraftIndex::GroupEntry& DraftIndex::group_of(Handle group) const {
  if (GroupEntry* entry = groups_.find(group)) return *entry;
  throw IndexError("group " + text(group) + " is unknown: dropped, expired, or never opened here; open it again");
}

DraftIndex::Request& DraftIndex::request_of(Handle request) const {
  if (Request* entry = requests_.find(request)) return *entry;
  throw IndexError("request " + text(request) +
                   " is unknown: its group was dropped or expired, or it was never opened here; open both again");
}

Handle DraftIndex::open_group(const int32_t* prompt, size_t n, double now_s, double ttl_s) {
  check_tokens("open_group", prompt, n);
  check_time("now_s", now_s);
  check_time("ttl_s", ttl_s);
  if (n > size_t(MAX_POSITIONS - LEAD - 1)) {
    throw IndexError("open_group: the prompt has " + text(int64_t(n)) + " tokens, but at most " +
                     text(MAX_POSITIONS - LEAD - 1) + " fit; pass the end of it");
  }
  auto entry = std::make_unique<GroupEntry>(int(n), now_s, ttl_s);
  entry->group.append(0, prompt, int(n));
  entry->group.shrink(0);

  if (groups_.full()) throw IndexError("open_group: " + text(Slots<Group>::LIMIT) + " groups are open; drop some");
  if (!make_room(entry->group.bytes(), nullptr)) {
    throw IndexError("open_group: the prompt's " + text(int64_t(entry->group.bytes())) + " bytes do not fit into " +
                     text(int64_t(memory_bytes_)) + " beside groups that are being drafted for; raise memory_bytes");
  }
  entry->used = ++clock_;
  group_bytes_ += entry->group.bytes();
  tokens_ += n;
  GroupEntry& opened = *entry;
  absorb(SLICE);
  return opened.handle = groups_.add(std::move(entry));
}

void DraftIndex::touch_group(Handle group, double now_s) {
  check_time("now_s", now_s);
  GroupEntry& entry = group_of(group);
  entry.touched_s = std::max(entry.touched_s, now_s);
  entry.used = ++clock_;
}

void DraftIndex::drop_group(Handle group) {
  group_of(group);
  remove(group, true);
  absorb(4 * SLICE);
}

std::vector<Handle> DraftIndex::expire(double now_s) {
  check_time("now_s", now_s);
  std::vector<Handle> expired;
  groups_.each([&](Handle handle, const GroupEntry& entry) {
    if (now_s - entry.touched_s >= entry.ttl_s) expired.push_back(handle);
  });
  for (Handle handle : expired) remove(handle, true);
  counters_.dropped_by_ttl += expired.size();
  absorb(4 * SLICE);
  return expired;
}

void DraftIndex::clear() {
  std::vector<Handle> all;
  groups_.each([&](Handle handle, const GroupEntry&) { all.push_back(handle); });
  for (Handle handle : all) remove(handle, false);
  common_.clear();
  leaving_.clear();
  leaving_bytes_ = leaving_done_ = common_tokens_ = 0;
}

// Take a group and its requests out; with keep_text their responses are queued for the common index.
std::unique_ptr<DraftIndex::GroupEntry> DraftIndex::remove(Handle handle, bool keep_text) {
  std::unique_ptr<GroupEntry> entry = groups_.remove(handle);
  for (Handle request : entry->requests) requests_.remove(request);
  group_bytes_ -= entry->group.bytes();
  tokens_ -= entry->group.tokens();
  if (keep_text && common_.capacity()) {
    std::vector<Segment> segments = entry->group.take_segments();
    for (size_t i = 1; i < segments.size(); i++) {
      if (!segments[i].size()) continue;
      leaving_bytes_ += segments[i].bytes();
      leaving_.push_back(std::move(segments[i]));
    }
    // More than the ring holds would push itself out again.
    while (leaving_.size() > 1 && leaving_bytes_ > common_.capacity() * sizeof(int32_t)) {
      leaving_bytes_ -= leaving_.front().bytes();
      leaving_.pop_front();
      leaving_done_ = 0;
    }
  }
  return entry;
}

// Move up to so many queued tokens into the common index.
void DraftIndex::absorb(size_t tokens) {
  while (tokens > 0 && !leaving_.empty()) {
    const Segment& segment = leaving_.front();
    const size_t k = std::min(tokens, size_t(segment.size()) - leaving_done_);
    common_.append(segment.text() + leaving_done_, int(k), leaving_done_ == 0);
    common_tokens_ = std::min<size_t>(common_tokens_ + k, common_.capacity());
    leaving_done_ += k;
    tokens -= k;
    if (leaving_done_ == size_t(segment.size())) {
      leaving_bytes_ -= segment.bytes();
      leaving_.pop_front();
      leaving_done_ = 0;
    }
  }
}

// Drop least recently used groups until so many bytes fit.  `keep`, and groups with open requests that
// the latest draft call served, stay; false if that is not enough.
bool DraftIndex::make_room(size_t bytes, const GroupEntry* keep) {
  while (group_bytes_ + leaving_bytes_ + common_.reserved_bytes() + bytes > memory_bytes_) {
    if (!leaving_.empty()) {
      leaving_.clear();
      leaving_bytes_ = leaving_done_ = 0;
      continue;
    }
    const GroupEntry* oldest = nullptr;
    groups_.each([&](Handle, const GroupEntry& entry) {
      const bool drafting = entry.open_requests && draft_calls_ && entry.draft_call == draft_calls_;
      if (&entry != keep && !drafting && (!oldest || entry.used < oldest->used)) oldest = &entry;
    });
    if (!oldest) return false;
    remove(oldest->handle, false);
    counters_.dropped_for_memory++;
  }
  return true;
}

// ---- requests ----

Handle DraftIndex::open_request(Handle group) {
  GroupEntry& entry = group_of(group);
  if (entry.group.full() || requests_.full()) {
    throw IndexError("open_request: group " + text(group) + " has had " + text(entry.requests.size()) +
                     " requests, of " + text(MAX_SEGMENTS - 1) + " at most; drop the group and open a new one");
  }
  auto request = std::make_unique<Request>(Request{&entry, 0, true});
  group_bytes_ -= entry.group.bytes();
  request->segment = entry.group.open_request();
  group_bytes_ += entry.group.bytes();
  entry.open_requests++;
  entry.requests.push_back(requests_.add(std::move(request)));
  return entry.requests.back();
}

// Index tokens that are known to follow; false if memory or positions have run out.
bool DraftIndex::store(Request& request, const int32_t* tokens, int64_t k) {
  Group& group = request.group->group;
  while (k > 0) {
    const int slice = int(std::min<int64_t>(k, SLICE));
    if (segment_of(request).end() + slice >= MAX_POSITIONS) return false;
    const size_t growth = group.growth(request.segment, slice);
    if (group_bytes_ + leaving_bytes_ + common_.reserved_bytes() + growth > memory_bytes_ &&
        !make_room(growth, request.group)) {
      return false;
    }
    const size_t before = group.bytes();
    group.append(request.segment, tokens, slice);
    group_bytes_ += group.bytes() - before;
    tokens_ += size_t(slice);
    tokens += slice;
    k -= slice;
  }
  return true;
}

void DraftIndex::append(Handle handle, int64_t prev_token_count, const int32_t* tokens, size_t k) {
  check_tokens("append", tokens, k);
  if (prev_token_count < 0 || prev_token_count > MAX_POSITIONS) {
    throw IndexError("append to request " + text(handle) + ": prev_token_count is " + text(prev_token_count) +
                     "; pass the number of response tokens before these, 0.." + text(MAX_POSITIONS));
  }
  Request& request = request_of(handle);
  const std::string name = "append to request " + text(handle) + ": ";
  if (!request.open) throw IndexError(name + "it is closed; open another request of its group");
  const Segment& segment = segment_of(request);
  const int64_t have = segment.size(), end = prev_token_count + int64_t(k);
  if (prev_token_count > have) {
    throw IndexError(name + "prev_token_count is " + text(prev_token_count) + ", but it has " + text(have) +
                     " tokens; send those from " + text(have) + " on");
  }
  const int64_t overlap = std::min(have, end) - prev_token_count;
  if (overlap > 0 && std::memcmp(segment.text() + prev_token_count, tokens, sizeof(int32_t) * size_t(overlap))) {
    throw IndexError(name + "tokens differ from the ones it has between " + text(prev_token_count) + " and " +
                     text(prev_token_count + overlap) + "; a response never changes, open another request");
  }
  request.group->used = ++clock_;
  if (!store(request, tokens + overlap, int64_t(k) - overlap)) {
    if (end + LEAD >= MAX_POSITIONS) {
      throw IndexError(name + "a response of more than " + text(MAX_POSITIONS - LEAD - 1) +
                       " tokens cannot be indexed; leave it at that");
    }
    throw IndexError(name + "all " + text(int64_t(memory_bytes_)) +
                     " bytes are taken by it and by groups that are being drafted for; raise memory_bytes");
  }
  absorb(std::max<size_t>(k, SLICE));
  request.cut = false;
}

int DraftIndex::length(Handle request) const {
  return segment_of(request_of(request)).size();
}

std::vector<int32_t> DraftIndex::tokens(Handle request, int64_t start, int64_t stop) const {
  const Segment& segment = segment_of(request_of(request));
  if (start < 0 || stop < start || stop > segment.size()) {
    throw IndexError("tokens of request " + text(request) + ": [" + text(start) + ", " + text(stop) +
                     ") is not within its " + text(segment.size()) + " tokens; ask length() first");
  }
  return {segment.text() + start, segment.text() + stop};
}

void DraftIndex::close_request(Handle handle) {
  Request& request = request_of(handle);
  if (!request.open) return;
  request.open = false;
  request.group->open_requests--;
  Group& group = request.group->group;
  group_bytes_ -= group.bytes();
  group.shrink(request.segment);
  group_bytes_ += group.bytes();
}

Stats DraftIndex::stats() const {
  Stats stats = counters_;
  stats.tokens = tokens_;
  stats.bytes = group_bytes_ + leaving_bytes_ + common_.bytes();
  stats.groups = groups_.size();
  stats.requests = requests_.size();
  stats.common_tokens = common_tokens_;
  stats.bytes_leaving = leaving_bytes_;
  return stats;
}

// ---- drafts ----

void DraftIndex::check(const Batch& batch) const {
  size_t written = 0;
  for (size_t b = 0; b < batch.size; b++) {
    const auto refuse = [b](const char* array, int32_t value, const char* fact, int32_t limit) {
      throw IndexError("draft: " + std::string(array) + "[" + text(int64_t(b)) + "] is " + text(value) +
                       ", but " + fact + text(limit) + "; pass the engine's own numbers");
    };
    if (batch.lengths[b] < 0) refuse("lengths", batch.lengths[b], "lengths start at ", 0);
    if (batch.written[b] < 0 || batch.written[b] > batch.lengths[b]) {
      refuse("written", batch.written[b], "of its tokens there are 0..", batch.lengths[b]);
    }
    if (batch.limits[b] < 0) refuse("limits", batch.limits[b], "limits start at ", 0);
    written += size_t(batch.written[b]);
  }
  if (written != batch.new_count) {
    throw IndexError("draft: new_tokens has " + text(int64_t(batch.new_count)) + " tokens, but written adds up to " +
                     text(int64_t(written)) + "; pass the tokens of all requests, one after the other");
  }
}

// Say whether row b can be drafted for: its request is open, and what it has written goes on from what the
// index holds.
bool DraftIndex::ready(const Batch& batch, size_t b, const int32_t* written, Ready& item) {
  batch.counts[b] = 0;
  item.b = b;
  item.length = batch.lengths[b];
  item.limit = int(std::min<int64_t>(batch.limits[b], int64_t(batch.out_columns)));
  counters_.drafts += item.limit > 0;
  item.request = requests_.find(batch.request(b));
  if (!item.request || !item.request->open) {
    counters_.stale++;
    return false;
  }
  if (item.request->cut) {
    counters_.unstored++;
    return false;
  }
  const Group& group = item.request->group->group;
  const Segment& segment = segment_of(*item.request);
  const int prompt = group.prompt_tokens(), have = item.have = prompt + segment.size();
  const int start = item.length - batch.written[b];
  // What it has of these must be the same: some of it prompt, some response.
  const auto equal = [&](int from, int to, const int32_t* stored) {
    return from >= to || !std::memcmp(written + (from - start), stored, sizeof(int32_t) * size_t(to - from));
  };
  bool fits = start <= have && item.length >= have;
  if (fits && start < have) {
    const int response = std::max(start, prompt);
    fits = equal(start, std::min(prompt, have), group.segment(0).text() + start) &&
           equal(response, have, segment.text() + (response - prompt));
  }
  item.added = fits ? written + (have - start) : nullptr;
  for (int i = 0; fits && i < item.length - have; i++) fits = item.added[i] >= 0;
  counters_.mismatched += !fits;
  return fits;
}

// Append what is new.
void DraftIndex::sync(const Ready& item) {
  Request& request = *item.request;
  request.group->used = ++clock_;
  const int have = request.group->group.prompt_tokens() + segment_of(request).size();
  if (have != item.have) return;  // the request occurs twice in this batch, and the other row went first
  request.cut = item.length > have && !store(request, item.added, item.length - have);
  counters_.unstored += request.cut;
}

template <class Vote>
void DraftIndex::run(const Batch& batch, Vote&& vote) {
  check(batch);
  draft_calls_++;
  for (size_t b = 0; b < batch.size; b++) {  // none of these groups may be dropped meanwhile
    if (Request* request = requests_.find(batch.request(b))) request->group->draft_call = draft_calls_;
  }
  const int32_t* written = batch.new_tokens;
  for (size_t begin = 0; begin < batch.size; begin += WINDOW) {
    Ready items[WINDOW];
    size_t count = 0;
    for (size_t b = begin; b < std::min(batch.size, begin + WINDOW); b++) {
      count += ready(batch, b, written, items[count]);
      written += batch.written[b];
    }
    for (size_t i = 0; i < count; i++) items[i].request->group->group.prefetch_append(items[i].request->segment);
    for (size_t i = 0; i < count; i++) sync(items[i]);
    const auto idle = [](const Ready& x) { return !x.limit || !x.length || x.request->cut; };
    const auto wanted = std::remove_if(items, items + count, idle);
    count = size_t(wanted - items);
    for (size_t i = 0; i < count; i++) {
      const Ready& item = items[i];
      queries_[i].start(item.request->group->group, &common_, item.request->segment);
    }
    for (size_t i = 0; i < count; i++) queries_[i].find(voting_);
    for (size_t i = 0; i < count; i++) queries_[i].list(voting_);
    for (size_t i = 0; i < count; i++) {
      queries_[i].evaluate(voting_, weights_, *candidates_);
      const size_t at = items[i].b * batch.out_columns;
      int32_t* parents = batch.parents ? batch.parents + at : nullptr;
      batch.counts[items[i].b] = vote(items[i].limit, {batch.out + at, parents, batch.probabilities + at});
    }
  }
  absorb(8);
}

void DraftIndex::draft(const Batch& batch) {
  run(batch, [&](int limit, DraftOut out) { return voters_.draft_path(*candidates_, voting_, limit, out); });
}

void DraftIndex::draft_trees(const Batch& batch, TreeLimits limits) {
  run(batch, [&](int limit, DraftOut out) { return voters_.draft_tree(*candidates_, voting_, limit, limits, out); });
}

}  // namespace seer
