"""docs/guides/cluster.md: its config is one that a run takes, but for the model."""

import re
from pathlib import Path

from seer_core.plugins.config import load_config
from seer_core.plugins.loading import assemble

ROOT = Path(__file__).parents[1]


def test_the_config_of_the_page_makes_instances_on_a_cluster(tmp_path):
    config, given, elastic = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "docs/guides/cluster.md").read_text(), re.M | re.S
    )
    file = tmp_path / "cluster.toml"
    file.write_text(config)
    model = f"engine.vllm.model={ROOT / 'examples/tiny_reasoner/weights'}"
    lines = re.findall(r"^placement_groups = .*$", given, re.M)
    lines += re.findall(r"^min_instances = \d+$", elastic, re.M)
    assert len(lines) == 2
    overrides = [model, "engine.vllm.max_model_tokens=1024", *(f"launcher.ray.{line}" for line in lines)]
    assembly = assemble(load_config(file, overrides))
    assert assembly.launcher.owner == "ray"
    assert len(assembly.fleet.engines) == 8
