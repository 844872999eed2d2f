"""DAPO's dynamic sampling: groups whose rewards are all equal teach nothing, and are replaced at once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from seer_core import Completion, Runtime


async def fill_batch(
    runtime: Runtime,
    prompts: Iterable[Mapping[str, Any]],
    reward: Callable[[Completion], float],
    groups: int,
) -> list[list[Completion]]:
    """Return so many groups of completions whose rewards differ, as they finish.

    ``prompts`` are records that say their ``n``; they are taken one by one as groups are replaced.
    """
    prompts = iter(prompts)
    rollout = runtime.open(keep=False)
    under_way: dict[str, list[Completion]] = defaultdict(list)
    sizes: dict[str, int] = {}
    batch: list[list[Completion]] = []

    def roll_out(count: int) -> None:
        new = runtime.groups(islice(prompts, count))
        sizes.update((group.id, group.n) for group in new)
        rollout.add(new)

    roll_out(groups)
    async for completion in rollout:
        group = under_way[completion.group_id]
        group.append(completion)
        if len(group) < sizes[completion.group_id]:
            continue
        if len({reward(each) for each in group}) > 1:
            batch.append(under_way.pop(completion.group_id))
        else:
            roll_out(1)
        if len(batch) == groups:
            rollout.close()
    return batch
