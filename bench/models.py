"""Which families of models roll out exactly, and which are refused, and why?

Each family is a tiny model with random weights, which `python -m seer_testing.families` writes. Two instances
write the same responses in several ways: whole, the same in other batches, moved at every chunk without a
pool and with one, moved with drafts, and by other weights, after an update and after one back, beside
instances that were started on these. A model that takes images writes responses to prompts with images in
all these ways. Half of the prompts are greedy. A way is exact if every token is the same. With `--adapters` a
random adapter of the attention's matrices is an update: merged, beside whole weights with it added, and kept
beside the model, whole and moved. Each row names the commits that it was measured at in the stored result.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from seer_host.config_files import Config, make_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime
from seer_testing.families import FAMILIES, VOCABULARY, write_family

from bench.harness import EXAMPLE, ROOT, Row, git, markdown, stored_rows
from bench.placers import AlwaysMigrate
from seer_core.errors import SeerError
from seer_core.model import Completion, Request
from seer_core.ports.policy import Placer, Splitter
from seer_core.scheduling.scheduler import Slot

DEPENDS_ON = ("backends/vllm", "backends/sglang", "backends/worker", "backends/kv_local", "testing")
ROUNDS = 1
PAGE = ROOT / "docs" / "reference" / "models.md"

EXACT = "exact"
WAYS = {
    "whole": "whole, in any batch",
    "moved": "moved without a pool",
    "pooled": "moved with a pool",
    "drafted": "drafts",
    "updated": "weight update",
    "images": "images",
}
ADAPTED = {"merged": "adapter, merged", "beside": "adapter, beside the model"}
"""Ways that ``--adapters`` fills in."""
WITHOUT_EFFECT = "without effect"
RANK, GAIN = 4, 0.3
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
GROUPS, RESPONSES, PROMPT_TOKENS, CHUNKS = 4, 2, 90, 4
LEAST_CHUNK_TOKENS = 32
KV_BYTES = 32 << 20
ENGINES = ("vllm", "sglang")
RUNNERS = ("first", "second")
INTERPRETER = ROOT / "backends" / "vllm" / "tests" / "interpreter"
"""In which vLLM's second runner runs without a device."""
TRAINED = (
    "Llama",
    "Qwen3",
    "Qwen3-MoE",
    "GLM-4-MoE",
    "DeepSeek-V3",
    "Gemma-3",
    "Gemma-4",
    "gpt-oss",
    "Qwen3-Next",
    "Qwen3.5",
    "Qwen3.5-MoE",
    "Nemotron-H",
    "Falcon-H1",
    "Qwen2-VL",
    "Qwen2.5-VL",
    "Qwen3-VL",
)
"""The families that frameworks name most."""
TECHNIQUES = ("divided_rollout", "context_sched")
NOT_STARTED = re.compile(r"^instance .[a-z]+-0. did not start: ")
BATCHES = "On a CPU what vLLM computes of this family depends on the batch."
IMAGE_SIZES = ((60, 80), (200, 100), (90, 90))

