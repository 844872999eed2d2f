"""A real SGLang under every sampling control, which holds however the work is cut."""

import pytest

pytest.register_assert_rewrite("backends.tests.sampling_controls")

from backends.tests.sampling_controls import SamplingControls  # noqa: E402

pytestmark = pytest.mark.engine


class TestSglangControls(SamplingControls):
    """SGLang has all of them."""
