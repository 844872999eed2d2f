// The nanobind front of the choice among drafts; its calls keep the GIL, as those of the index do.
#include "binding_choice.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "choice.hpp"

namespace seer {

using namespace nb::literals;

namespace {

StepModel model_of(nb::handle profile) {
  PyArrayObject* found = array(profile, "profile", NPY_FLOAT64, 2);
  if (!PyArray_SIZE(found)) refuse("profile", "is empty", "T(B, 0), T(B, 1), ... for B = 1, 2, ...");
  const double* seconds = data<double>(found);
  return {{seconds, seconds + PyArray_SIZE(found)}, dimension(found, 1) - 1};
}

void choose(TokenChoice& self, nb::handle handles, nb::handle lengths, nb::handle counts, nb::handle chances,
            nb::handle tokens, nb::handle parents) {
  PyArrayObject* batch = array(handles, "handles", NPY_INT32, 1);
  PyArrayObject* wide = array(chances, "chances", NPY_FLOAT32, 2);
  Drafts drafts;
  drafts.size = dimension(batch, 0);
  drafts.columns = dimension(wide, 1);
  drafts.handles = data<int32_t>(batch);
  drafts.lengths = vector(lengths, "lengths", drafts.size);
  drafts.counts = vector(counts, "counts", drafts.size, true);
  drafts.chances = matrix<float>(chances, "chances", drafts.size, drafts.columns);
  if (!parents.is_none()) {
    drafts.tokens = matrix<int32_t>(tokens, "drafts", drafts.size, drafts.columns);
    drafts.parents = matrix<int32_t>(parents, "parents", drafts.size, drafts.columns);
  }
  self.choose(drafts);
}

void learn(TokenChoice& self, nb::handle handles, nb::handle written, nb::handle new_tokens, double seconds) {
  PyArrayObject* batch = array(handles, "handles", NPY_INT32, 1);
  Outcome outcome;
  outcome.size = dimension(batch, 0);
  outcome.handles = data<int32_t>(batch);
  outcome.written = vector(written, "written", outcome.size);
  PyArrayObject* tokens = array(new_tokens, "new_tokens", NPY_INT32, 1);
  outcome.new_tokens = data<int32_t>(tokens);
  outcome.new_count = dimension(tokens, 0);
  self.learn(outcome, seconds);
}

}  // namespace

void bind_choice(nb::module_& m) {
  nb::class_<Calibration>(m, "Calibration")
      .def(
          "__init__",
          [](Calibration* self, int refresh) {
            new (self) Calibration(within("refresh", refresh, 1, 1 << 20));
          },
          "refresh"_a = 16)
      .def("calibrate", &Calibration::calibrate, "probability"_a)
      .def(
          "learn",
          [](Calibration& self, const std::vector<std::pair<double, bool>>& verdicts) {
            std::vector<Verdict> given;
            for (const auto& [predicted, accepted] : verdicts) given.push_back({predicted, accepted});
            self.learn(given);
          },
          "verdicts"_a);

  nb::class_<Step>(m, "Step")
      .def(nb::init<double, double, double, double, double>(), "batch"_a, "context_tokens"_a, "drafting"_a,
           "drafting_context_tokens"_a, "draft_tokens"_a)
      .def_ro("batch", &Step::batch)
      .def_ro("context_tokens", &Step::context_tokens)
      .def_ro("drafting", &Step::drafting)
      .def_ro("drafting_context_tokens", &Step::drafting_context_tokens)
      .def_ro("draft_tokens", &Step::draft_tokens);

  nb::class_<StepModel> model(m, "StepModel");
  model.attr("REFRESH") = StepModel::REFRESH;
  model
      .def(
          "__init__", [](StepModel* self, nb::handle profile) { new (self) StepModel(model_of(profile)); },
          "profile"_a)
      .def("seconds", &StepModel::seconds, "step"_a)
      .def(
          "costs",
          [](const StepModel& self, size_t batch) {
            const Costs costs = self.costs(batch);
            return nb::make_tuple(costs.request, costs.context_token, costs.draft_token);
          },
          "batch"_a)
      .def("learn", &StepModel::learn, "step"_a, "seconds"_a);

  nb::class_<TokenChoice> choice(m, "TokenChoice");
  choice.attr("LEARN_EVERY") = TokenChoice::LEARN_EVERY;
  choice.attr("EXPLORE_EVERY") = TokenChoice::EXPLORE_EVERY;
  choice
      .def(
          "__init__",
          [](TokenChoice* self, nb::handle profile, double priority_factor, double least_gain) {
            within("priority_factor", priority_factor, 0.0, 1e6);
            within("least_gain", least_gain, 0.0, 1e6);
            new (self) TokenChoice(model_of(profile), priority_factor, least_gain);
          },
          "profile"_a, "priority_factor"_a = 2.0, "least_gain"_a = 0.02)
      .def("open", &TokenChoice::open, "handle"_a, "probe"_a)
      .def("choose", &choose, "handles"_a, "lengths"_a, "counts"_a, "chances"_a, "drafts"_a.none() = nb::none(),
           "parents"_a.none() = nb::none())
      .def("learn", &learn, "handles"_a, "written"_a, "new_tokens"_a, "seconds"_a)
      .def_ro("calibration", &TokenChoice::calibration)
      .def_ro("steps", &TokenChoice::steps);
}

}  // namespace seer
