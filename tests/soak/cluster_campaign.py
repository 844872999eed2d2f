"""A campaign on a cluster: machines, their parts, their network, the head and the driver are struck.

`seer run` rolls out on instances that Ray places on machines made of Linux namespaces, each with a network,
processes and files of its own.  Faults come at random times, chosen from a seed; a machine that breaks is
replaced by a new one, and a command that has died goes on with --resume, after the loss of the head on a new
cluster.  Each finished rollout has to have every response once, with the tokens of child processes.  No
worker and no actor may outlive its instance, and no placement group its command.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil

from .cluster_faults import (
    DRIVER_KINDS,
    HEAD_AND_WORKERS,
    HEAD_KINDS,
    KINDS,
    MASTER,
    SUPERVISOR,
    WORKER,
    ClusterFault,
    rows_of,
)

__all__ = ["ClusterCampaign", "ClusterPlan", "allowed"]

ROOT = Path(__file__).parents[2]
TESTS_OF_RAY = ROOT / "backends/ray/tests"
sys.path.insert(0, str(TESTS_OF_RAY))

from machines import Machines, allowed  # noqa: E402
from scripted_plugin import install  # noqa: E402

PROGRAM = "from seer_main import main; main()"
EXAMPLE = ROOT / "examples/tiny_reasoner"
CONFIG = """
[seer]
plugins = ["divided_rollout", "scripted"]
engine = "{engine}"
kv_pool = "{kv_pool}"
launcher = "ray"
[seer.restarts]
attempts = 300
backoff_s = 0.0
[rollout]
n = 8
max_tokens = {max_tokens}
[plugin.divided_rollout]
chunk_tokens = 32
{tables}
"""
POLL_S = 0.05
WAIT_S = 0.5
SPARE = 1
"""One more machine than instances."""
GONE_WITHIN_S = 60.0
MOST_FALSE_STARTS = 20
MOST_COMPLAINTS = 3
LIFE_S = 600.0
STATUSES = {"driver killed": (0, -9), "driver terminated": (0, 143), "head killed": (0,)}
STATUSES[HEAD_AND_WORKERS] = (1,)
ENDS_WITHIN_S = 400.0
"""How long a command may take to end after a fault of its own or the head's, which it may survive."""
DRIVER_ODDS, HEAD_ODDS = 2, 0.3  # a new head takes most of the time
PAUSE_S = (0.2, 2.5)
FIRST_FAULT_S = 0.5
"""A first fault comes so long after all instances are ready: a first start that fails is an error."""


@attrs.frozen
class Engine:
    """Engines of a campaign: their part of the config, and how a command rolls out at once."""

    tables: str
    at_once: tuple[str, ...] = ()
    kv_pool: str = "none"
    max_tokens: int = 400
    pause_s: tuple[float, float] = PAUSE_S
    master_odds: float = 0.0


ENGINES = {
    "scripted": Engine("", at_once=("engine.scripted.step_s=0",)),
    "paced": Engine(
        """
[engine.paced]
clock = "real"
speed = 0.5
max_model_tokens = 2048
vocab_size = 1000
worker.silence_timeout_s = 30.0
[engine.paced.lengths]
mean_tokens = 200.0
cap_tokens = 400
""",
        at_once=("engine.paced.speed=100",),
        pause_s=(2.0, 12.0),
    ),
    "vllm": Engine(
        f"""
[engine.vllm]
model = "{EXAMPLE / "weights"}"
dtype = "float32"
threads = 1
kv_cache_bytes = 33554432
max_model_tokens = 3200
max_running = 128
silence_timeout_s = 30.0
[kv_pool.mooncake]
capacity_bytes = 100663296
on_failure = "go_on"
""",
        kv_pool="mooncake",
        max_tokens=1024,
        pause_s=(2.0, 12.0),
        master_odds=3.0,
    ),
}
"""By the name of the engine.  ``scripted`` has no model and starts at once; the others are real schedulers.

vLLM serves the bundled model and shares KV by Mooncake, whose master is struck, too.
"""


@attrs.frozen
class ClusterPlan:
    """How many faults, on how many instances and groups, and for how long at most."""

    seed: int = 0
    faults: int = 8
    groups: int = 40
    instances: int = 3
    minutes: float | None = None
    engine: str = "scripted"
    kinds: tuple[str, ...] | None = None
    each: tuple[str, ...] = ()
    """These kinds, one after the other, instead of any by chance."""