Texts = Mapping[str, Completion]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="(default vllm)")
    parser.add_argument(
        "--runner", choices=RUNNERS, default="first", help="of vLLM; the second in Triton's interpreter"
    )
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), help="some families alone")
    parser.add_argument("--adapters", action="store_true", help="updates by adapters alone")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out families, one after the other, on forks of one process; other rows stay as they are stored."""
    rows = {_key(row): row for row in stored_rows(options)}
    if options.runner == "second":
        os.environ |= {"PYTHONPATH": str(INTERPRETER), "TRITON_INTERPRET": "1"}
    for name in options.only or TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            family = FamilyRun(options.engine, name, Path(folder), options.set, options.runner)
            commit = git("rev-parse", "--short=9", "HEAD")
            before = rows.get(_key(family.found), {})
            if options.adapters:
                row = family.found | before | asyncio.run(family.adapted(Path(folder)))
                row["adapters_at"] = commit
            else:
                kept = {each: before[each] for each in (*ADAPTED, "adapters_at") if each in before}
                row = asyncio.run(family.row()) | kept | {"commit": commit}
        rows[_key(row)] = row
        print({key: value for key, value in row.items() if value}, file=sys.stderr, flush=True)
    return sorted(rows.values(), key=_key)


def _key(row: Row) -> tuple[int, int, int]:
    """Return the place of a row."""
    runner = row.get("runner", RUNNERS[0])
    return ENGINES.index(row["engine"]), RUNNERS.index(runner), list(FAMILIES).index(row["family"])


class FamilyRun:
    """A family on two instances of an engine."""

    def __init__(
        self, engine: str, name: str, folder: Path, overrides: Sequence[str] = (), runner: str = "first"
    ) -> None:
        self.engine, self.runner, self.name, self.overrides = engine, runner, name, overrides
        tokenizer = EXAMPLE / "weights"
        self.models = [write_family(folder / f"{seed}", name, seed, tokenizer) for seed in (1, 2)]
        self.block_tokens = 0
        self.seen: Texts | None = None
        """Responses to images, written whole."""
        self.found: Row = {"engine": self.engine, "family": name, **dict.fromkeys(WAYS, "")}
        if self.engine == "vllm":
            self.found["runner"] = self.runner

    async def row(self) -> Row:
        """Return what became of each way, and figures of the moves."""
        found = self.found
        try:
            expected = await self.without_a_pool()
        except SeerError as error:
            found["whole"] = reason(error)
            return found
        for way, plugins in (("pooled", TECHNIQUES), ("drafted", (*TECHNIQUES, "grouped_spec"))):
            pool = "none" if way == "drafted" and found["pooled"] != EXACT else "local"
            try:
                async with self.started(pool, plugins) as runtime:
                    texts = await self.written(runtime, plugins)
                    found[way] = compared(expected, texts)
                    if self.seen is not None:
                        self.look(way, self.seen, await self.written(runtime, plugins, self.pictured()))
                found |= moves(texts) if way == "pooled" else drafts(texts)
            except SeerError as error:
                found[way] = reason(error)
        return found

    async def adapted(self, folder: Path) -> Row:
        """Return what becomes of an update by an adapter, merged and kept beside the model."""
        shutil.copytree(self.models[0], folder / "whole")
        adapter, whole = write_adapter(folder, self.models[0])
        found: Row = {}
        try:
            async with self.started("none", ()) as runtime:
                [info, *_] = runtime.alive.values()
                self.block_tokens = max(info.block_tokens, LEAST_CHUNK_TOKENS)
                before = await self.written(runtime)
                await runtime.update_weights(adapter)
                merged = await self.written(runtime)
                await runtime.update_weights(whole)
                same = compared(await self.written(runtime), merged)
                found["merged"] = WITHOUT_EFFECT if compared(before, merged) == EXACT else same
        except SeerError as error:
            found["merged"] = reason(error)
        if self.engine != "vllm" or "merged" not in found:  # SGLang's instances merge
            return found
        try:
            async with self.started("none", (), lora_rank=RANK) as runtime:
                [info, *_] = runtime.alive.values()
                self.block_tokens = max(info.block_tokens, LEAST_CHUNK_TOKENS)
                before = await self.written(runtime)
                await runtime.update_weights(adapter)
                beside = await self.written(runtime)
                same = compared(beside, await self.written(runtime, TECHNIQUES))
                found["beside"] = WITHOUT_EFFECT if compared(before, beside) == EXACT else same
        except SeerError as error:
            found["beside"] = reason(error)
        return found

    async def without_a_pool(self) -> Texts:
        """Try all that needs no pool; return the responses as they are, written whole."""
        found = self.found
        async with self.started("none", ()) as runtime:
            [info, *_] = runtime.alive.values()
            self.block_tokens = max(info.block_tokens, LEAST_CHUNK_TOKENS)
            found |= {
                "block_tokens": info.block_tokens,
                "capacity_tokens": info.kv_capacity_tokens,
                "kv_bytes_per_token": info.kv_bytes_per_token,
            }
            expected = await self.written(runtime)
            apart: dict[str, Completion] = {}
            for record in self.records():
                apart |= await self.written(runtime, records=[record])
            found["whole"] = compared(expected, apart)
            found["moved"] = compared(expected, await self.written(runtime, TECHNIQUES))
            await self.begin_images(runtime)
            try:
                await runtime.update_weights(self.models[1])
                updated = await self.written(runtime)
                seen_then = None
                if self.seen is not None:
                    seen_then = await self.written(runtime, records=self.pictured())
                await runtime.update_weights(self.models[0])
                found["updated"] = compared(expected, await self.written(runtime))
            except SeerError as error:
                found["updated"] = reason(error)
        if found["updated"] == EXACT:
            async with self.started("none", (), self.models[1], instances=1) as runtime:
                found["updated"] = compared(await self.written(runtime), updated)
                if seen_then is not None:
                    fresh = await self.written(runtime, records=self.pictured())
                    self.look("updated", fresh, seen_then)
        return expected

    @asynccontextmanager
    async def started(
        self,
        pool: str,
        plugins: Sequence[str],
        model: Path | None = None,
        instances: int = 2,
        **limits: int,
    ) -> AsyncIterator[Runtime]:
        """Hold instances of a model of the family."""
        config = self.config(pool, plugins, model or self.models[0], instances, **limits)
        async with Runtime.from_config(config) as runtime:
            yield runtime

    def config(
        self, pool: str, plugins: Sequence[str], model: Path, instances: int = 2, **limits: int
    ) -> Config:
        """Return the config of the instances."""
        table = {
            "model": str(model),
            "dtype": FAMILIES[self.name].dtype,
            "instances": instances,
            "kv_cache_bytes": KV_BYTES,
            "max_model_tokens": 1024,
            "max_running": 16,
            "start_timeout_s": 600.0,
            "control_timeout_s": 300.0,
            **limits,
        }
        if self.engine == "vllm":
            table["runner"] = self.runner
        tree = {
            "seer": {"plugins": [*plugins], "engine": self.engine, "kv_pool": pool},
            "engine": {self.engine: table},
        }
        return make_config(tree, self.overrides, base_dir=ROOT, origin="bench")

    def records(self) -> list[dict[str, Any]]:
        """Return the prompts, as token ids; every second one is greedy."""
        draw = random.Random(self.name)
        return [
            {
                "prompt_token_ids": draw.choices(range(3, VOCABULARY), k=PROMPT_TOKENS + 7 * number),
                "n": RESPONSES,
                "max_tokens": CHUNKS * self.block_tokens,
                "temperature": float(number % 2),
                "ignore_eos": True,
                "group_id": str(number),
                "seed": number,
            }
            for number in range(GROUPS)
        ]

    async def written(
        self,
        runtime: Runtime,
        plugins: Sequence[str] = (),
        records: Iterable[Mapping[str, Any]] | None = None,
        splitter: Splitter | None = None,
        placer: Placer | None = None,
    ) -> Texts:
        """Return the responses by name.

        With plug-ins every chunk ends with a block, and is on another instance than the last, unless other
        strategies are given.
        """
        pool = "none" if runtime.kv_pool is None else "local"
        strategies = fill_slots(self.config(pool, plugins, self.models[0]))
        if plugins:
            strategies = attrs.evolve(
                strategies,
                policies=attrs.evolve(
                    strategies.policies,
                    placer=Slot("placer", "bench", placer or AlwaysMigrate()),
                    splitter=Slot("splitter", "bench", splitter or BlockEnds(self.block_tokens)),
                ),
                drafter=runtime.drafter,  # engines would start anew for another one
            )
        await runtime.use(strategies)
        await runtime.reset_caches()
        groups = runtime.groups(records or self.records(), iteration=0)
        result = await runtime.rollout(groups).wait()
        return {each.request_id: each for each in result.completions}

    async def begin_images(self, runtime: Runtime) -> None:
        """Write responses to images as they are, and moved, if the model takes images."""
        if FAMILIES[self.name].vision is None:
            self.found["images"] = "none"
            return
        try:
            self.seen = await self.written(runtime, records=self.pictured())
            self.found["images"] = EXACT
            apart: dict[str, Completion] = {}
            for record in self.pictured():
                apart |= await self.written(runtime, records=[record])
            self.look("whole", self.seen, apart)
            self.look("moved", self.seen, await self.written(runtime, TECHNIQUES, self.pictured()))
        except SeerError as error:
            self.found["images"] = reason(error)

    def look(self, way: str, expected: Texts, found: Texts) -> None:
        """Compare responses to images, unless another way has differed already."""
        outcome = compared(expected, found)
        if outcome != EXACT and self.found["images"] == EXACT:
            self.found["images"] = f"{way}: {outcome}"

    def pictured(self) -> list[dict[str, Any]]:
        """Return prompts with images of noise, in different orders; every second one is greedy."""
        images = [picture(number, *size) for number, size in enumerate(IMAGE_SIZES)]
        orders = ((0,), (1, 2), (2, 1), (0, 0))
        return [
            record
            | {
                "group_id": f"seen-{number}",
                "prompt_token_ids": None,
                "messages": [{"role": "user", "content": list(_parts(images[each] for each in order))}],
            }
            for number, (record, order) in enumerate(zip(self.records(), orders, strict=True))
        ]


def write_adapter(
    folder: Path,
    model: Path,
    seed: int = 1,
    rank: int = RANK,
    gain: float = GAIN,
    matrices: Sequence[str] = MATRICES,
) -> tuple[Path, Path]:
    """Write a random adapter of a model, and the weights with it added; return both directories."""
    import torch
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(seed)
    weights, factors = load_file(model / "model.safetensors"), {}
    for name in sorted(weights):
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in matrices:
            continue
        outputs, inputs = weights[name].shape
        a = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        b = torch.randn(outputs, rank, generator=draw) * gain
        factors[f"base_model.model.{module}.lora_A.weight"] = a
        factors[f"base_model.model.{module}.lora_B.weight"] = b
        weights[name] = weights[name] + b @ a
    adapter, whole = folder / "adapter", folder / "whole"
    for each in (adapter, whole):
        each.mkdir(parents=True, exist_ok=True)
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in factors})
    settings = {"r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return adapter, whole


def picture(seed: int, width: int, height: int) -> bytes:
    """Return an image of noise, as the bytes of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    noise = random.Random(seed).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), noise).save(file, "PNG")
    return file.getvalue()


