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
