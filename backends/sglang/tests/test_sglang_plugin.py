"""Settings, and what the plug-in makes of them without touching SGLang."""

import subprocess
import sys

import msgspec
import pytest
import torch
from seer_sglang import doctor, internals, plugin
from seer_sglang.instance import SglangAdapter, _blaming_settings, _check_layers
from seer_sglang.plugin import Settings, engine_args, seer_doctor
from seer_worker.machine import memory_bytes
from seer_worker.wire import Start

from seer_core.errors import ConfigError, EngineError
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.drafting import SourceSpec
from seer_core.ports.engine import EngineFleet, InstanceClient


def settings(**fields):
    return msgspec.convert({"model": "m", **fields}, Settings)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"instances": 0}, r"`int` >= 1 - at `\$.instances`"),
        ({"kv_cache_bytes": 17}, r"at `\$.kv_cache_bytes`"),
        ({"dtype": "int8"}, r"at `\$.dtype`"),
        ({"tensor_parallel": 0}, r"`int` >= 1 - at `\$.tensor_parallel`"),
        ({"tensor_parallel": 10**12}, r"`int` <= 128 - at `\$.tensor_parallel`"),
    ],
)
def test_a_wrong_setting_is_named(fields, complaint):
    with pytest.raises(msgspec.ValidationError, match=complaint):
        settings(**fields)


def test_arguments_are_sglangs_own(tmp_path):
    arguments = engine_args(
        settings(kv_cache_bytes=1 << 20, max_model_tokens=100, engine_args={"schedule_policy": "lpm"}),
        tmp_path,
    )
    assert arguments["model_path"] == str(tmp_path)
    assert (arguments["context_length"], arguments["kv_cache_bytes"]) == (100, 1 << 20)
    assert arguments["schedule_policy"] == "lpm"
    assert "chunked_prefill_size" not in arguments
    assert engine_args(settings(max_batched_tokens=64), tmp_path)["chunked_prefill_size"] == 64


def test_the_devices_of_an_instance_are_one_argument_and_its_share(models, monkeypatch, tmp_path):
    assert engine_args(settings(), tmp_path)["tp_size"] == 1
    assert engine_args(settings(tensor_parallel=2), tmp_path)["tp_size"] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    two = settings(model=str(models[0]), python=sys.executable, instances=2, tensor_parallel=2)
    fleet = plugin.seer_make_engines(two, Startup(seed=0, base_dir=tmp_path), None)
    shares = [each.spec.environment["CUDA_VISIBLE_DEVICES"] for each in fleet.engines]
    assert shares == ["4,5", "6,7"]
    three = msgspec.structs.replace(two, instances=3)
    with pytest.raises(ConfigError, match=r"3 instances of 2 devices need 6, visible are 4; .*parallel"):
        plugin.seer_make_engines(three, Startup(seed=0, base_dir=tmp_path), None)


@pytest.mark.parametrize("name", plugin.OWN_ENGINE_ARGS)
def test_an_argument_that_is_decided_elsewhere_is_refused_with_the_reason(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"engine\.sglang\.engine_args\.{name} cannot be set: \w+"):
        engine_args(settings(engine_args={name: 1}), tmp_path)


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_are_compiled_where_the_settings_ask_for_them(tmp_path, eager):
    assert engine_args(settings(enforce_eager=eager), tmp_path)["disable_cuda_graph"] is eager
    assert "disable_cuda_graph" not in engine_args(settings(), tmp_path)  # the worker's platform decides


def test_a_step_prefills_whole_blocks(tmp_path):
    engine_args(settings(block_size=16, max_batched_tokens=160), tmp_path)
    with pytest.raises(
        ConfigError, match="max_batched_tokens = 100 is no multiple of block_size = 16; a step"
    ):
        engine_args(settings(block_size=16, max_batched_tokens=100), tmp_path)


def test_drafts_are_refused_where_a_block_has_several_tokens(tmp_path):
    arguments = engine_args(settings(block_size=16), tmp_path)
    start = Start(plugin.INSTANCE, "0", arguments, str(tmp_path), SourceSpec("nowhere:Nothing", {}, 3))
    with pytest.raises(
        EngineError, match=r"a drafter needs block_size = 1 in \[engine\.sglang\]: set it, or"
    ):
        SglangAdapter(start)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "without kv_cache_bytes SGLang would take nearly all memory; set it"),
        ({"kv_cache_bytes": 1 << 60}, r"kv_cache_bytes is .* GiB, and the machine has .* GiB of memory; low"),
        (
            {"kv_cache_bytes": memory_bytes() * 3 // 4, "tensor_parallel": 2},
            r"GiB for each of 2 ranks, and the",
        ),
    ],
)
def test_kv_memory_that_a_machine_without_a_gpu_has_not_is_refused(tmp_path, monkeypatch, fields, complaint):
    monkeypatch.setattr(internals, "check_kernels", lambda: True)
    with pytest.raises(EngineError, match=complaint):
        SglangAdapter(Start(plugin.INSTANCE, "0", engine_args(settings(**fields), tmp_path), str(tmp_path)))


