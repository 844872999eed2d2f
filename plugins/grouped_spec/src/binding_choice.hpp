// The nanobind front of the choice among drafts.
#pragma once

#include <nanobind/nanobind.h>

namespace seer {

void bind_choice(nanobind::module_& m);

}  // namespace seer
