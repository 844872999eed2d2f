"""Batches through verl's own workers and its manager, without Ray, on simulated engines of a server."""

import asyncio
import pickle
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from batches import batch, expected, prompts, responses
from seer_client import ClientError
from seer_client.tokens import token_of
from seer_verl import agent_loop_tq
from seer_verl.agent_loop import AgentLoopManager, AgentLoopWorker
from seer_verl.llm_client import LLMClient
from seer_verl.rows import ROW, BatchRow, reserved_record
from seer_verl.settings import VerlSettings, settings_of
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.workers.rollout.replica import TokenOutput

TOOLS = Path(__file__).with_name("doubling.py")


class Here:
    """A worker in place of Ray's handle of it; its client is pickled, as by Ray."""

    def __init__(self, config, llm_client):
        self.worker = AgentLoopWorker(config, pickle.loads(pickle.dumps(llm_client)))
        self.generate_sequences = self

    async def remote(self, chunk):
        return await self.worker.generate_sequences(pickle.loads(pickle.dumps(chunk)))


@pytest.fixture
def manage(configure, server):
    """Return a function that makes a manager with its workers in this process."""

    def make(*overrides, workers=3, at=server):
        config = configure(at, *overrides, workers=workers)
        manager = AgentLoopManager(config)
        manager.agent_loop_workers = [Here(config, manager.llm_client) for _ in range(workers)]
        return manager

    return make


def test_a_batch_comes_back_padded_and_masked_with_the_librarys_tokens(manage, server):
    manager = manage()
    given = batch(groups=4, step=7)
    output = manager.generate_sequences(given)
    assert len(output) == 12
    assert "seer_row" not in {*given.non_tensor_batch, *output.non_tensor_batch}
    tensors = output.batch
    assert tensors["prompts"].shape == (12, 16)
    assert tensors["responses"].shape == tensors["rollout_log_probs"].shape == (12, 12)
    assert tensors["input_ids"].shape == tensors["position_ids"].shape == (12, 28)
    assert torch.equal(tensors["response_mask"], tensors["attention_mask"][:, 16:])
    lengths = tensors["response_mask"].sum(dim=1)
    assert 1 <= int(lengths.min()) < int(lengths.max()) <= 12
    assert torch.all(tensors["rollout_log_probs"][tensors["response_mask"] == 0] == 0)
    # Three workers have four rows each, so each but the first group is begun by one and ended by another.
    names = [(f"7-{row // 3}", row % 3) for row in range(12)]
    assert responses(output) == expected(server, output, names, iteration=7)
    assert set(output.non_tensor_batch["min_global_steps"]) == {-1}  # no weights have come
    assert "agent_loop/generate_sequences/max" in output.meta_info["timing"]


def test_steps_differ_and_repeat_themselves_under_any_names_of_verls_groups(manage):
    one, two, again = (manage().generate_sequences(batch(groups=2, step=step)) for step in (1, 2, 1))
    assert torch.equal(one.batch["responses"], again.batch["responses"])
    assert not torch.equal(one.batch["responses"], two.batch["responses"])


def test_a_second_batch_of_a_step_counts_on(manage):
    manager = manage()
    one, two = (manager.generate_sequences(batch(groups=2, step=1)) for _ in range(2))
    both = manage().generate_sequences(batch(groups=4, step=1))
    assert torch.equal(torch.cat([one.batch["responses"], two.batch["responses"]]), both.batch["responses"])


def test_validation_fills_up_with_rows_of_its_first_groups(manage, server):
    manager = manage("actor_rollout_ref.rollout.val_kwargs.temperature=1.0", workers=4)
    given = batch(groups=5, step=3, n=2, validate=True)
    padded, size = pad_dataproto_to_divisor(given, 4)
    assert size == 2
    output = manager.generate_sequences(padded)
    names = [(f"val-{row // 2}", row % 2) for row in range(10)] + [("val-0", 2), ("val-0", 3)]
    assert responses(output) == expected(server, output, names, iteration=0)
    later, size = pad_dataproto_to_divisor(batch(groups=5, step=9, n=2, validate=True), 4)
    output, again = (unpad_dataproto(each, size) for each in (output, manager.generate_sequences(later)))
    assert torch.equal(again.batch["responses"], output.batch["responses"])


