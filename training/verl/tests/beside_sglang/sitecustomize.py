"""Puts verl behind the packages of SGLang's environment, whose deterministic inference runs on a CPU then.

Most processes of Ray's import no SGLang, so it is changed as soon as it is imported, and not before.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import site
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
ON_CPU = ROOT / "backends/remote/tests/sglang_on_cpu/sitecustomize.py"
python = f"python{sys.version_info.major}.{sys.version_info.minor}"
site.addsitedir(str(ROOT / ".venv-verl/lib" / python / "site-packages"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Changing(importlib.abc.MetaPathFinder):
    """Changes modules when they are imported."""

    changed = False

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.layers.moe.routed_experts_capturer":  # where verl 0.9.1 looks for it
            moved = importlib.util.find_spec("sglang.srt.state_capturer.routed_experts")
            return importlib.util.spec_from_file_location(name, moved.origin)
        if name == "torchvision":
            import sgl_kernel  # noqa: F401, the stand-in has an operator that torchvision needs
        if name != "sglang.srt.server_args" or self.changed:
            return None
        self.changed = True
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if not hasattr(module.ServerArgs, "__dataclass_fields__"):  # verl 0.9.1 looks for one of them
                module.ServerArgs.__dataclass_fields__ = {}
            if not os.environ.get("SEER_VERL_ON_GPU"):
                runpy.run_path(str(ON_CPU))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changing())
