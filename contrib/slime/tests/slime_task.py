"""Functions that slime's arguments name."""


async def reward(args, sample):
    return float(sum(sample.tokens) % 2)


async def rewards_of_group(args, samples):
    return [float(place) for place in range(len(samples))]


async def no_reward(args, sample):
    raise ValueError("no idea")


def some_differ(args, samples):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    differ = len({sample.reward for sample in samples}) > 1
    return DynamicFilterOutput(keep=differ, reason=None if differ else "all_equal")


def tag(args, sample):
    sample.metadata["tagged"] = True


def shorten(args, data):
    del data[2:]


SEEN = []


def look(args, samples, data_source):
    SEEN.append(len(samples))
