"""An environment that SkyRL makes by name: it rewards responses that are even in length."""

from skyrl_gym.envs.base_text_env import BaseTextEnv


class Even(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras

    def init(self, prompt):
        hint = self.extras.get("hint")
        return [*prompt, {"role": "user", "content": hint}] if hint else prompt, {}

    def step(self, action):
        return {"observations": [], "reward": float(len(action) % 2 == 0), "done": True, "metadata": {}}


class Rounds(BaseTextEnv):
    """It rewards each turn, and ends a response after as many as its data says."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras
        self.rounds = 0

    def init(self, prompt):
        if self.extras.get("broken"):
            raise ValueError("no such game")
        return prompt, {}

    def step(self, action):
        self.rounds += 1
        done = self.rounds >= self.extras["rounds"]
        observations = [] if done else [{"role": "user", "content": f"ring {len(action)} ?"}]
        return {"observations": observations, "reward": float(self.rounds), "done": done, "metadata": {}}
