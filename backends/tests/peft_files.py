"""Adapters as PEFT saves them, random ones, and the models that they are merged with."""

import json

import numpy as np
from seer_host.weight_copies import adapter_config_of

from seer_core.ports.weights import directory

RANK = 4
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "bias": "none",
}


def adapter_of(model, seed, rank=RANK, gain=0.3):
    """Return the tensors of a random adapter of a model, by PEFT's names."""
    from safetensors.numpy import load_file

    random, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in CONFIG["target_modules"]:
            outputs, inputs = weight.shape
            a, b = random.normal(size=(rank, inputs)), random.normal(size=(outputs, rank))
            tensors[f"base_model.model.{module}.lora_A.weight"] = (a / inputs**0.5).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = (b * gain).astype(np.float32)
    return tensors


def save(path, tensors, config=CONFIG):
    """Write an adapter as PEFT does, and return its spec as the runtime makes it."""
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config))
    return spec_of(path)


def spec_of(path):
    return directory(path, adapter_config=adapter_config_of(path))


def merged(path, model, tensors):
    """Write a model with an adapter added to its weights, as an engine adds it."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    for name in weights:
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in tensors:
            a, b = (torch.from_numpy(tensors[f"{key}{factor}.weight"]) for factor in "AB")
            weights[name] = weights[name] + CONFIG["lora_alpha"] / CONFIG["r"] * (b @ a)
    path.mkdir()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return directory(path)
