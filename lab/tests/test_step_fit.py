"""Cost models of measured steps: what is known is found again, and stored predictions get no worse."""

import json
from pathlib import Path

import msgspec
import pytest
from seer_lab.step_fit import StepFit, errors_of, fit_steps, held_out
from seer_lab.step_rows import StepRow, aside, gpu_of, read_rows, token_s
from seer_sim.machines import GPUS, TYPICAL, cost_on
from seer_sim.measured import MEASURED
from seer_sim.published import CONFIGS
from seer_sim.sizes import sizes_of

from seer_core.errors import ConfigError

STORED = json.loads((Path(__file__).parents[2] / "bench/results/predictions/cost_models.json").read_bytes())
SETS = {row["set"]: row for row in STORED["rows"] if "set" in row}
WITHIN_GOAL = (
    "h100-qwen3-32b-tp4",
    "h200-gpt-oss-120b-tp4",
    "h200-minimax-m2.5-tp8",
    "h200-qwen3-235b-tp4",
    "h200-deepseek-v3-tp8",
    "h200-kimi-k2.5-tp8",
)
DENSE = sizes_of(CONFIGS["Qwen/Qwen3-32B"])
HEADER = "model_path,system,batch_size,isl,osl,tp_size,tpot_ms,ttft_ms"


@pytest.mark.parametrize("name", SETS)
def test_rows_left_out_are_predicted_no_worse_than_stored(name):
    row = SETS[name]
    rows = [StepRow(*each) for each in row["rows"]]
    sizes, gpu = sizes_of(CONFIGS[row["model"]]), GPUS[row["gpu"]]
    found = {each.what: each.errors for each in held_out(rows, sizes, gpu)}
    for each in row["held_out"]:
        now, then = found[each["what"]], each["errors"]
        assert now.mean < then["mean"] + 0.003
        assert now.worst < then["worst"] + 0.01
    if name in WITHIN_GOAL:
        halves = [found["half 1"], found["half 2"]]
        others = [errors for what, errors in found.items() if not what.startswith("half")]
        assert all(errors.mean < 0.05 and errors.worst < 0.15 for errors in halves)
        assert not others or any(errors.mean < 0.05 and errors.worst < 0.15 for errors in others)


@pytest.mark.parametrize("name", MEASURED)
def test_a_preset_predicts_the_rows_that_it_was_fitted_to(name):
    row, measured = SETS[name], MEASURED[name]
    rows = [StepRow(*each) for each in row["rows"]]
    found = errors_of(StepFit(measured.reached, row["seen"]), rows, measured.sizes, GPUS[measured.gpu])
    assert found.mean == pytest.approx(row["fitted"]["mean"], abs=0.003)


def test_constants_that_made_rows_are_found_again():
    true = msgspec.structs.replace(TYPICAL, host_s=3e-3, request_s=60e-6, weights=0.9, compute=0.5)
    gpu = GPUS["h100"]
    rows = [
        StepRow(batch, prompt, response, gpus, token_s(cost_on(DENSE, gpu, gpus, true), row, 0.8))
        for gpus in (2, 4, 8)
        for batch in (8, 32, 128)
        for prompt in (1024, 4096)
        for response in (128, 1024)
        for row in [StepRow(batch, prompt, response, gpus, 1.0)]
    ]
    fitted = fit_steps(rows, DENSE, gpu)
    assert errors_of(fitted, rows, DENSE, gpu).worst < 0.02
    assert fitted.reached.weights == pytest.approx(0.9, rel=0.05)
    assert fitted.seen == pytest.approx(0.8, rel=0.2)
    assert all(each.errors.worst < 0.05 for each in held_out(rows, DENSE, gpu))


def test_rows_that_do_not_measure_their_batch_are_set_aside():
    gpu = GPUS["h100"]
    good = StepRow(16, 1024, 1024, 2, 0.020)
    full = StepRow(256, 8192, 1024, 2, 0.060)
    queued = StepRow(32, 1024, 1024, 2, 0.021, first_s=40.0)
    slow = StepRow(8, 1024, 1024, 2, 0.050)
    reasons = dict(aside([good, full, queued, slow], DENSE, gpu))
    assert good not in reasons
    assert "exceeds" in reasons[full]
    assert "wait for the first token" in reasons[queued]
    assert "takes less time" in reasons[slow]


def test_prompts_of_others_slow_a_response_down():
    cost = cost_on(DENSE, GPUS["h100"], 4)
    long, short = (token_s(cost, StepRow(32, 4096, tokens, 4, 1.0)) for tokens in (128, 1024))
    assert short < long
    alone = token_s(cost, StepRow(1, 4096, 128, 4, 1.0))
    assert alone == pytest.approx(cost.pass_s(1, 1, 1) + (4096 + 64) * cost.attention_s(1))


def test_rows_are_read_by_column_and_others_are_left_out(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(f"{HEADER}\nme,h200_sxm,8,1024,512,2,12.5,90\nyou,h200_sxm,8,1024,512,4,9,\n")
    rows, gpu = read_rows(file, ["model_path=me"])
    assert rows == [StepRow(8, 1024, 512, 2, 0.0125, 0.09)]
    assert gpu_of(gpu) is GPUS["h200"]
    with pytest.raises(ConfigError, match="rows of several: me, you; choose: --where model_path="):
        read_rows(file)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("me,h100,8,1024,512,2,,1", "tpot_ms"),
        ("me,h100,8,1024,512,2,fast,1", "fast"),
        ("me,h100,0,1024,512,2,3,1", "above 0"),
    ],
)
def test_a_row_that_is_no_measurement_is_named(tmp_path, line, complaint):
    file = tmp_path / "rows.csv"
    file.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(ConfigError, match=complaint):
        read_rows(file)


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match="4 at least"):
        fit_steps([StepRow(1, 1, 1, 1, 1.0)], DENSE, GPUS["h100"])


def test_a_gpu_that_there_is_not_is_named():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu_of("h10")


def test_a_fit_describes_engines_for_the_simulator(seer, tmp_path):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIGS["Qwen/Qwen3-32B"]))
    row = SETS["h100-qwen3-32b-tp4"]
    file, out = tmp_path / "rows.csv", tmp_path / "fit.json"
    lines = [f"me,h100,{b},{i},{o},{t},{s * 1e3},{f * 1e3}" for b, i, o, t, s, f in row["rows"]]
    file.write_text("\n".join([HEADER, *lines]) + "\n")
    result = seer("fit", file, "--model", model, "--json", out)
    assert result.exit_code == 0, result.output
    assert "8 GPUs, left out" in result.stdout
    fitted = json.loads(out.read_text())
    assert {each["what"] for each in fitted["held_out"]} >= {"half 1", "half 2", "4 GPUs"}
    size = ("--lengths", "groups=4", "--lengths", "mean_tokens=100", "--lengths", "cap_tokens=400")
    engines = ("--model", model, "--gpus", "2", "--instances", "2")
    sim = tmp_path / "sim.json"
    result = seer("sim", "synthetic", *size, *engines, "--reached", out, "--policy", "verl", "--json", sim)
    assert result.exit_code == 0, result.output
    assert "2 instances of 244,256 KV tokens" in result.stdout  # what two of 80 GB hold beside the weights
    refused = seer("sim", "synthetic", *size, "--gpus", "2", "--policy", "verl")
    assert refused.exit_code == 2
    assert "--gpus" in refused.stderr
