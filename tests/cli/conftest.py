"""Prompts, expected errors, and an engine whose responses are one token long."""

import json

import pytest


@pytest.fixture
def prompts(write_prompts):
    return write_prompts(
        {"prompt": "a", "group_id": "1", "metadata": {"answer": 1}}, {"prompt": "b", "group_id": "mine"}
    )


@pytest.fixture
def fails(seer):
    """Return a function that runs the command line, expects exit status 2, and returns the one error."""

    def run(*arguments, code=2):
        result = seer(*arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, result.stderr
        return result.stderr[result.stderr.index("error: ") :]

    return run


@pytest.fixture
def trickle(local_plugin, write_config, write_prompts):
    """Return a function that configures an engine of which responses are one token long, by its settings."""
    local_plugin("trickle")

    def configure(plugins=(), **settings):
        more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        return write_config(plugins, f"[rollout]\nmax_tokens = 8\n[engine.trickle]\n{more}", engine="trickle")

    return configure


@pytest.fixture
def trickling(local_plugin, write_config, write_prompts, tmp_path):
    """Return a function that gives the arguments of a run whose first responses finish, and others never."""
    local_plugin("trickle")
    prompts = write_prompts(*({"prompt_token_ids": [5], "n": 2, "group_id": str(each)} for each in (1, 2, 3)))

    def arguments(**settings):
        more = "[engine.trickle]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
        config = write_config((), f"[rollout]\nmax_tokens = 8\n{more}", engine="trickle")
        return ("run", config, "--prompts", prompts, "--out", tmp_path / "out")

    return arguments
