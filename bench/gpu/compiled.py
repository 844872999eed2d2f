"""The sampler's kernels, compiled for GPUs that need not be there: registers, spills, instructions.

ptxas, ptxas-blackwell and nvdisasm come with Triton's wheel.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.gpu.devices import TARGETS

VOCAB = 151_936
"""The vocabulary of the Qwen models."""
POINTERS = {
    "logits": "*bf16",
    **dict.fromkeys(("masses", "seed_of", "position_of", "chosen_of"), "*i64"),
    **dict.fromkeys(("least_of", "temperature_of", "scores", "peaks", "sums", "logprob_of"), "*fp32"),
    **dict.fromkeys(("tokens", "tallies"), "*i32"),
    "highest_of": "*bf16",
}
KERNELS: dict[str, dict[str, Any]] = {
    "score": {"CUT": False, "MASS": False},
    "score, top-p": {"CUT": False, "MASS": True},
    "score, cut and top-p": {"CUT": True, "MASS": True},
    "join": {"PARTS": 128, "BOUND": False, "MASS": False},
    "join, top-k": {"PARTS": 128, "BOUND": True, "MASS": False},
    "join, top-p": {"PARTS": 128, "BOUND": True, "MASS": True},
    "tally": {},
    "settle": {},
}
"""What kernels are called in tables, and the constants that make each of them."""
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def compiled(name: str, target: str) -> dict[str, Any]:
    """Return registers of a thread, bytes of spills and of shared memory, and counts of instructions.

    ``per_logit`` is instructions of a thread by the logits that it has, with what the program does once.
    ``fused`` counts multiply-adds in PTX, which round once, and of which noise must have none.  In machine
    code a correctly rounded division is made of some.
    """
    import triton
    from seer_worker.sampling import kernels
    from seer_worker.sampling.fused import BLOCK, JOINED, LAUNCH
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernels, name.partition(",")[0])
    wide = KERNELS[name].get("BOUND", False)
    launch = JOINED if wide else LAUNCH
    constants = {"ROWS": 1, "BLOCK": BLOCK * (2 if wide else 1), **KERNELS[name]}
    constants = {key: value for key, value in constants.items() if key in function.arg_names}
    kinds = {**POINTERS, "limit_of": "*fp32" if constants.get("MASS") else "*i32"}
    signature = {
        each: "constexpr" if each in constants else kinds.get(each, "i32") for each in function.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, each in enumerate(function.arg_names)
        if signature[each].startswith("*") or each in ("stride", "vocab")
    }
    source = ASTSource(function, signature, constants, aligned)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        binary = triton.compile(
            source, target=GPUTarget("cuda", TARGETS[target].capability, 32), options=launch
        )
    found = instructions(binary.asm["cubin"], triton.knobs.nvidia.nvdisasm.path)
    logits = constants.get("BLOCK", 0) // (32 * launch["num_warps"])
    return {
        "kernel": name,
        "target": target,
        "registers": int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", log.getvalue()))),
        "shared": binary.metadata.shared,
        "instructions": len(found),
        "per_logit": len(found) / logits if logits else None,
        "fused": len(re.findall(r"\bfma\.", binary.asm["ptx"])),
    }


def instructions(cubin: bytes, nvdisasm: str) -> list[str]:
    """Return the names of a program's instructions, without the padding behind its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True)
    return [each for each in INSTRUCTION.findall(done.stdout) if each != "NOP"]
