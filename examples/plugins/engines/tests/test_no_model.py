from seer_session import rollout
from seer_testing import EngineContract

from seer_no_model import NoModelFleet, Settings


class TestNoModel(EngineContract):
    def make(self):
        return NoModelFleet(Settings(instances=2))


def test_a_rollout_runs_on_it(tmp_path):
    config = tmp_path / "seer.toml"
    config.write_text('[seer]\nengine = "no_model"\nkv_pool = "none"\n')
    result = rollout(config, [{"prompt_token_ids": [5, 6, 7], "n": 6, "max_tokens": 50}])
    assert len(result.completions) == 6
    busy = {name for completion in result.completions for name in completion.instances}
    assert busy == {"no_model-0", "no_model-1"}
