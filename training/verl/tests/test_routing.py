"""The experts that Seer's engines took, in the field from which verl's trainers replay them.

The engines are SGLang's, in an environment of their own (``make setup-sglang``).
"""

import numpy as np
import pytest
import torch
import transformers
from batches import batch, prompts
from seer_verl.agent_loop import AgentLoopManager
from test_agent_loop import TOOLS, Here

from conftest import Server

ROLLOUT = "actor_rollout_ref.rollout"
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "sglang"
kv_pool = "local"
[rollout]
max_tokens = 99
[engine.sglang]
model = "{model}"
dtype = "float32"
instances = 2
max_model_tokens = 128
max_running = 8
kv_cache_bytes = 8_388_608
engine_args = {{ enable_return_routed_experts = true }}
[plugin.divided_rollout]
chunk_tokens = 4
"""


@pytest.fixture(scope="module")
def mixtures(mixture, tmp_path_factory):
    """Return a server of engines with the mixture."""
    found = Server(tmp_path_factory.mktemp("server"), CONFIG.format(model=mixture))
    yield found
    found.close()


@pytest.fixture(scope="module")
def chosen(mixture):
    """Return a function: the experts that transformers' model chooses for a text, sorted for each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    count = model.config.num_experts_per_tok

    def chosen(text):
        with torch.no_grad():
            logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        return np.stack([layer.topk(count).indices.sort().values.numpy() for layer in logits], axis=1)

    return chosen


LOOPS = {
    "single_turn_agent": (),
    "tool_agent": (
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.format=even",
        f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
        f"{ROLLOUT}.response_length=40",
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_has_the_experts_that_the_model_chooses_for_each_token_that_was_computed(
    configure, mixtures, chosen, loop
):
    replays = f"{ROLLOUT}.enable_rollout_routing_replay=True"
    config = configure(mixtures, replays, *LOOPS[loop], workers=2)
    manager = AgentLoopManager(config)
    manager.agent_loop_workers = [Here(config, manager.llm_client) for _ in range(2)]
    output = manager.generate_sequences(batch(groups=4, step=3))
    tensors = output.batch
    width = tensors["prompts"].shape[1]
    assert tensors["routed_experts"].dtype == torch.int16
    for row, prompt in enumerate(prompts(output)):
        written = 1 + int(tensors["response_mask"][row].nonzero().max())  # a tool's answer may come last
        text = [*prompt, *tensors["responses"][row][:written].tolist()]
        found = tensors["routed_experts"][row].numpy()
        start = width - len(prompt)
        experts = np.sort(found[start : start + len(text) - 1], axis=2)
        assert (experts == chosen(text)[:-1]).all()
        assert not found[:start].any()
        assert not found[start + len(text) :].any()  # the last has some where verl has cut the response


def test_engines_that_answer_no_experts_are_an_error_with_the_remedy(configure, server):
    config = configure(server, f"{ROLLOUT}.enable_rollout_routing_replay=True", workers=1)
    manager = AgentLoopManager(config)
    manager.agent_loop_workers = [Here(config, manager.llm_client)]
    with pytest.raises(RuntimeError, match="enable_return_routed_experts = true"):
        manager.generate_sequences(batch(groups=1, step=1))