@attrs.define
class ClusterCampaign:
    """A plan being carried out in a directory."""

    plan: ClusterPlan
    folder: Path
    show: Callable[[str], None] = attrs.field(default=lambda line: print(line, flush=True))
    faults: list[ClusterFault] = attrs.Factory(list)
    complaints: list[str] = attrs.Factory(list)
    runs: int = 0
    lives: int = 0
    responses: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    joined: int = 0
    chance: random.Random = attrs.Factory(lambda self: random.Random(self.plan.seed), takes_self=True)
    _machines: Any = None
    _path: str = ""
    _hosts: dict[str, str] = attrs.Factory(dict)
    _heals: dict[str, float] = attrs.Factory(dict)
    _broken: dict[str, float] = attrs.Factory(dict)
    _headless: bool = False
    _read: int = 0
    _first: int = 0
    """The first fault of the command that runs."""
    _resumed: ClusterFault | None = None
    _false_starts: int = 0
    _end_s: float = 0.0

    def run(self) -> None:
        """Strike until the plan's faults are done, and let the last command finish."""
        self._end_s = time.monotonic() + 60 * (self.plan.minutes or 1e6)
        expected = self._prepare()
        self._machines = Machines()
        try:
            self._keep_machines(time.monotonic())
            for machine in self._machines.machines:
                self._machines.wait_for(machine)
            while self._more() and len(self.complaints) < MOST_COMPLAINTS:
                self.runs += 1
                out = self.folder / f"out-{self.runs}"
                while (status := self._live(out)) != 0 and len(self.complaints) < MOST_COMPLAINTS:
                    self._judge(out, expected, whole=False)
                if status == 0:
                    self._judge(out, expected, whole=True)
        finally:
            self._machines.close()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each kind of fault."""
        return list(rows_of(self.faults))

    def totals(self) -> dict[str, Any]:
        """Return rollouts, lives, machines that joined, responses that were not right, and complaints."""
        names = ("runs", "lives", "joined", "responses", "lost", "doubled", "wrong", "complaints")
        return {name: getattr(self, name) for name in names}

    @property
    def _engine(self) -> Engine:
        return ENGINES[self.plan.engine]

    def _more(self) -> bool:
        return len(self.faults) < self.plan.faults and time.monotonic() < self._end_s

    def _prepare(self) -> dict[str, list[int]]:
        """Write config, prompts and the plug-in; return the tokens of child processes."""
        config = CONFIG.format(
            engine=self.plan.engine,
            kv_pool=self._engine.kv_pool,
            max_tokens=self._engine.max_tokens,
            tables=self._engine.tables,
        )
        (self.folder / "seer.toml").write_text(config)
        lines = ({**each, "group_id": f"g{number}"} for number, each in enumerate(self._prompts()))
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._path = install(self.folder / "site")
        out = self.folder / "reference"
        with self._command(out, ["seer.launcher=local", *self._engine.at_once]) as process:
            process.wait(LIFE_S)
        if process.returncode:
            raise RuntimeError(f"no reference: {self._errors()}")
        (self.folder / "events.jsonl").unlink()
        return dict(_completions(out))

    def _prompts(self) -> Iterator[dict[str, Any]]:
        """Yield the prompts: text that the model was trained on, or a few tokens where there is no model."""
        if self.plan.engine != "vllm":
            for number in range(self.plan.groups):
                yield {"prompt_token_ids": list(range(5, 9 + number % 7)), "seed": number}
            return
        for line in (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[: self.plan.groups]:
            prompt = json.loads(line)
            yield {"prompt": prompt["prompt"], "seed": prompt["seed"]}

    @contextmanager
    def _command(self, out: Path, overrides: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start ``seer run``; it is gone in the end."""
        command = [sys.executable, "-c", PROGRAM, "run", str(self.folder / "seer.toml"), "--resume"]
        command += ["--prompts", str(self.folder / "prompts.jsonl"), "--out", str(out)]
        command += [word for each in overrides for word in ("--set", each)]
        environment = {
            **os.environ,
            "PYTHONPATH": self._path,
            "SEER_LIVES": str(self.folder / "events.jsonl"),
        }
        if self._machines is not None:
            environment["RAY_TMPDIR"] = self._machines.directory
        with (self.folder / "errors").open("wb") as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _errors(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")[-3000:]

    def _await_node(self) -> None:
        """Wait for a machine that is a node, for a command ends at once where no node could have a worker."""
        end_s = time.monotonic() + GONE_WITHIN_S
        while all(each.name in self._broken for each in self._machines.nodes()):
            if time.monotonic() > end_s:
                raise RuntimeError(f"no machine has joined within {GONE_WITHIN_S:g} s")
            self._keep_machines(time.monotonic())
            time.sleep(WAIT_S)

    def _live(self, out: Path) -> int:
        """Let a command live, strike it, and return its exit status."""
        self._await_node()
        self.lives += 1
        self._first = len(self.faults)
        self._hosts.clear()
        machines, begun_s = self._machines, time.monotonic()
        overrides = [
            f"launcher.ray.address={machines.address}",
            f"launcher.ray.host={machines.host}",
            f"engine.{self.plan.engine}.instances={self.plan.instances}",
        ]
        last: ClusterFault | None = None  # that of the command itself
        next_s: float | None = None
        with self._command(out, overrides) as process:
            while process.poll() is None:
                now = time.monotonic()
                self._read_events()
                self._keep_machines(now)
                if len(self._hosts) == self.plan.instances and next_s is None:
                    next_s = now + FIRST_FAULT_S
                if next_s is not None and now > next_s and last is None and self._more():
                    last = self._strike(process)
                    next_s = now + self.chance.uniform(*self._engine.pause_s)
                limit_s = begun_s + LIFE_S if last is None else last.struck_s + ENDS_WITHIN_S
                if now > limit_s:
                    self.complaints.append(f"{last or 'a command'}: it has not ended: {self._errors()}")
                    break
                time.sleep(POLL_S)
        self._read_events()
        ended_s = time.monotonic()
        kind = None if last is None else last.kind
        if process.returncode != 0 and kind is None:
            self.complaints.append(f"a command ended with {process.returncode}: {self._errors()}")
        if last is not None and process.returncode not in STATUSES[kind]:
            self.complaints.append(f"{kind}: it ended with {process.returncode}: {self._errors()}")
        self._await_orphans(kind)
        if last is not None and process.returncode:
            last.noticed_s = time.monotonic() if kind in DRIVER_KINDS else ended_s
        if kind in DRIVER_KINDS and process.returncode:
            self._resumed = last
        if kind in HEAD_KINDS:
            self._renew_cluster()
        return int(process.returncode)

    def _renew_cluster(self) -> None:
        self._machines.close()
        self._heals.clear()
        self._broken.clear()
        self._machines = Machines()
        self._headless = False

    def _read_events(self) -> None:
        """Take note of what the observer has written."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                event = json.loads(line)
                self._match(**event)
                if event["ready"]:
                    self._hosts[event["instance"]] = event["host"]
                else:
                    self._hosts.pop(event["instance"], None)

    def _match(self, at_s: float, instance: str, ready: bool, **_: str) -> None:
        """Note a loss for the last fault that explains it, and a start for all faults that it makes good."""
        if ready and self._resumed is not None:
            self._resumed.recovered_s = at_s
            self._resumed = None
        found = [each for each in self.faults[self._first :] if each.instance == instance]
        if ready:
            for fault in found:
                if fault.noticed_s is not None and fault.recovered_s is None:
                    fault.recovered_s = at_s
        elif found and found[-1].noticed_s is None:
            found[-1].noticed_s = at_s

    def _keep_machines(self, now: float) -> None:
        """Heal and replace machines, so that there is always one more than instances."""
        machines = self._machines
        for machine in list(machines.machines):
            name = machine.name
            if name in self._heals and now > self._heals[name]:
                machine.heal()
                del self._heals[name]
            if name in self._broken and name not in self._heals:
                # A worker that was cut off ends by itself, and so does one whose raylet is gone.
                if not machine.processes(WORKER):
                    self._remove(machine)
                elif now > self._broken[name] + GONE_WITHIN_S:
                    self.complaints.append(f"{name}: its worker lives after {GONE_WITHIN_S:g} s")
            elif not machine.up and not self._headless:
                self._false_starts += 1  # Ray gives a node only so long to start, and the machine is busy
                if self._false_starts > MOST_FALSE_STARTS:
                    raise RuntimeError(f"{name} has ended: {machine.log.read_text()[-1000:]}")
                machines.remove(machine)
        if self._headless:
            return
        good = [each for each in machines.machines if each.name not in self._broken]
        for _ in range(self.plan.instances + SPARE - len(good)):
            machines.add(wait=False)
            self.joined += 1

    def _remove(self, machine: Any) -> None:
        self._broken.pop(machine.name, None)
        self._machines.remove(machine)

    def _strike(self, process: subprocess.Popen[bytes]) -> ClusterFault | None:
        """Strike; return the fault if it is the command's own."""
        victims = [
            each
            for each in self._machines.machines
            if each.name not in self._broken and each.name not in self._heals and each.processes(WORKER)
        ]
        if not victims:
            return None
        kind = self._choose()
        fault = ClusterFault(kind, time.monotonic())
        self.faults.append(fault)
        if kind in DRIVER_KINDS:
            with suppress(ProcessLookupError):
                process.send_signal(DRIVER_KINDS[kind])
        elif kind in HEAD_KINDS:
            self._headless = True
            self._machines.kill_head()
            for machine in self._machines.machines if kind == HEAD_AND_WORKERS else ():
                KINDS["worker killed"].strike(machine)
        elif kind == MASTER:
            _kill_master(process)
        else:
            machine = self.chance.choice(victims)
            self._strike_machine(fault, machine)
        self.show(f"{len(self.faults):4} {kind} {fault.machine} {fault.instance or ''}")
        return fault if kind in (*DRIVER_KINDS, *HEAD_KINDS) else None

    def _choose(self) -> str:
        if self.plan.each:
            return self.plan.each[len(self.faults) % len(self.plan.each)]
        odds = {name: each.odds for name, each in KINDS.items()}
        odds |= {**dict.fromkeys(DRIVER_KINDS, DRIVER_ODDS), **dict.fromkeys(HEAD_KINDS, HEAD_ODDS)}
        odds[MASTER] = self._engine.master_odds
        kinds = self.plan.kinds or tuple(odds)
        return self.chance.choices(kinds, [odds[each] for each in kinds])[0]

    def _strike_machine(self, fault: ClusterFault, machine: Any) -> None:
        kind = KINDS[fault.kind]
        fault.machine = machine.name
        fault.instance = next((each for each, host in self._hosts.items() if host == machine.name), None)
        kind.strike(machine)
        if kind.cut_s is not None:
            self._heals[machine.name] = fault.struck_s + self.chance.uniform(*kind.cut_s)
        if kind.breaks:
            self._broken[machine.name] = fault.struck_s

    def _await_orphans(self, kind: str | None) -> None:
        """Wait until the command that has ended has no worker, no actor and no place left."""
        end_s = time.monotonic() + GONE_WITHIN_S
        while left := self._left():
            self._keep_machines(time.monotonic())
            if time.monotonic() > end_s:
                self.complaints.append(f"{kind}: left behind: {left}")
                return
            time.sleep(POLL_S)

    def _left(self) -> list[str]:
        left = [
            f"{machine.name}: {part}"
            for machine in self._machines.machines
            for part in (SUPERVISOR, WORKER)
            if machine.processes(part)
        ]
        if not left and not self._headless and (places := self._machines.places()):
            left.append(f"{places} places")
        return left

    def _judge(self, out: Path, expected: dict[str, list[int]], *, whole: bool) -> None:
        """Count responses that are lost, doubled or wrong."""
        found = list(_completions(out))
        names = [name for name, _ in found]
        self.doubled += len(names) - len(set(names))
        self.wrong += sum(expected.get(name) != tokens for name, tokens in found)
        if whole:
            self.lost += len(expected.keys() - set(names))
            self.responses += len(names)
        self.show(
            f"     {len(self.faults)} faults, {self.lives} lives, run {self.runs}: {len(names)} responses;"
            f" lost {self.lost}, doubled {self.doubled}, wrong {self.wrong}"
        )


def _kill_master(command: subprocess.Popen[bytes]) -> None:
    """Kill the command's Mooncake master; the run goes on without a pool, or with a new one."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(command.pid).children(recursive=True):
            if "mooncake_master" in process.name():
                process.kill()


def _completions(out: Path) -> Iterator[tuple[str, list[int]]]:
    with suppress(FileNotFoundError), (out / "completions.jsonl").open() as file:
        for line in file:
            response = json.loads(line)
            yield response["request_id"], response["token_ids"]
