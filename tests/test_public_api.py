"""Serving, training, adapters and examples use the public objects of the runtime alone."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"seer_client", "seer_rl", "seer_server", "seer_skyrl", "seer_slime", "seer_trl", "seer_verl"}
FRAMEWORKS = {
    "_finish_weight_sync",  # SkyRL's
    "_get_cuda_rng_state",  # Megatron's
    "_async_tool_dicts",  # TRL's
    "_batch_environments",
    "_env_tools",
    "_get_tool_suffix_ids",
    "_last_loaded_step",
    "_sync_tool_dicts",
    "_tool_call_loop",
    "_ROLLOUT_REGISTRY",  # verl's
    "_run_agent_loop",
    "_set_cuda_rng_state",
    "_tokenize_prompts",
}
"""Private names of frameworks, each of which has no public equivalent."""


def private_uses(source):
    """Yield the attributes and imports in ``source`` that reach for what is private to another object."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield ast.unparse(node)
            case ast.ImportFrom(names=names):
                yield from (each.name for each in names if is_private(each.name))


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in FRAMEWORKS


def test_a_package_that_stands_on_the_public_api_reaches_for_nothing_private():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    ours = [
        path
        for path in paths
        if (path.parts[0] == "examples" or PACKAGES & set(path.parts)) and "tests" not in path.parts
    ]
    assert len(ours) > 50
    assert {str(path): found for path in ours if (found := [*private_uses((ROOT / path).read_text())])} == {}
    assert [*private_uses("runtime._fleet.asleep; self.runtime._x.y; self._made")] == [
        "runtime._fleet",
        "self.runtime._x",
    ]