def _parts(images: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for number, image in enumerate(images):
        yield {"type": "text", "text": f"{number} + 1"}
        yield {"type": "image", "image": image}


class BlockEnds(Splitter):
    """Ends each chunk one token behind the next end of a block, so that nothing has to be computed twice."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        group, generated = request.group, request.generated_tokens
        over = (group.prompt_tokens + generated - 1) % self.block_tokens
        return min(self.block_tokens - over, group.max_tokens - generated)


def reason(error: SeerError) -> str:
    """Return the first line of an error, or what a traceback in it ends with."""
    lines = str(error).splitlines()
    causes = [each for each in lines if re.match(r"\w+(Error|Exception): ", each)]
    return "refused: " + (causes[-1] if causes else NOT_STARTED.sub("", lines[0]))


def compared(expected: Texts, found: Texts) -> str:
    """Return whether all tokens are the same, or how many responses differ."""
    differing = sum(expected[name].token_ids != found[name].token_ids for name in expected)
    return f"{differing} of {len(expected)} differ" if differing else EXACT


def moves(texts: Texts) -> Row:
    """Return how often responses moved, and what of their KV came from the pool."""
    chunks = [chunk for each in texts.values() for chunk in each.chunks]
    return {
        "moves": sum(a.instance != b.instance for each in texts.values() for a, b in pairwise(each.chunks)),
        "pool_tokens": sum(chunk.pool_tokens for chunk in chunks),
        "prefilled_tokens": sum(chunk.prefilled_tokens for chunk in chunks),
    }


def drafts(texts: Texts) -> Row:
    """Return how many tokens were drafted well."""
    return {
        "accepted_tokens": sum(sum(chunk.accepted_at) for each in texts.values() for chunk in each.chunks)
    }


def table(rows: Sequence[Row]) -> str:
    """Return one line for each family, with the reasons as notes below."""
    notes: list[str] = []

    def cell(row: Row, way: str) -> str:
        found: str = row.get(way, "")
        text, note = found or "-", ""
        if found.startswith("refused: "):
            text, note = "refused", found.removeprefix("refused: ")
        elif found.endswith("differ"):
            note = BATCHES
        if note and note not in notes:
            notes.append(note)
        return f"{text} ({notes.index(note) + 1})" if note else text

    ways = WAYS | ADAPTED
    columns = ["engine", "runner", "family", *ways.values(), "tokens of a block", "tokens that fit in 32 MiB"]
    lines = [
        [
            row["engine"],
            row.get("runner", RUNNERS[0]) if row["engine"] == "vllm" else "-",
            row["family"],
            *(cell(row, way) for way in ways),
            *(f"{row[name]:,}" if name in row else "" for name in ("block_tokens", "capacity_tokens")),
        ]
        for row in rows
    ]
    below = [f"{number}. {text}" for number, text in enumerate(notes, 1)]
    return "\n\n".join([markdown(columns, lines, left=11), "\n".join(below)])


def answer(rows: Sequence[Row]) -> str:
    """Return how many families are exact where they move, and how many in every way."""
    moved = sum(row["pooled"] == EXACT for row in rows)
    exact = sum({row[way] for way in WAYS} <= {EXACT, "none"} for row in rows)
    return (
        f"Of {len(rows)} pairs of a family and an engine, {moved} write the same tokens where every chunk"
        f" moves by a KV pool, and {exact} in every way that is tested. The notes have the reason of each"
        " refusal."
    )