def test_greedy_rows_are_groups_of_their_own(manage, server):
    sampled, greedy = batch(groups=2, step=1), batch(groups=2, step=1, n=1)
    greedy.non_tensor_batch["uid"] = sampled.non_tensor_batch["uid"][::3]
    sampled.non_tensor_batch["__do_sample__"] = np.ones(6, dtype=bool)
    greedy.non_tensor_batch["__do_sample__"] = np.zeros(2, dtype=bool)
    output = manage(workers=2).generate_sequences(DataProto.concat([sampled, greedy]))
    names = [(f"1-{row // 3}", row % 3) for row in range(6)] + [("1-2", 0), ("1-3", 0)]
    assert responses(output) == expected(server, output, names, iteration=1)


def test_loops_with_tools_write_on_a_row_more_than_once(configure, server):
    client = LLMClient(configure(server))
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    async def talk():
        async with client.connect() as other, other.reserve([{"group_id": "5-0", "n": 1}], iteration=5):
            ROW.set(BatchRow("5-0", 0, 5))
            first = await client.generate("a", prompt_ids=[7, 8], sampling_params=sampling)
            ids = [7, 8, *first.token_ids, 9]
            return first, await client.generate("a", prompt_ids=ids, sampling_params=sampling)

    first, second = asyncio.run(talk())
    assert isinstance(first, TokenOutput)
    assert first.stop_reason == second.stop_reason == "completed"
    records = [
        {"group_id": "5-0", "prompt_token_ids": [7, 8], "n": 1, "max_tokens": 12},
        {"group_id": "5-0-0-1", "prompt_token_ids": [7, 8, *first.token_ids, 9], "n": 1, "max_tokens": 12},
    ]
    found = server.library(records, 5)
    for turn, name in ((first, "5-0"), (second, "5-0-0-1")):
        token_ids, logprobs = found[name, 0]
        assert (turn.token_ids, turn.log_probs) == (token_ids, pytest.approx(logprobs))


def test_verls_loop_with_tools_writes_turns_that_are_the_librarys(manage, server):
    rollout = "actor_rollout_ref.rollout"
    manager = manage(
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"{rollout}.multi_turn.format=even",
        f"{rollout}.multi_turn.function_tool_path={TOOLS}",
        f"{rollout}.response_length=40",
    )
    output = manager.generate_sequences(batch(groups=4, step=7))
    records, found = [], {}
    masks = output.batch["attention_mask"][:, 16:].bool()
    for row, prompt in enumerate(prompts(output)):
        tokens = output.batch["responses"][row][masks[row]].tolist()
        written = output.batch["response_mask"][row][masks[row]].tolist()
        logprobs = output.batch["rollout_log_probs"][row][masks[row]].tolist()
        assert {value for value, bit in zip(logprobs, written, strict=True) if not bit} <= {0.0}
        for number, (begin, end) in enumerate(turns_of(written)):
            name, index = (
                (f"7-{row // 3}", row % 3) if number == 0 else (f"7-{row // 3}-{row % 3}-{number}", 0)
            )
            found[name, index] = tokens[begin:end], pytest.approx(logprobs[begin:end])
            context = [*prompt, *tokens[:begin]]
            most = min(40, 56 - len(context))
            if index == 0:
                n = 3 if number == 0 else 1
                record = {"group_id": name, "prompt_token_ids": context, "n": n, "max_tokens": most}
                records.append({**record, "family": f"7-{row // 3}"})  # simulated lengths follow from it
    library = server.library(records, 7)
    assert library.keys() == found.keys()
    for name, (written, logprobs) in found.items():  # verl cuts a last turn that is too long
        assert written == library[name][0][: len(written)]
        assert logprobs == library[name][1][: len(written)]
    assert len(found) > 12 + 4
    assert set(output.non_tensor_batch["__num_turns__"]) > {2}
    headers = {"Authorization": f"Bearer {token_of(server.url)}"}
    metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
    assert "seer_trajectories 0.0" in metrics  # they end with the batch


