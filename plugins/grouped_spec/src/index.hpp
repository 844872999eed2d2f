// The draft index: groups and requests by handle, one memory budget, drafts for a whole batch.
//
// It serves one thread, the engine's; nothing here locks, and nothing depends on Python.
#pragma once

#include <deque>
#include <string>

#include "candidates.hpp"
#include "errors.hpp"
#include "slots.hpp"
#include "votes.hpp"

namespace seer {

struct Stats {
  size_t tokens = 0, bytes = 0, groups = 0, requests = 0, common_tokens = 0;
  size_t bytes_leaving = 0;    // text of dropped groups that is still to be put into the common index
  uint64_t dropped_for_memory = 0, dropped_by_ttl = 0;
  uint64_t drafts = 0;      // rows asked for with a limit above 0
  uint64_t stale = 0;       // rows whose request is gone or closed
  uint64_t mismatched = 0;  // rows that do not go on from what the index holds, or hold a bad token id
  uint64_t unstored = 0;    // rows whose new tokens, or some before them, found no room
};

// One call's arrays.  Request b is lengths[b] tokens long, prompt included; the last written[b] of these are
// new.  All requests' new tokens stand in new_tokens, one request's after the other's.
struct Batch {
  size_t size = 0;
  const int32_t* requests32 = nullptr;  // one of the two
  const int64_t* requests64 = nullptr;
  const int32_t* lengths = nullptr;
  const int32_t* written = nullptr;
  const int32_t* new_tokens = nullptr;
  size_t new_count = 0;
  const int32_t* limits = nullptr;  // most tokens or nodes to draft; 0: append only
  int32_t* out = nullptr;      // [size, out_columns], as are the next two
  int32_t* parents = nullptr;  // trees only
  float* probabilities = nullptr;
  size_t out_columns = 0;
  int32_t* counts = nullptr;

  Handle request(size_t b) const { return requests64 ? requests64[b] : Handle(requests32[b]); }
};

class DraftIndex {
 public:
  static constexpr size_t LEAST_MEMORY = size_t(1) << 20;

  DraftIndex(size_t memory_bytes, size_t common_bytes, const Voting& voting);

  Handle open_group(const int32_t* prompt, size_t n, double now_s, double ttl_s);
  void touch_group(Handle group, double now_s);
  void drop_group(Handle group);
  std::vector<Handle> expire(double now_s);
  void clear();

  Handle open_request(Handle group);
  void append(Handle request, int64_t prev_token_count, const int32_t* tokens, size_t k);
  int length(Handle request) const;
  std::vector<int32_t> tokens(Handle request, int64_t start, int64_t stop) const;
  void close_request(Handle request);

  void draft(const Batch& batch);
  void draft_trees(const Batch& batch, TreeLimits limits);

  Stats stats() const;
  const Voting& voting() const { return voting_; }

 private:
  struct GroupEntry {
    Group group;
    double touched_s, ttl_s;
    uint64_t used = 0;        // clock of the last append or draft
    uint64_t draft_call = 0;  // the last call that drafted for it
    int open_requests = 0;
    std::vector<Handle> requests;
    Handle handle = -1;
    GroupEntry(int prompt_tokens, double now_s, double ttl) : group(prompt_tokens), touched_s(now_s), ttl_s(ttl) {}
  };
  struct Request {
    GroupEntry* group;
    int segment;
    bool open;
    bool cut = false;  // some of its text found no room, so what comes after does not fit
  };
  struct Ready {  // one row of a batch that can be drafted for
    size_t b;
    Request* request;
    const int32_t* added;     // what the index does not have
    int have, length, limit;  // tokens stored, tokens there are, tokens wanted
  };

  GroupEntry& group_of(Handle group) const;
  Request& request_of(Handle request) const;
  const Segment& segment_of(const Request& request) const { return request.group->group.segment(request.segment); }

  std::unique_ptr<GroupEntry> remove(Handle group, bool keep_text);
  bool make_room(size_t bytes, const GroupEntry* keep);
  bool store(Request& request, const int32_t* tokens, int64_t k);
  void absorb(size_t tokens);

  void check(const Batch& batch) const;
  bool ready(const Batch& batch, size_t b, const int32_t* written, Ready& item);
  void sync(const Ready& item);
  template <class Vote>
  void run(const Batch& batch, Vote&& vote);

  const size_t memory_bytes_;
  const Voting voting_;
  const Weights weights_;

  Slots<GroupEntry> groups_;
  Slots<Request> requests_;
  size_t group_bytes_ = 0, tokens_ = 0;
  uint64_t clock_ = 0, draft_calls_ = 0;
  Stats counters_;

  // Text of groups that are gone, on its way into the common index a little at a time.
  RecentText common_;
  std::deque<Segment> leaving_;
  size_t leaving_bytes_ = 0, leaving_done_ = 0, common_tokens_ = 0;

  // Scratch of a batch.
  static constexpr size_t WINDOW = 16;  // requests whose cache misses overlap
  std::unique_ptr<Query[]> queries_{new Query[WINDOW]};
  std::unique_ptr<Candidates> candidates_{new Candidates};
  Voters voters_;
};

}  // namespace seer
