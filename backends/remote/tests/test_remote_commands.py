"""``seer run`` and ``seer doctor`` over servers, against a stand-in in this process."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def config_of(write_config):
    """Return a function that writes a config of servers."""

    def write(*urls, **more):
        lines = [f"{name} = {json.dumps(value)}" for name, value in {"urls": urls, **more}.items()]
        return write_config(
            (),
            "\n".join(["[rollout]", "n = 2", "max_tokens = 20", "[engine.remote]", *lines]),
            engine="remote",
        )

    return write


def test_a_run_needs_nothing_but_the_addresses(fake, config_of, write_prompts, seer, tmp_path):
    one, two = fake(), fake()
    prompts = write_prompts({"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]})
    result = seer("run", config_of(one.url, two.url), "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "not exact" not in result.output
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["exactness"] == "exact"
    assert summary["finish_reasons"] == {"length": 4}


def test_a_run_that_is_less_than_exact_is_named_so(fake, config_of, write_prompts, seer, tmp_path):
    server = fake(noise="seeded")
    prompts = write_prompts({"prompt_token_ids": [1, 2, 3]})
    refused = seer("run", config_of(server.url), "--prompts", prompts, "--out", tmp_path / "refused")
    assert refused.exit_code == 1
    assert "samples no better than 'reproducible'" in refused.output
    config = config_of(server.url, require="reproducible")
    result = seer("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "sampling was reproducible, not exact" in result.output
    report = seer("report", tmp_path / "out")
    assert report.exit_code == 0, report.output
    assert "samples no better than reproducible" in (tmp_path / "out/report.html").read_text("utf-8")


def test_prompts_with_a_control_that_the_server_lacks_are_refused(
    fake, config_of, write_prompts, seer, tmp_path
):
    prompts = write_prompts({"prompt_token_ids": [1], "bad_words": [[5]]})
    result = seer("run", config_of(fake().url), "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert "bad_words" in result.output


def test_the_doctor_asks_each_server(fake, config_of, seer):
    one, two = fake(scale_out=False), fake()
    two.kill()
    result = seer("doctor", config_of(one.url, two.url))
    assert f"server {one.url}" in result.output
    assert "vLLM 0.32.0 serves tiny" in " ".join(result.output.split())
    assert "--enable-scale-out" in result.output
    assert f"server {two.url}" in result.output
    assert result.exit_code == 1