def test_rows_are_trajectories_where_their_loop_may_add_turns():
    assert reserved_record("5-0", 2, "single_turn_agent") == {"group_id": "5-0", "n": 2}
    assert BatchRow("5-0", 1, 5, "single_turn_agent", 3).next_turn() == {"group_id": "5-0-1-3", "n": 1}
    trajectories = {"family": "5-0", "trajectories": ["5-0-0", "5-0-1"]}
    assert reserved_record("5-0", 2, "tool_agent") == {"group_id": "5-0", "n": 2, **trajectories}
    turn = {"group_id": "5-0-1-3", "n": 1, "family": "5-0", "trajectories": ["5-0-1"]}
    assert BatchRow("5-0", 1, 5, "tool_agent", 3).next_turn() == turn


def turns_of(written):
    """Return where the turns of a row begin and end, of the mask of the tokens that the model wrote."""
    edges = [
        place for place in range(len(written) + 1) if [0, *written, 0][place] != [0, *written, 0][place + 1]
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.rollout.name=trtllm", "verl's own vllm and sglang"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", "set it to naive"),
        ("actor_rollout_ref.rollout.temperature=0.6", "sample at 1, 1 and -1"),
        ("actor_rollout_ref.rollout.engine_kwargs.seer.uri=a", "uri is unknown"),
        ("actor_rollout_ref.rollout.engine_kwargs.seer.url=localhost", "write one like"),
        ("actor_rollout_ref.rollout.engine_kwargs.seer.prompt_wait_s=-1", "0 or more"),
    ],
)
def test_what_seer_cannot_give_is_an_error_at_the_start(configure, server, override, words):
    with pytest.raises(ValueError, match=words):
        AgentLoopManager(configure(server, override))


def test_newer_trainers_have_to_be_synchronous(configure, server):
    with pytest.raises(ValueError, match="set it to sync"):
        agent_loop_tq.AgentLoopManager(configure(server, "trainer.v1.trainer_mode=colocate_async", v1=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"video_data": [1]}, "leave videos and audio out"),
        ({"image_data": [1], "mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs changes"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_a_request_for_something_else_is_refused(configure, server, arguments, words):
    client = LLMClient(configure(server))
    ROW.set(BatchRow("1-0", 0, 1))
    with pytest.raises(ValueError, match=words):
        asyncio.run(client.generate("a", **{"prompt_ids": [1], "sampling_params": {}} | arguments))


def test_sampling_controls_are_sent_as_they_are(configure, server):
    controls = {"repetition_penalty": 1.1, "stop": ["</a>"], "stop_token_ids": [3], "min_p": 0.1}
    found = LLMClient(configure(server)).sampling({**controls, "top_k": -1, "logprobs": True}, 4)
    assert found == {**controls, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_a_request_outside_of_the_managers_workers_is_refused(configure, server):
    ROW.set(None)
    with pytest.raises(ValueError, match="agent_loop_manager_class"):
        asyncio.run(LLMClient(configure(server)).generate("a", prompt_ids=[1], sampling_params={}))


def test_a_server_that_dies_is_one_error(manage, fresh_server):
    manager = manage("actor_rollout_ref.rollout.engine_kwargs.seer.patience_s=1", at=fresh_server)
    manager.generate_sequences(batch(groups=1, step=1))
    fresh_server.process.kill()
    fresh_server.process.wait(60)
    with pytest.raises(ClientError):
        manager.generate_sequences(batch(groups=1, step=2))


def test_the_token_is_read_where_it_is_needed(tmp_path, configure, server):
    path = tmp_path / "token"
    override = f"actor_rollout_ref.rollout.engine_kwargs.seer.token_file={path}"
    found = settings_of(configure(server, override).actor_rollout_ref.rollout)
    with pytest.raises(ValueError, match="cannot read"):
        _ = found.token
    path.write_text("a-token-of-16-ASCII\n")
    assert found.token == "a-token-of-16-ASCII"
    assert VerlSettings().token is None
    assert [
        VerlSettings(url=f"http://{host}:1").is_local for host in ("localhost", "[::1]", "a.example")
    ] == [
        True,
        True,
        False,
    ]