LATENT = {"kv_lora_rank": 512, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default"}}
DELTA_NET = {"linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LATENT, r"latent attention \(MLA\) whose places are not scaled by yarn"),
        (DELTA_NET, "gated delta nets"),
        ({"text_config": DELTA_NET}, "gated delta nets"),
        ({"layers_block_type": ["mamba", "attention"]}, "Mamba-2"),
        ({"mamba_d_ssm": 128, "num_hidden_layers": 2}, "Mamba-2"),
        ({"model_type": "gpt_oss", "num_hidden_layers": 2}, "attention sinks"),
    ],
)
def test_layers_without_kernels_on_a_machine_without_a_gpu_are_refused_by_name(
    tmp_path, monkeypatch, config, names
):
    monkeypatch.setattr(internals, "check_kernels", lambda: True)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    arguments = engine_args(settings(kv_cache_bytes=1 << 20), tmp_path)
    with pytest.raises(EngineError, match=f"SGLang without a GPU has no kernels for {names}: serve the mo"):
        SglangAdapter(Start(plugin.INSTANCE, "0", arguments, str(tmp_path)))


@pytest.mark.parametrize("part", ["text_config", None])
def test_latent_attention_whose_places_yarn_scales_is_left_to_sglang_also_within_another_model(
    tmp_path, part
):
    scaled = LATENT | {"rope_parameters": {"rope_type": "yarn"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(scaled if part is None else {part: scaled}))
    _check_layers(tmp_path / "config.json")


def test_layers_of_unlike_heads_are_named_in_place_of_what_transformers_says_of_them():
    unlike = type("AmbiguousGlobalPerLayerAttributeError", (Exception,), {})
    with (
        pytest.raises(EngineError, match=r"heads have different widths: serve the model by \[engine\.vllm\]"),
        _blaming_settings(),
    ):
        raise unlike("'head_dim' is a per-layer attribute")


def test_what_sglang_refuses_is_one_sentence_with_the_remedy():
    with pytest.raises(EngineError) as caught, _blaming_settings():
        raise ValueError("Model architectures ['Nothing'] are not supported.\nSupported are ...")
    assert str(caught.value) == (
        "SGLang cannot serve the model so: ValueError: Model architectures ['Nothing'] are not supported;"
        " correct model, dtype or engine_args in [engine.sglang]"
    )


def test_a_port_that_was_taken_meanwhile_is_one_sentence_with_the_remedy():
    with (
        pytest.raises(EngineError, match=r"has taken the port .* EADDRINUSE; start again"),
        _blaming_settings(),
    ):
        raise torch.distributed.DistNetworkError("port: 80, name: EADDRINUSE")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place for an environment with SGLang, where there is none yet."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    return tmp_path / ".venv-sglang" / "bin" / "python"


def test_without_an_environment_it_says_how_to_get_one(models, elsewhere):
    with pytest.raises(ConfigError, match=r"SGLang is neither here nor in .*venv-sglang.*make setup-sglang"):
        plugin.seer_make_engines(settings(model=str(models[0])), Startup(0, models[0]), None)
    [check] = seer_doctor(None, None)
    assert not check.ok
    assert check.remedy.startswith("run `make setup-sglang`")


def test_workers_run_under_the_interpreter_beside_this_one(models, elsewhere):
    elsewhere.parent.mkdir(parents=True)
    elsewhere.symlink_to(sys.executable)
    fleet = plugin.seer_make_engines(settings(model=str(models[0]), instances=2), Startup(0, models[0]), None)
    assert isinstance(fleet, EngineFleet)
    assert all(isinstance(engine, InstanceClient) for engine in fleet.engines)
    assert {engine.spec.interpreter for engine in fleet.engines} == {str(elsewhere)}
    named = plugin.seer_make_engines(
        settings(model=str(models[0]), python="env/python"), Startup(0, models[0]), None
    )
    assert named.engines[0].spec.interpreter == str(models[0] / "env" / "python")


def test_a_pool_is_shared(models, elsewhere):
    elsewhere.parent.mkdir(parents=True)
    elsewhere.symlink_to(sys.executable)
    [engine] = plugin.seer_make_engines(settings(model=str(models[0])), Startup(0, models[0]), None).engines
    assert engine.set_kv_pool(object()) is True


@pytest.mark.parametrize(
    ("answer", "finding", "remedy"),
    [
        ("sglang 0.6.0", "SGLang 0.6.0 under", "keyed sampling needs 0.5.23: run `make setup-sglang`"),
        ("sglang -", "SGLang - under", "keyed sampling needs 0.5.23"),
        ("nonsense", "does not answer", "correct [engine.sglang].python"),
    ],
)
def test_the_doctor_looks_into_the_other_environment(tmp_path, answer, finding, remedy):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    [check] = doctor.installation(str(python))
    assert not check.ok
    assert finding in check.finding
    assert check.remedy.startswith(remedy)


def test_the_doctor_compares_settings_with_the_machine(tmp_path):
    settings = Settings(model=str(tmp_path), instances=500, threads=8, kv_cache_bytes=1 << 50)
    *_, model, cpus, memory = seer_doctor(settings, Startup(0, tmp_path))
    assert [check.ok for check in (model, cpus, memory)] == [False, False, False]
    assert "no config.json in" in model.finding
    assert "500 instances of 8 threads" in cpus.finding
    assert memory.remedy == "lower kv_cache_bytes or instances"


def test_the_plug_in_imports_neither_sglang_nor_torch():
    code = "import sys, seer_sglang.plugin; sys.exit(bool({'sglang', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
