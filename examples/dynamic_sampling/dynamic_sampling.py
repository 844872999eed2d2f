"""DAPO's dynamic sampling: groups whose rewards are all equal have no gradient, and are replaced at once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from seer_session import Completion, Runtime


async def fill_batch(
    runtime: Runtime,
    prompts: Iterable[Mapping[str, Any]],
    reward: Callable[[Completion], float],
    groups: int,
) -> list[list[Completion]]:
    """Return so many groups of completions whose rewards differ, as they finish; fewer if prompts run out.

    ``prompts`` are records with ids of their own; they are taken one by one as groups are replaced.
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
        if len(new) < count:
            rollout.close()

    try:
        roll_out(groups)
        async for completion in rollout:
            under_way[completion.group_id].append(completion)
            if len(under_way[completion.group_id]) < sizes[completion.group_id]:
                continue
            group = under_way.pop(completion.group_id)
            if len({reward(each) for each in group}) > 1:
                batch.append(group)
            elif rollout.open:
                roll_out(1)
            if len(batch) == groups:
                rollout.close()
    finally:
        await rollout.abort()
    return batch
