"""Real vLLM instances on clusters: the tokens of child processes, with new weights, too."""

import json
from pathlib import Path

import pytest
from seer_host.config_files import load_config
from seer_host.shared_weights import SharedWeights
from seer_session import Session

pytest.importorskip("ray")
EXAMPLE = Path(__file__).parents[3] / "examples/tiny_reasoner"


def some_prompts():
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:3]
    return [json.loads(each) | {"n": 4, "max_tokens": 128} for each in lines]


@pytest.mark.engine
def test_vllm_on_a_cluster_writes_the_tokens_of_child_processes(start_seer, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(each) + "\n" for each in some_prompts()))
    tokens = {}
    for launcher, instances in (("local", 1), ("ray", 2)):
        out = tmp_path / launcher
        arguments = ["run", EXAMPLE / "demo.toml", "--prompts", prompts, "--out", out]
        arguments += ["--set", "seer.kv_pool=none", "--set", f"seer.launcher={launcher}"]
        arguments += ["--set", f"engine.vllm.instances={instances}"]
        _, errors = (process := start_seer(*arguments)).communicate(timeout=300)
        assert process.returncode == 0, errors
        lines = (out / "completions.jsonl").read_text().splitlines()
        tokens[launcher] = {each["request_id"]: each["token_ids"] for each in map(json.loads, lines)}
    assert len(tokens["local"]) == 12
    assert tokens["ray"] == tokens["local"]


@pytest.mark.long
@pytest.mark.engine
def test_vllm_on_machines_writes_with_weights_from_shared_memory_as_child_processes_do(machines):
    from safetensors.torch import load_file
    from weight_updates import deliveries

    tensors = load_file(EXAMPLE / "weights/model.safetensors")
    largest = max(tensors, key=lambda name: tensors[name].numel())
    tensors[largest] = tensors[largest] * 1.25
    records = some_prompts()
    table = [
        f"launcher.ray.{name}='{value}'"
        for name, value in (("address", machines.address), ("host", machines.host))
    ]
    found = []
    for overrides in ([], ["seer.launcher='ray'", *table]):
        config = load_config(EXAMPLE / "demo.toml", ["seer.kv_pool='none'", *overrides])
        with deliveries() as sent, SharedWeights() as shared, Session(config) as session:
            before = session.rollout(records)
            with shared.offer(tensors.items()) as source:
                session.update_weights(source)
            result = session.rollout(records)
        found.append(
            [
                {
                    each.request_id: (each.token_ids.tolist(), each.logprobs.tolist())
                    for each in one.completions
                }
                for one in (before, result)
            ]
        )
        assert len(sent) == len(set(sent)) == (2 if overrides else 0)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
