"""Adapters: what is read of PEFT's files, what is refused, and what merging gives."""

import os

import pytest
from seer_host.weight_copies import WeightCopies, adapter_config_of
from seer_worker.process.adapter import Rejected

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSpec, directory

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from seer_worker.weights import checkpoint  # noqa: E402

MODULE = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{factor}.weight" for factor in "AB")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}


@pytest.fixture
def model(tmp_path):
    """The directory of a model of two tensors, and these."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{MODULE}.weight": torch.randn(8, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator),
    }
    path = tmp_path / "model"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path, tensors


@pytest.fixture
def adapter(tmp_path):
    """Return a function that writes an adapter with some changes; it returns its spec and tensors."""
    import json

    def write(tensors=None, **config):
        generator = torch.Generator().manual_seed(2)
        found = {A: torch.randn(2, 4, generator=generator), B: torch.randn(8, 2, generator=generator)}
        found = {name: each for name, each in (found | (tensors or {})).items() if each is not None}
        path = tmp_path / "adapter"
        path.mkdir(exist_ok=True)
        save_file(found, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
        return directory(path, adapter_config=adapter_config_of(path)), found

    return write


def opened(spec, model, dtype=torch.float32):
    source = checkpoint.open_checked(spec, checkpoint.headers_of(model), (), dtype, directory(model))
    return dict(source.tensors())


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 2}}, 1.0),
        ({"alpha_pattern": {"other": 2}, "target_modules": ".*q_proj"}, 3.0),
        ({"r": 9, "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}}, 3.0),
    ],
)
def test_merging_adds_the_scaled_product_to_its_matrix_and_to_nothing_else(model, adapter, config, scale):
    path, tensors = model
    spec, factors = adapter(**config)
    found = opened(spec, path)
    assert list(found) == sorted(tensors)
    expected = tensors[f"{MODULE}.weight"] + scale * (factors[B] @ factors[A])
    assert torch.equal(found[f"{MODULE}.weight"], expected)
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])


def test_a_sum_is_rounded_once_to_the_dtype_of_the_weights(tmp_path, model, adapter):
    _, tensors = model
    path = tmp_path / "half"
    path.mkdir()
    half = {name: each.to(torch.bfloat16) for name, each in tensors.items()}
    save_file(half, path / "model.safetensors")
    spec, factors = adapter()
    found = opened(spec, path, torch.bfloat16)[f"{MODULE}.weight"]
    expected = half[f"{MODULE}.weight"].to(torch.float32) + 3 * (factors[B] @ factors[A])
    assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("tensors", "config", "fact"),
    [
        ({A: torch.full((2, 4), torch.nan)}, {}, f"tensor '{A}' has values that are no finite numbers"),
        ({B: torch.full((8, 2), -torch.inf)}, {}, f"tensor '{B}' has values that are no finite numbers"),
        (
            {A: torch.full((2, 4), 3e38), B: torch.full((8, 2), 3.0)},
            {},
            f"tensor '{MODULE}.weight' has values",
        ),
        ({B: None}, {}, f"module '{MODULE}' has lora_A and no lora_B; save the whole adapter"),
        ({A: None}, {}, f"module '{MODULE}' has lora_B and no lora_A"),
        ({A: None, B: None}, {}, "no safetensors in"),
        ({}, {"r": 4}, r"the lora_A of .* has the shape \[2, 4\], and its rank is 4 by the adapter's config"),
        ({B: torch.ones(8, 3)}, {}, r"the lora_B of .* has the shape \[8, 3\], and its rank is 2"),
        ({A: torch.ones(2, 5)}, {}, r"multiplies \[8, 5\], the model's \[8, 4\]; it was trained on another"),
        ({B: torch.ones(9, 2)}, {}, r"multiplies \[9, 4\], the model's \[8, 4\]"),
        (
            {A.replace("q_", "x_"): torch.ones(2, 4), B.replace("q_", "x_"): torch.ones(8, 2)},
            {},
            "belongs to module 'model.layers.0.self_attn.x_proj', which the model lacks",
        ),
        ({f"{MODULE}.bias": torch.ones(8)}, {}, f"tensor '{MODULE}.bias' is none of a LoRA adapter's"),
        (
            {},
            {"target_modules": ["q_proj", "v_proj"]},
            "names the target module 'v_proj', of which it has no",
        ),
        ({}, {"peft_type": "IA3"}, "the adapter has PEFT's type IA3, and LORA alone is loaded"),
        ({}, {"r": 0}, "has r = 0, which must be a number above 0"),
        ({}, {"lora_alpha": None}, "has lora_alpha = None"),
        ({}, {"bias": "all"}, "trains biases"),
        ({}, {"use_dora": True}, "sets use_dora, which is not loaded"),
        ({}, {"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    ],
)
def test_an_adapter_that_does_not_belong_to_the_model_is_refused_by_name(
    model, adapter, tensors, config, fact
):
    spec, _ = adapter(tensors, **config)
    with pytest.raises(Rejected, match=fact):
        opened(spec, model[0])


def test_half_an_adapter_is_refused(model, adapter):
    spec, _ = adapter()
    path = f"{spec.directory}/adapter_model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(Rejected, match="its safetensors cannot be read"):
        opened(spec, model[0])


def test_an_adapter_of_quantised_weights_and_one_without_its_base_are_refused(tmp_path, model, adapter):
    spec, _ = adapter()
    path = tmp_path / "quantised"
    path.mkdir()
    save_file({f"{MODULE}.weight": torch.ones(8, 4, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(Rejected, match=f"tensor '{MODULE}.weight' is quantised"):
        opened(spec, path)
    with pytest.raises(Rejected, match="this engine takes no adapters; update it by whole weights"):
        checkpoint.open_checked(spec, checkpoint.headers_of(model[0]), (), torch.float32)
    with pytest.raises(Rejected, match="weight source 'nowhere:Lost' cannot be imported"):
        opened(WeightSpec("nowhere:Lost", {"adapter_config": CONFIG}), model[0])


def test_an_adapter_that_was_written_anew_since_the_update_began_is_refused_with_both_digests(model, adapter):
    old = WeightCopies("none").keep(adapter()[0], 1)
    assert dict(opened(old.kept, model[0]))
    new = WeightCopies("none").keep(adapter({A: torch.ones(2, 4)})[0], 2)
    with pytest.raises(Rejected, match=f"digest is {new.digest}, and was {old.digest}; update once it is"):
        opened(old.kept, model[0])
    adapter({A: torch.ones(2, 4)}, lora_alpha=12)
    with pytest.raises(Rejected, match="has changed since the update began"):
        opened(new.kept, model[0])


def test_an_adapter_that_is_written_anew_once_it_was_checked_is_merged_as_it_was(model, adapter):
    path, tensors = model
    spec, factors = adapter()
    source = checkpoint.open_checked(spec, checkpoint.headers_of(path), (), torch.float32, directory(path))
    with open(f"{spec.directory}/adapter_model.safetensors", "r+b") as file:
        file.truncate(0)
    merged = dict(source.tensors())[f"{MODULE}.weight"]
    assert torch.equal(merged, tensors[f"{MODULE}.weight"] + 3 * (factors[B] @ factors[A]))


def test_the_fingerprint_of_sums_has_every_value_of_the_adapter(model, adapter):
    def fingerprint(tensors=None, **config):
        spec, _ = adapter(tensors, **config)
        headers = checkpoint.headers_of(model[0])
        source = checkpoint.open_checked(spec, headers, (), torch.float32, directory(model[0]))
        return source.joined("recipe:samples")

    first, changed = fingerprint(), torch.ones(2, 4)
    found = {first, fingerprint(lora_alpha=5), fingerprint({A: changed})}
    changed[1, 3] += 1e-6
    found.add(fingerprint({A: changed}))
    assert len(found) == 4
    assert first == fingerprint()
    assert first.startswith("recipe:")


def test_an_adapter_is_not_merged_with_other_whole_weights_than_those_that_were_loaded(model, adapter):
    path, tensors = model
    spec, _ = adapter()
    bases = checkpoint.first_weights(str(path)), WeightCopies("none").keep(directory(path), 1).kept
    sources = [
        checkpoint.open_checked(spec, checkpoint.headers_of(path), (), torch.float32, base) for base in bases
    ]
    assert all(dict(source.tensors()) for source in sources)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path / "model.safetensors")
    os.utime(path / "model.safetensors", ns=(0, 0))  # as if some time had passed
    for base, fact in zip(bases, ("since the engine started on them", "since they were loaded"), strict=True):
        with pytest.raises(Rejected, match=f"have changed {fact}; an adapter would be merged with others"):
            checkpoint.open_checked(spec, checkpoint.headers_of(path), (), torch.float32, base)
    with pytest.raises(EngineError, match="have changed since the engine started"):
        dict(sources[0].tensors())
