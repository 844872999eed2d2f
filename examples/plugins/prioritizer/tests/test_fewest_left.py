from seer_core.model import PromptGroup
from seer_testing import PrioritizerContract

from seer_fewest_left import FewestLeft

pytest_plugins = ["seer_testing.simulate"]


class TestFewestLeft(PrioritizerContract):
    def make(self):
        return FewestLeft()


def test_the_request_with_the_fewest_tokens_left_is_served_first(simulation):
    groups = [PromptGroup(id=str(most), prompt_token_ids=(1, 2), n=1, max_tokens=most) for most in (9, 3, 6)]
    result = simulation.run(["fewest_left"], groups, instances=1, max_running=1)
    assert result.order == ["3/0", "6/0", "9/0"]
