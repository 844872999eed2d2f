// The nanobind front of the draft index.  Every call keeps the GIL, which is what keeps two apart.
#define SEER_IMPORTS_NUMPY
#include "arrays.hpp"

#include <nanobind/stl/vector.h>

#include "binding_choice.hpp"
#include "index.hpp"

using namespace nanobind::literals;
using namespace seer;

namespace {

Batch batch_of(nb::handle requests, nb::handle lengths, nb::handle written, nb::handle new_tokens, nb::handle limits,
               nb::handle out, nb::handle counts, nb::handle probabilities) {
  Batch batch;
  const bool wide = PyArray_Check(requests.ptr()) &&
                    PyArray_TYPE(reinterpret_cast<PyArrayObject*>(requests.ptr())) == NPY_INT64;
  PyArrayObject* handles = array(requests, "requests", wide ? NPY_INT64 : NPY_INT32, 1);
  batch.size = dimension(handles, 0);
  if (wide) {
    batch.requests64 = data<int64_t>(handles);
  } else {
    batch.requests32 = data<int32_t>(handles);
  }
  batch.lengths = vector(lengths, "lengths", batch.size);
  batch.written = vector(written, "written", batch.size);
  PyArrayObject* added = array(new_tokens, "new_tokens", NPY_INT32, 1);
  batch.new_tokens = data<int32_t>(added);
  batch.new_count = dimension(added, 0);
  batch.limits = vector(limits, "limits", batch.size);
  PyArrayObject* drafts = array(out, "out", NPY_INT32, 2, true);
  batch.out_columns = dimension(drafts, 1);
  batch.out = matrix<int32_t>(out, "out", batch.size, batch.out_columns);
  batch.counts = vector(counts, "counts", batch.size, true);
  batch.probabilities = matrix<float>(probabilities, "probabilities", batch.size, batch.out_columns);
  return batch;
}

struct Tokens {  // a 1-d int32 array
  const int32_t* data;
  size_t size;
  Tokens(nb::handle object, const char* name) {
    PyArrayObject* found = array(object, name, NPY_INT32, 1);
    data = seer::data<int32_t>(found);
    size = dimension(found, 0);
  }
};

nb::object to_array(const std::vector<int32_t>& tokens) {
  npy_intp size = npy_intp(tokens.size());
  PyObject* made = PyArray_SimpleNew(1, &size, NPY_INT32);
  if (!made) throw nb::python_error();
  if (size) std::memcpy(data<int32_t>(reinterpret_cast<PyArrayObject*>(made)), tokens.data(), 4 * tokens.size());
  return nb::steal(made);
}

}  // namespace

