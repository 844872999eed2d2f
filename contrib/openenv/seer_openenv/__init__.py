"""OpenEnv's environments answer the turns of responses: ``plugins = [..., "openenv"]``."""

from msgspec import Struct

from seer_core.plugins.hookspecs import hookimpl
from seer_openenv.environment import OpenEnv

__all__ = ["OpenEnv", "Settings"]

TIER = "experimental"


class Settings(Struct, frozen=True):
    """``[plugin.openenv]``: the environment's server, and how turns become actions."""

    url: str
    """The address of the environment's server, such as ``http://127.0.0.1:8000``. Seer starts none."""
    action_field: str | None = None
    """The field of the action that the text of a turn fills. Without it the text is an action written as a
    JSON object, or the call of a tool.
    """
    observation_field: str | None = None
    """The field of the observation that the model reads. Without it the model reads all fields but
    ``metadata``, as a JSON object, or the result of the tool.
    """
    role: str = "user"
    """The role of the message in which the model reads an observation, such as ``tool``. Empty for a text
    without a template around it.
    """


@hookimpl
def seer_make_environment(settings: Settings) -> OpenEnv:
    """Fill the slot."""
    return OpenEnv(settings.url, settings.action_field, settings.observation_field, settings.role)
