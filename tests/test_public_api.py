"""Serving, training, adapters and examples use the public objects of the runtime alone."""

import ast
import subprocess
from pathlib import Path

import pytest

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
    """Return the attributes and imports in ``source`` that reach for what is private to another object."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(ast.unparse(node))
            case ast.ImportFrom(names=names):
                found += [each.name for each in names if is_private(each.name)]
    return found


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in FRAMEWORKS


def files():
    """Return the Python files of these packages and of the examples, without their tests."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = map(Path, listed.stdout.splitlines())
    return [
        path
        for path in paths
        if (path.parts[0] == "examples" or PACKAGES & set(path.parts)) and "tests" not in path.parts
    ]


@pytest.mark.parametrize("path", files(), ids=str)
def test_a_package_that_stands_on_the_public_api_reaches_for_nothing_private(path):
    assert private_uses((ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("runtime._fleet.asleep", ["runtime._fleet"]),
        ("self.runtime._controller.rollout", ["self.runtime._controller"]),
        ("rollout._transcripts = ()", ["rollout._transcripts"]),
        ("from seer_core.runtime.fleet import _start", ["_start"]),
        ("self._rollout, cls._made, type(self).__name__", []),
        ("trainer._tokenize_prompts(prompts)", []),
    ],
)
def test_attribute_chains_through_private_objects_are_found(source, found):
    assert private_uses(source) == found
