"""Labels of prompts and instances, and the time: what strategies see of them, and that replays stay exact."""

import pytest
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.session import rollout
from seer_trace.records import TraceWriter, read_trace, replay

from seer_core.errors import ConfigError, PromptError
from seer_core.model.events import InstanceStarted
from seer_core.scheduling.scheduler import Scheduler

TENANTS = """
from seer_core.scheduling.defaults import LeastLoaded
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Placement

class Tenants:
    '''Prioritizer and placer: by deadline, then age; a tenant's chunks run on its GPUs.'''

    def __init__(self):
        self.waiting, self.now, self.over = [], 0.0, []

    def tick(self, now):
        self.now = now

    def push(self, request):
        self.waiting.append(request)

    def rank(self, request):
        group = request.group
        return float(group.labels["deadline_s"]) - self.now, -group.sampling.temperature, request.seq

    def peek(self):
        return min(self.waiting, key=self.rank, default=None)

    def take(self, request):
        self.waiting.remove(request)

    def group_changed(self, group, request):
        pass

    def __len__(self):
        return len(self.waiting)

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        gpu = request.group.labels["gpu"]
        mine = [each for each in instances if each.info.labels["gpu"] == gpu and each.free_slots > 0]
        age_s = self.now - request.group.arrived_s
        return Placement(mine[0], f"after {age_s:.6f} s") if mine else None

@hookimpl
def seer_make_prioritizer():
    return Tenants()

seer_make_placer = seer_make_prioritizer
"""


class Infos:
    def __init__(self):
        self.infos = []

    def observe(self, now, event, commands):
        if isinstance(event, InstanceStarted):
            self.infos.append(event.info)


MORE = """
[engine.sim]
labels = [{ gpu = "h100" }, { gpu = "a100" }]
max_running = 1
max_batched_tokens = 64
"""


def test_labels_and_time_reach_strategies_and_a_replay_shows_the_same(distribution, write_config, tmp_path):
    distribution("tenants", TENANTS)
    config = load_config(write_config(["tenants"], MORE))
    prompts = [
        {
            "prompt": "x" * number,
            "n": 3,
            "max_tokens": 9,
            "labels": {"gpu": gpu, "deadline_s": str(50 - number)},
        }
        for number, gpu in enumerate(("h100", "a100", "h100", "a100"), 1)
    ]
    trace = TraceWriter(tmp_path / "trace.jsonl")
    result = rollout(config, prompts, observers=[trace])
    trace.close()
    where = {group: set() for group in {each.group_id for each in result.completions}}
    for completion in result.completions:
        where[completion.group_id].update(completion.instances)
    assert sorted(map(sorted, where.values())) == [["sim-0"], ["sim-0"], ["sim-1"], ["sim-1"]]
    records = list(read_trace(tmp_path / "trace.jsonl"))
    reasons = {command.why for record in records for command in record.commands if hasattr(command, "why")}
    assert len(reasons) > 2
    assert replay(tmp_path / "trace.jsonl", Scheduler(fill_slots(config).policies)) == len(records)


def test_what_is_not_said_takes_no_room_in_the_trace(write_config, tmp_path):
    trace = TraceWriter(tmp_path / "trace.jsonl")
    rollout(write_config(), [{"prompt": "short", "n": 1, "max_tokens": 4}], observers=[trace])
    trace.close()
    (line,) = [line for line in (tmp_path / "trace.jsonl").read_text().splitlines() if '"groups"' in line]
    assert "labels" not in line
    assert "known_lengths" not in line


@pytest.mark.parametrize(
    ("labels", "fact"),
    [
        ({str(number): "x" for number in range(17)}, "it has 17 labels; it may have 16"),
        ({"tenant": "x" * 201}, "label 'tenant' is too long; name and value may have 200 characters each"),
        ({"priority": 3}, "Expected `str`, got `int`"),
    ],
)
def test_labels_that_would_not_do_are_refused(write_config, labels, fact):
    with pytest.raises(PromptError) as caught:
        rollout(write_config(), [{"prompt": "x", "labels": labels}])
    assert fact.lower() in str(caught.value).lower()


def test_an_instance_has_the_labels_that_the_engine_s_config_gives_it(write_config):
    def labels(toml):
        seen = Infos()
        config = write_config(more=f"[engine.sim]\ninstances = 2\nlabels = {toml}")
        rollout(config, [{"prompt": "x", "n": 1, "max_tokens": 4}], observers=[seen])
        return [info.labels for info in seen.infos]

    assert labels('{ gpu = "h100" }') == [{"gpu": "h100"}] * 2
    assert labels('[{ gpu = "h100" }, {}]') == [{"gpu": "h100"}, {}]
    with pytest.raises(ConfigError, match=r"engine.sim.labels lists 1 tables for 2 instances; give one for"):
        labels('[{ gpu = "h100" }]')
