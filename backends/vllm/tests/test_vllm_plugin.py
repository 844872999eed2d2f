"""Settings, and what the plug-in makes of them without touching vLLM."""

import json
import subprocess
import sys

import msgspec
import pytest
from seer_host.config_files import RolloutTable
from seer_session.prompts import read_prompts
from seer_vllm.doctor import installation, on_cpu
from seer_vllm.plugin import (
    Settings,
    engine_args,
    seer_doctor,
    vllm_environment,
)
from seer_worker.client.fleet import read_model_info
from seer_worker.tokenizer import ModelTokenizer

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.engine import EngineFleet, InstanceClient, ModelInfo, Tokenizer


def settings(**fields):
    return msgspec.convert({"model": "m", **fields}, Settings)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"instances": 0}, r"`int` >= 1 - at `\$.instances`"),
        ({"kv_cache_bytes": 17}, r"at `\$.kv_cache_bytes`"),
        ({"dtype": "int8"}, r"at `\$.dtype`"),
        ({"start_timeout_s": 0}, r"at `\$.start_timeout_s`"),
        ({"max_runing": 3}, "max_runing"),
        ({"threads": "two"}, r"at `\$.threads`"),
    ],
)
def test_a_wrong_setting_is_named(fields, complaint):
    with pytest.raises(msgspec.ValidationError, match=complaint):
        settings(**fields)


def test_the_model_is_described_from_its_config(models):
    assert read_model_info(models[0], 0, "engine.vllm", 2.0) == ModelInfo(
        vocab_size=128, max_model_tokens=8192, max_temperature=2.0
    )
    assert read_model_info(models[0], 512, "engine.vllm").max_model_tokens == 512


def test_a_missing_model_is_a_config_error_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.vllm.model: .*config.json cannot be read"):
        read_model_info(tmp_path, 0, "engine.vllm")


def test_a_model_that_does_not_say_its_vocabulary_is_a_config_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 5}))
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        read_model_info(tmp_path, 0, "engine.vllm")


def test_more_tokens_than_the_model_takes_is_a_config_error(models):
    with pytest.raises(ConfigError, match=r"max_model_tokens = 9000, but the model .* takes 8192"):
        read_model_info(models[0], 9000, "engine.vllm")


def test_engine_args_pass_through_but_not_over_what_settings_decide(tmp_path):
    arguments = engine_args(settings(engine_args={"swap_space": 0}, tensor_parallel=2), tmp_path)
    assert arguments["swap_space"] == 0
    assert arguments["distributed_executor_backend"] == "mp"
    assert "max_model_len" not in arguments
    with pytest.raises(ConfigError, match=r"engine_args.max_model_len cannot be set: write max_model_tokens"):
        engine_args(settings(engine_args={"max_model_len": 5}), tmp_path)
    with pytest.raises(ConfigError, match=r"speculative_config cannot be set: enable a drafter in \[seer\]"):
        engine_args(settings(engine_args={"speculative_config": {"method": "ngram"}}), tmp_path)


def test_slots_follow_from_kv_unless_they_are_set(tmp_path):
    config = {
        "dtype": "float32",
        "head_dim": 64,
        "hidden_size": 64,
        "max_position_embeddings": 1024,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kv = 100 * 1024 * 1024  # contexts of the longest one, each token of 1 KiB

    def slots(**fields):
        return engine_args(settings(kv_cache_bytes=kv, **fields), tmp_path)["max_num_seqs"]

    assert slots() == 8 * 100
    assert slots(max_batched_tokens=512) == 512  # a step computes one token of each
    assert slots(max_running=3) == 3


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("pipeline_parallel_size", "write tensor_parallel"),
        ("decode_context_parallel_size", "write tensor_parallel"),
        ("prefill_context_parallel_size", "write tensor_parallel"),
        ("nnodes", "write tensor_parallel"),
        ("data_parallel_size", "write instances"),
        ("enable_eplb", "vLLM loads new weights of experts to where these were at the start"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_with_the_setting_to_use(tmp_path, argument, remedy):
    with pytest.raises(ConfigError, match=rf"engine_args.{argument} cannot be set: .*{remedy}"):
        engine_args(settings(engine_args={argument: 2}), tmp_path)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logprobs_mode", "processed_logprobs"),
        ("logits_processors", ["mine:Processor"]),
        ("override_generation_config", {"eos_token_id": [5]}),
    ],
)
def test_arguments_that_keyed_sampling_would_not_heed_are_refused(tmp_path, argument, value):
    with pytest.raises(ConfigError, match=f"engine_args.{argument} cannot be set"):
        engine_args(settings(engine_args={argument: value}), tmp_path)


