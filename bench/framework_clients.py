"""The rollout clients of slime, SkyRL and TRL over real servers: each with its own routing, and with Seer's.

slime and SkyRL are on no package index: their checkouts come by ``PYTHONPATH``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import time
import typing
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from seer_host.ports import reserved_port

from bench.harness import EXAMPLE, ROOT, Row
from bench.remote_real import COUNTS, LONGEST, PATIENCE_S, StockServer, stock_servers

__all__ = ["CLIENTS", "OWN", "SEER", "ClientArm", "Texts", "version_of"]

OWN, SEER = "its own routing", "Seer"
WEIGHTS = EXAMPLE / "weights"
TOKEN = "of-this-benchmark"
SEED = 7
MAIN = "from seer_main import main; main()"
SGLANG_COUNTS = {
    "computed": "sglang:prompt_tokens_total",
    "cached": "sglang:cached_tokens_total",
    "preemptions": "sglang:num_retracted_requests_total",
}
FRONT = """
[seer]
engine = "remote"
plugins = ["divided_rollout", "context_sched"]
[engine.remote]
urls = {urls}
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""
KEPT = """
[seer]
seed = {seed}
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""

Texts = dict[str, list[int]]
"""The tokens of responses, by group and place."""


class ClientArm(NamedTuple):
    """A way to roll out: its servers, what else runs for it, and a function that does it.

    The function takes the prompts, and what to call with the time at which each response is there.
    """

    servers: Sequence[StockServer]
    counts: Mapping[str, str]
    beside: Sequence[int]
    """Processes of a router, or of Seer, if it is not in this one."""
    roll_out: Callable[[Sequence[Row], Callable[[], None]], Texts]


class ServerSizes(NamedTuple):
    """Servers, and how Seer divides responses over them."""

    folder: Path
    servers: int
    kv_tokens: int
    chunk: str
    """As a config has it."""


def version_of(name: str) -> str:
    """Return the version of a framework that is installed, or the commit of its checkout.

    Raises:
        SystemExit: there is neither.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} is not installed ({error}); put a checkout on PYTHONPATH") from None
    if name == "trl":
        return metadata.version(name)
    [folder, *_] = module.__path__
    command = ["git", "-C", folder, "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def slime_arms(asked: ServerSizes) -> Iterator[dict[str, ClientArm]]:
    """Slime's rollout function over SGLang servers behind its router, and Seer's in place of it."""
    sys.path.insert(0, str(ROOT / "contrib" / "slime" / "tests"))
    from seer_slime import generate_rollout
    from seer_slime.rollout import engines_of
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils

    sglang_rollout.GenerateState.clear_instances()  # it has one router for a process
    arguments: Any = importlib.import_module("slime_arguments")
    config = asked.folder / "kept.toml"
    config.write_text(KEPT.format(seed=SEED, chunk=asked.chunk))
    args = arguments.slime_arguments(WEIGHTS, asked.folder, str(config))
    args.rollout_num_gpus = asked.servers
    args.sglang_server_concurrency = 512  # slime's default
    args.sglang_enable_deterministic_inference = True
    args.custom_rm_path = f"{__name__}.slime_reward"
    with sglang_servers(asked) as servers, _router("sglang_router", "cache_aware", servers, asked) as router:
        _await_listed(router.url, len(servers))
        args.sglang_router_ip, _, args.sglang_router_port = router.url.removeprefix("http://").partition(":")
        http_utils.init_http_client(args)

        def roll_out(seer: bool, rows: Sequence[Row], ended: Callable[[], None]) -> Texts:
            args.custom_generate_function_path = None if seer else f"{__name__}.slime_seeded"
            args.rollout_batch_size = args.over_sampling_batch_size = len(rows)
            args.n_samples_per_prompt = rows[0]["n"]
            args.rollout_max_response_len = rows[0]["max_tokens"]
            _ended.clear()
            _ended.append(ended)
            function = generate_rollout if seer else sglang_rollout.generate_rollout
            output = function(args, 0, SlimeSource(rows))
            return {
                f"{sample.group_index}/{sample.index % len(group)}": sample.tokens[-sample.response_length :]
                for group in output.samples
                for sample in group
            }

        try:
            yield {
                OWN: ClientArm(
                    servers, SGLANG_COUNTS, [router.process.pid], lambda *each: roll_out(False, *each)
                ),
                SEER: ClientArm(
                    servers, SGLANG_COUNTS, [router.process.pid], lambda *each: roll_out(True, *each)
                ),
            }
        finally:
            if engines_of.cache_info().currsize:
                engines_of(str(config), None, router.url).close()


def _await_listed(url: str, servers: int) -> None:
    """Wait until SGLang's router lists all servers."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(f"{url}/workers", timeout=60) as answer:
            listed = json.load(answer)["workers"]
        if sum(each["is_healthy"] for each in listed) == servers:
            return
        if time.monotonic() > until_s:
            raise SystemExit("the router lists no servers")
        time.sleep(0.1)


class SlimeSource:
    """Gives slime's rollouts their groups."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def get_samples(self, number: int) -> list[list[Any]]:
        """Return the samples of all prompts, group by group."""
        from slime.utils.types import Sample

        return [
            [
                Sample(group_index=group, index=group * row["n"] + place, prompt=row["prompt"])
                for place in range(row["n"])
            ]
            for group, row in enumerate(self._rows[:number])
        ]


_ended: list[Callable[[], None]] = []


async def slime_reward(args: Any, sample: Any) -> float:
    """Say that a response is there, as a reward of slime's; it is worth nothing."""
    _ended[0]()
    return 0.0


async def slime_seeded(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Have slime's own client write a response with the seed that Seer would give it."""
    from seer_slime.fallback import NO_CUT
    from slime.rollout.sglang_rollout import generate

    from seer_core.model.requests import group_seed, request_seed

    place = sample.index % args.n_samples_per_prompt
    seed = request_seed(group_seed(SEED, 0, f"0-{sample.group_index}"), place)
    return await generate(args, sample, {**sampling_params, "sampling_seed": seed, "top_k": NO_CUT})


@contextmanager
def skyrl_arms(asked: ServerSizes) -> Iterator[dict[str, ClientArm]]:
    """SkyRL's client behind the router that it starts over vLLM servers, and at the address of Seer."""
    if sys.version_info < (3, 12):
        typing_extensions: Any = importlib.import_module("typing_extensions")
        typing.TypedDict = typing_extensions.TypedDict  # pydantic takes no other, and SkyRL uses typing's
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    def at(address: str, urls: list[str]) -> Callable[[Sequence[Row], Callable[[], None]], Texts]:
        def roll_out(rows: Sequence[Row], ended: Callable[[], None]) -> Texts:
            client = RemoteInferenceClient(address, urls, data_parallel_size=1, model_name=str(WEIGHTS))
            return asyncio.run(_skyrl_loops(client, rows, ended))

        return roll_out

    with (
        vllm_servers(asked) as servers,
        _router("vllm_router", "consistent_hash", servers, asked) as router,
        _front(servers, asked) as (address, front),
    ):
        urls = [each.url for each in servers]
        yield {
            OWN: ClientArm(servers, COUNTS, [router.process.pid], at(router.url, urls)),
            SEER: ClientArm(servers, COUNTS, [front], at(address, [address])),
        }


async def _skyrl_loops(client: Any, rows: Sequence[Row], ended: Callable[[], None]) -> Texts:
    """Have a loop for each response ask SkyRL's client for it, as SkyRL's generator does it."""
    texts: Texts = {}

    async def loop(group: int, place: int, row: Row) -> None:
        session = f"{group}_{place}"
        how = {
            "min_tokens": 1,
            "skip_special_tokens": True,
            "include_stop_str_in_output": True,
            "max_tokens": row["max_tokens"],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 1,
            "stop": None,
            "seed": SEED + place,
        }
        try:
            output = await client.generate(
                {"prompt_token_ids": [row["ids"]], "session_ids": [session], "sampling_params": how}
            )
        finally:
            await client.finish_session(session)
        [texts[f"{group}/{place}"]] = output["response_ids"]
        ended()

    loops: list[Awaitable[None]] = [
        loop(group, place, row) for group, row in enumerate(rows) for place in range(row["n"])
    ]
    try:
        await asyncio.gather(*loops)
    finally:
        await client.teardown()
    return texts


@contextmanager
def trl_arms(asked: ServerSizes) -> Iterator[dict[str, ClientArm]]:
    """TRL's client at a vLLM server of several ranks, and at the address of Seer before as many servers."""
    from trl.generation.vllm_client import VLLMClient

    def at(address: str) -> Callable[[Sequence[Row], Callable[[], None]], Texts]:
        def roll_out(rows: Sequence[Row], ended: Callable[[], None]) -> Texts:
            found = client.generate(
                [row["ids"] for row in rows],
                n=rows[0]["n"],
                max_tokens=rows[0]["max_tokens"],
                generation_kwargs={"seed": SEED},
            )
            names = [f"{group}/{place}" for group, row in enumerate(rows) for place in range(row["n"])]
            return dict(zip(names, found["completion_ids"], strict=True))

        client = VLLMClient(base_url=address)
        return roll_out

    with (
        vllm_ranks(asked) as ranks,
        vllm_servers(asked) as servers,
        _front(servers, asked) as (address, front),
    ):
        yield {
            OWN: ClientArm(ranks, COUNTS, [], at(ranks[0].url)),
            SEER: ClientArm(servers, COUNTS, [front], at(address)),
        }


CLIENTS: Mapping[str, Callable[[ServerSizes], AbstractContextManager[dict[str, ClientArm]]]] = {
    "slime": slime_arms,
    "skyrl": skyrl_arms,
    "trl": trl_arms,
}


def vllm_servers(asked: ServerSizes) -> AbstractContextManager[list[StockServer]]:
    """Have vLLM servers, each on one core."""
    return _vllm(asked, number=asked.servers)


@contextmanager
def vllm_ranks(asked: ServerSizes) -> Iterator[list[StockServer]]:
    """Have one vLLM server of several data-parallel ranks, each on one core."""
    cores = psutil.Process().cpu_affinity()
    flags = ("--data-parallel-size", str(asked.servers))
    with _vllm(asked, *flags, number=1, cores=cores) as servers:
        processes = psutil.Process(servers[0].process.pid).children(recursive=True)
        ranks = [each for each in processes if any("EngineCore" in word for word in each.cmdline())]
        if len(ranks) != asked.servers:
            raise SystemExit(f"vLLM runs {len(ranks)} engines, and {asked.servers} were asked for")
        for number, rank in enumerate(ranks):
            rank.cpu_affinity([cores[number % len(cores)]])
        yield servers


def _vllm(asked: ServerSizes, *flags: str, **how: Any) -> AbstractContextManager[list[StockServer]]:
    kv_bytes = asked.kv_tokens * 2048  # of the bundled model, in float32
    return stock_servers(asked.folder, *flags, longest=LONGEST, kv_bytes=kv_bytes, shares=False, **how)


@contextmanager
def sglang_servers(asked: ServerSizes) -> Iterator[list[StockServer]]:
    """Have SGLang servers with deterministic inference, each on one core."""
    from tests.soak.real_servers import server_processes

    flags = ["--enable-metrics", "--max-total-tokens", str(asked.kv_tokens), "--max-running-requests", "128"]
    cores = psutil.Process().cpu_affinity()
    with ExitStack() as open_servers:
        found = []
        for number in range(asked.servers):
            server = server_processes.sglang_server(WEIGHTS, asked.folder / f"sglang-{number}.log", *flags)
            open_servers.callback(server.close)
            server.start()
            psutil.Process(server.process.pid).cpu_affinity([cores[number % len(cores)]])
            found.append(server)
        for server in found:
            server.await_ready()
        yield [StockServer(server.url, server.process) for server in found]


@contextmanager
def _router(module: str, policy: str, servers: Sequence[StockServer], asked: ServerSizes) -> Iterator[Any]:
    """Have a framework's router over servers, with the policy that the framework gives it."""
    from tests.soak.real_servers import server_processes

    with reserved_port() as port:
        command = [sys.executable, "-m", f"{module}.launch_router", "--policy", policy]
        command += ["--prometheus-port", str(port), "--disable-circuit-breaker"]
        command += ["--worker-urls", *(each.url for each in servers)]
        router = server_processes.ServerProcess(command, {}, asked.folder / "router.log")
        router.start()
        try:
            router.await_ready()
            yield router
        finally:
            router.close()


@contextmanager
def _front(servers: Sequence[StockServer], asked: ServerSizes) -> Iterator[tuple[str, int]]:
    """Have ``seer serve`` before servers: its address with its token, and its process."""
    from tests.soak.real_servers import server_processes

    urls = [each.url for each in servers]
    config, token = asked.folder / "front.toml", asked.folder / "token.txt"
    config.write_text(FRONT.format(urls=urls, chunk=asked.chunk))
    token.write_text(TOKEN)
    token.chmod(0o600)
    command = [sys.executable, "-c", MAIN, "serve", str(config), "--token-file", str(token)]
    front = server_processes.ServerProcess(command, {}, asked.folder / "front.log")
    front.start()
    try:
        front.await_ready()
        yield front.url.replace("http://", f"http://any:{TOKEN}@"), front.process.pid
    finally:
        front.close()