NB_MODULE(_index, m) {
  if (_import_array() < 0) throw nb::python_error();
  m.doc() = "The draft index of grouped speculative decoding and the choice among its drafts, in C++.";
  m.attr("VERSION") = SEER_VERSION;
  m.attr("SOURCE_DIGEST") = SEER_SOURCE_DIGEST;
  nb::exception<IndexError>(m, "DraftIndexError", nb::module_::import_("seer_core.errors").attr("SeerError"));

  const Voting defaults;
  nb::class_<Voting>(m, "Voting")
      .def(
          "__init__",
          [](Voting* self, int lookup_min, int lookup_max, int gather, double min_probability, double escape,
             double sibling_weight, double own_recency, double sibling_recency, double soft_match,
             double soft_far, double common_weight, int common_gather, int common_lookup_min) {
            Voting v;
            v.lookup_min = within("lookup_min", lookup_min, 1, MAX_MATCH);
            v.lookup_max = within("lookup_max", lookup_max, v.lookup_min, MAX_MATCH);
            v.gather = within("gather", gather, 1, MAX_GATHER);
            v.min_probability = float(within("min_probability", min_probability, 0.0, 1.0));
            v.escape = float(within("escape", escape, 1e-3, 1e3));
            v.sibling_weight = float(within("sibling_weight", sibling_weight, 0.0, 1e3));
            v.own_recency = float(within("own_recency", own_recency, 0.0, 10.0));
            v.sibling_recency = float(within("sibling_recency", sibling_recency, 0.0, 10.0));
            v.soft_match = float(within("soft_match", soft_match, 0.0, 2.0));
            v.soft_far = float(within("soft_far", soft_far, 0.0, 2.0));
            v.common_weight = float(within("common_weight", common_weight, 0.0, 1e3));
            v.common_gather = within("common_gather", common_gather, 0, MAX_GATHER);
            v.common_lookup_min = within("common_lookup_min", common_lookup_min, 2, MAX_MATCH);
            new (self) Voting(v);
          },
          nb::kw_only(), "lookup_min"_a = defaults.lookup_min, "lookup_max"_a = defaults.lookup_max,
          "gather"_a = defaults.gather, "min_probability"_a = 0.0, "escape"_a = nb::cast(defaults.escape),
          "sibling_weight"_a = nb::cast(defaults.sibling_weight), "own_recency"_a = nb::cast(defaults.own_recency),
          "sibling_recency"_a = nb::cast(defaults.sibling_recency), "soft_match"_a = nb::cast(defaults.soft_match),
          "soft_far"_a = nb::cast(defaults.soft_far),
          "common_weight"_a = nb::cast(defaults.common_weight), "common_gather"_a = defaults.common_gather,
          "common_lookup_min"_a = defaults.common_lookup_min)
      .def_ro("lookup_min", &Voting::lookup_min)
      .def_ro("lookup_max", &Voting::lookup_max)
      .def_ro("gather", &Voting::gather)
      .def_ro("min_probability", &Voting::min_probability)
      .def_ro("escape", &Voting::escape)
      .def_ro("sibling_weight", &Voting::sibling_weight)
      .def_ro("own_recency", &Voting::own_recency)
      .def_ro("sibling_recency", &Voting::sibling_recency)
      .def_ro("soft_match", &Voting::soft_match)
      .def_ro("soft_far", &Voting::soft_far)
      .def_ro("common_weight", &Voting::common_weight)
      .def_ro("common_gather", &Voting::common_gather)
      .def_ro("common_lookup_min", &Voting::common_lookup_min);

  nb::class_<Stats>(m, "IndexStats")
      .def_ro("tokens", &Stats::tokens)
      .def_ro("bytes", &Stats::bytes)
      .def_ro("groups", &Stats::groups)
      .def_ro("requests", &Stats::requests)
      .def_ro("common_tokens", &Stats::common_tokens)
      .def_ro("bytes_leaving", &Stats::bytes_leaving)
      .def_ro("dropped_for_memory", &Stats::dropped_for_memory)
      .def_ro("dropped_by_ttl", &Stats::dropped_by_ttl)
      .def_ro("drafts", &Stats::drafts)
      .def_ro("stale", &Stats::stale)
      .def_ro("mismatched", &Stats::mismatched)
      .def_ro("unstored", &Stats::unstored);

  nb::class_<DraftIndex>(m, "DraftIndex")
      .def(
          "__init__",
          [](DraftIndex* self, int64_t memory_bytes, const Voting& voting, int64_t common_bytes) {
            within<int64_t>("memory_bytes", memory_bytes, DraftIndex::LEAST_MEMORY, int64_t(1) << 48);
            within<int64_t>("common_bytes", common_bytes, 0, int64_t(1) << 34);
            new (self) DraftIndex(size_t(memory_bytes), size_t(common_bytes), voting);
          },
          "memory_bytes"_a = int64_t(1) << 30, nb::kw_only(), "voting"_a = Voting(),
          "common_bytes"_a = int64_t(1) << 25)
      .def_prop_ro("voting", &DraftIndex::voting)
      .def(
          "open_group",
          [](DraftIndex& self, nb::handle prompt, double now_s, double ttl_s) {
            Tokens tokens(prompt, "prompt");
            return self.open_group(tokens.data, tokens.size, now_s, ttl_s);
          },
          "prompt"_a, "now_s"_a, "ttl_s"_a)
      .def("touch_group", &DraftIndex::touch_group, "group"_a, "now_s"_a)
      .def("drop_group", &DraftIndex::drop_group, "group"_a)
      .def("expire", &DraftIndex::expire, "now_s"_a)
      .def("clear", &DraftIndex::clear)
      .def("open_request", &DraftIndex::open_request, "group"_a)
      .def(
          "append",
          [](DraftIndex& self, Handle request, int64_t prev_token_count, nb::handle tokens) {
            Tokens added(tokens, "tokens");
            self.append(request, prev_token_count, added.data, added.size);
          },
          "request"_a, "prev_token_count"_a, "tokens"_a)
      .def("length", &DraftIndex::length, "request"_a)
      .def(
          "tokens",
          [](const DraftIndex& self, Handle request, int64_t start, int64_t stop) {
            std::vector<int32_t> found;
            {
                found = self.tokens(request, start, stop);
            }
            return to_array(found);
          },
          "request"_a, "start"_a, "stop"_a)
      .def("close_request", &DraftIndex::close_request, "request"_a)
      .def(
          "draft",
          [](DraftIndex& self, nb::handle requests, nb::handle lengths, nb::handle written, nb::handle new_tokens,
             nb::handle limits, nb::handle out, nb::handle counts, nb::handle probabilities) {
            const Batch batch =
                batch_of(requests, lengths, written, new_tokens, limits, out, counts, probabilities);
            self.draft(batch);
          },
          "requests"_a, "lengths"_a, "written"_a, "new_tokens"_a, "limits"_a, "out"_a, "counts"_a,
          "probabilities"_a)
      .def(
          "draft_trees",
          [](DraftIndex& self, nb::handle requests, nb::handle lengths, nb::handle written, nb::handle new_tokens,
             nb::handle max_nodes, nb::handle out, nb::handle parents, nb::handle counts, nb::handle probabilities,
             int top_k, int max_depth, int paths) {
            Batch batch =
                batch_of(requests, lengths, written, new_tokens, max_nodes, out, counts, probabilities);
            batch.parents = matrix<int32_t>(parents, "parents", batch.size, batch.out_columns);
            within("top_k", top_k, 0, 1 << 30);
            within("max_depth", max_depth, 0, 1 << 30);
            within("paths", paths, 0, 1 << 30);
            self.draft_trees(batch, {top_k, max_depth, paths});
          },
          "requests"_a, "lengths"_a, "written"_a, "new_tokens"_a, "max_nodes"_a, "out"_a, "parents"_a, "counts"_a,
          "probabilities"_a, "top_k"_a = 0, "max_depth"_a = 0, "paths"_a = 0)
      .def("stats", &DraftIndex::stats);

  bind_choice(m);
}