def test_experts_are_asked_for_by_one_argument(tmp_path):
    asked = {"enable_return_routed_experts": True}
    assert engine_args(settings(engine_args=asked), tmp_path).items() >= asked.items()
    with pytest.raises(ConfigError, match=r"aux_output_config cannot be set: write enable_return_routed_exp"):
        engine_args(settings(engine_args={"aux_output_config": asked}), tmp_path)


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_are_compiled_where_the_settings_ask_for_them(tmp_path, eager):
    assert engine_args(settings(enforce_eager=eager), tmp_path)["enforce_eager"] is eager
    assert "enforce_eager" not in engine_args(settings(), tmp_path)  # the worker's platform decides


def test_a_worker_sees_its_own_devices_and_threads_only():
    environment = vllm_environment({"PATH": "p", "VLLM_CPU_KVCACHE_SPACE": "4"}, 3, ["2", "3"])
    assert environment["PATH"] == "p"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (environment["OMP_NUM_THREADS"], environment["NUMBA_NUM_THREADS"]) == ("3", "3")
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_ranks_on_a_cpu_are_bound_to_no_cpu_unless_the_user_binds_them():
    assert vllm_environment({}, 1, ())["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    bound = vllm_environment({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, 1, ())
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.mark.parametrize(("runner", "variable"), [("auto", None), ("first", "0"), ("second", "1")])
def test_the_setting_alone_decides_on_the_model_runner(runner, variable):
    environment = vllm_environment({"VLLM_USE_V2_MODEL_RUNNER": "1"}, 1, (), runner)
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == variable


def test_the_pool_satisfies_the_ports(make_fleet, models):
    pool = make_fleet(models[0], instances=2)
    assert isinstance(pool, EngineFleet)
    assert [engine.id for engine in pool.engines] == ["vllm-0", "vllm-1"]
    assert all(isinstance(engine, InstanceClient) for engine in pool.engines)
    assert isinstance(pool.tokenizer, Tokenizer)


def test_each_instance_is_launched_with_its_labels(make_fleet, models):
    fleet = make_fleet(models[0], instances=2, labels=[{"gpu": "h100"}, {"gpu": "a100"}])
    assert [engine._labels for engine in fleet.engines] == [{"gpu": "h100"}, {"gpu": "a100"}]
    with pytest.raises(ConfigError, match="lists 1 tables for 2 instances"):
        make_fleet(models[0], instances=2, labels=[{"gpu": "h100"}])


def test_the_tokenizer_reads_text_and_chats(make_fleet, models):
    tokenizer = make_fleet(models[0]).tokenizer
    assert tokenizer.encode("w5 w6") == [5, 6]
    assert tokenizer.encode_chat([{"role": "user", "content": "w5 w6"}]) == [1, 5, 6]
    assert tokenizer.decode([5, 6, 2]) == "w5 w6"


def test_the_doctor_names_what_is_missing_and_the_remedy(models, tmp_path):
    startup = Startup(seed=0, base_dir=tmp_path)
    checks = seer_doctor(settings(model=str(models[0]), instances=9999, kv_cache_bytes=1 << 50), startup)
    assert [check.finding for check in checks if "no config.json" in check.finding] == []
    bad = {check.remedy for check in checks if not check.ok}
    assert {"lower kv_cache_bytes or instances"} < bad
    assert [check.remedy[:35] for check in checks if "slots" in check.finding] == [
        "raise [engine.vllm].max_running to "
    ]
    [missing] = [check for check in seer_doctor(settings(), startup) if "config.json" in check.finding]
    assert (missing.ok, "set [engine.vllm].model" in missing.remedy) == (False, True)


def test_the_doctor_counts_threads_and_kv_on_every_device(models, tmp_path):
    spread = settings(model=str(models[0]), instances=2, threads=3, tensor_parallel=4, kv_cache_bytes=1 << 30)
    findings = [check.finding for check in seer_doctor(spread, Startup(seed=0, base_dir=tmp_path))]
    assert any(finding.startswith("2 instances of 4 x 3 threads on ") for finding in findings)
    assert any(finding.startswith("KV caches of 8.00 GiB in ") for finding in findings)


@pytest.mark.parametrize("name", ["torchaudio", "torchcodec", "torchvision"])
def test_the_doctor_finds_a_library_that_is_not_built_for_the_torch_beside_it(name, monkeypatch):
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", name: "0.17.0"}
    monkeypatch.setattr("seer_vllm.doctor._version", versions.get)
    monkeypatch.setattr("seer_vllm.doctor._mended", lambda _: False)  # as it comes from the index
    [flaw] = [check for check in installation() if not check.ok]
    assert flaw.finding.startswith(f"{name} 0.17.0 is not built for the CPU build of torch")
    assert flaw.remedy.endswith(f"pip uninstall {name}")
    versions[name] += "+stub"
    assert all(check.ok for check in installation())


def test_the_doctor_looks_for_the_interpreter_of_another_environment(models, tmp_path):
    startup = Startup(0, tmp_path)
    [found, *_] = seer_doctor(settings(model=str(models[0]), python=sys.executable), startup)
    assert (found.ok, found.finding) == (True, f"workers run under {sys.executable}")
    [missing, *_] = seer_doctor(settings(model=str(models[0]), python="bin/python"), startup)
    assert (missing.ok, missing.remedy) == (False, "correct [engine.vllm].python")


def test_neither_vllm_nor_torch_is_imported_beside_the_scheduler(models):
    script = f"""
import sys, pathlib
from seer_core.plugins.hookspecs import Startup
from seer_vllm.plugin import Settings, seer_doctor, seer_make_engines
seer_doctor(None, None)
settings = Settings(model={str(models[0])!r}, fork_server=False)
pool = seer_make_engines(settings, Startup(seed=0, base_dir=pathlib.Path()), None)
pool.tokenizer.encode_chat([{{"role": "user", "content": "w5"}}])
print({{"torch", "vllm", "transformers"}} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


HUB_NAME = "Qwen/Qwen3-0.6B"


def test_a_hub_name_is_refused_since_nothing_is_downloaded(tmp_path):
    with pytest.raises(ConfigError, match=r"is no directory; give a directory .* nothing is downloaded"):
        read_model_info(tmp_path / HUB_NAME, 0, "engine.vllm")


@pytest.mark.parametrize(
    ("raw", "fact"),
    [
        (b"[]", "expected `object`, got `array`"),
        (b'{"vocab_size": "x", "max_position_embeddings": 5}', "vocab_size: expected `int"),
        (b'{"vocab_size": 0, "max_position_embeddings": 5}', "vocab_size: expected `int` >= 1"),
        (b'{"vocab_size": "\xff"}', "vocab_size"),
        (b"version https://git-lfs/spec/v1", "git-lfs pointer"),
        (b"", "it is empty"),
    ],
    ids=range(6),
)
def test_a_config_json_that_is_none_is_a_config_error_with_its_remedy(tmp_path, raw, fact):
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"is no model's configuration: .*; give a directory") as caught:
        read_model_info(tmp_path, 0, "engine.vllm")
    assert fact in str(caught.value)


@pytest.fixture
def copied(models, tmp_path):
    """A copy of a model's small files, to be broken, and a function that reads a chat with it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((models[0] / name).read_bytes())

    def chat():
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "w5"}]}))
        tokenizer = ModelTokenizer(tmp_path)
        return read_prompts(prompts, RolloutTable(max_tokens=5), ModelInfo(128, 512), tokenizer).groups

    assert len(chat()) == 1
    return tmp_path, chat


