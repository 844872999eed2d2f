"""An environment of tests: its answers, rewards and ends follow from the tokens of the turns."""

from seer_session.environment import EnvironmentAnswer

EVENTS = []


class Sums:
    async def start(self):
        EVENTS.append("started")

    async def reset(self, trajectory, earlier):
        EVENTS.append(f"begun behind {len(earlier)}")

    async def step(self, trajectory, turn):
        EVENTS.append((trajectory.request_id, turn.number))
        total = sum(turn.token_ids) + turn.number
        if total % 4 == 0 or turn.number > 5:
            return EnvironmentAnswer(done=True, reward=total % 7 / 8)
        return EnvironmentAnswer(token_ids=[2 + (total + place) % 90 for place in range(1 + total % 3)])

    async def stop(self):
        EVENTS.append("stopped")


class Silent(Sums):
    async def step(self, trajectory, turn):
        return EnvironmentAnswer(done=True)


class Broken(Sums):
    async def step(self, trajectory, turn):
        if turn.token_ids[0] % 2:
            raise ValueError("no such tool")
        return await super().step(trajectory, turn)


class Unready(Sums):
    def start(self):
        raise OSError("no tools")


class Wordless:
    pass