@pytest.mark.parametrize(
    ("name", "raw", "fact"),
    [
        (
            "tokenizer.json",
            b"version https://git-lfs/spec/v1\noid sha256:0",
            "no tokenizer: it is a git-lfs pointer",
        ),
        ("tokenizer.json", b"{}", "tokenizer.json is no tokenizer: "),
        ("tokenizer.json", b"\xff", "tokenizer.json is no tokenizer: "),
        ("tokenizer_config.json", b"[1]", "is no tokenizer's configuration: expected `object`, got `array`"),
        ("tokenizer_config.json", b'{"chat_template": "{% for"}', "its chat template is broken: "),
        (
            "chat_template.jinja",
            b"\xff",
            "chat_template.jinja is no chat template: byte 0xff at 0 is not UTF-8",
        ),
        ("chat_template.jinja", b"{{ a", "its chat template is broken: "),
    ],
    ids=range(7),
)
def test_a_broken_tokenizer_is_named_as_a_file_and_not_as_a_refused_chat(copied, name, raw, fact):
    directory, chat = copied
    (directory / name).write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        chat()
    assert fact in str(caught.value)
    assert str(caught.value).endswith("; copy the model's files anew")
    assert "refused" not in str(caught.value)


def test_on_a_cpu_the_doctor_asks_for_kv_cache_bytes(models, tmp_path):
    startup = Startup(seed=0, base_dir=tmp_path)
    without = [check for check in seer_doctor(settings(model=str(models[0])), startup) if not check.ok]
    given = seer_doctor(settings(model=str(models[0]), kv_cache_bytes=1 << 25), startup)
    assert [check.finding for check in without if "kv_cache_bytes" in check.finding] == (
        ["no kv_cache_bytes, and vLLM is built for CPUs"] if on_cpu() else []
    )
    assert [check for check in given if "no kv_cache_bytes" in check.finding] == []


@pytest.mark.parametrize("runner", ["auto", "first", "second"])
def test_on_a_cpu_the_doctor_refuses_the_second_model_runner_alone(models, tmp_path, runner):
    startup = Startup(seed=0, base_dir=tmp_path)
    checks = seer_doctor(settings(model=str(models[0]), kv_cache_bytes=1 << 25, runner=runner), startup)
    found = [check.remedy for check in checks if "runner" in check.finding]
    assert found == (['set [engine.vllm].runner = "auto"'] if runner == "second" and on_cpu() else [])


@pytest.mark.parametrize("key", ["tensor_parallel", "instances", "threads"])
def test_counts_that_would_hang_the_start_are_refused(key):
    with pytest.raises(msgspec.ValidationError, match=rf"`int` <= .*{key}"):
        settings(**{key: 10**12})
