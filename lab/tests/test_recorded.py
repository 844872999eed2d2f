"""Logs of other systems: dumps that their own code wrote, and what a damaged or hostile file gives."""

import copy
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from seer_lab.lengths import GroupLengths, RecordedTurn
from seer_lab.recorded import read_recorded

from seer_core.errors import ConfigError, InputError, PromptError

DATA = Path(__file__).parent / "data"
MODEL = Path(__file__).parents[2] / "examples/tiny_reasoner/weights"
LINE = {"input": "1 + 1 =", "output": "two", "gts": None, "score": 1.0, "step": 3}
REQUEST = {"timestamp": 0, "input_length": 9, "output_length": 4, "hash_ids": [7]}
SAMPLE = {
    "group_index": 0,
    "prompt": "a",
    "tokens": [1] * 5,
    "response_length": 3,
    "status": "completed",
}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines, mappings as JSON and texts as they are."""

    def write(*lines, name="log.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.fixture
def save(tmp_path):
    """Return a function that saves a dump as slime does."""

    def save(*samples, name="rollout_0.pt", **fields):
        torch.save({"rollout_id": 0, "samples": list(samples)} | fields, tmp_path / name)
        return tmp_path / name

    return save


def test_verl_s_dump_has_an_iteration_for_each_step_and_a_group_for_each_input():
    recorded = read_recorded(DATA / "verl", tokenizer=MODEL)
    assert [[len(group.output_tokens) for group in groups] for groups in recorded.iterations] == [[4] * 3] * 2
    assert recorded.notes == ()


def test_texts_are_counted_by_the_model_s_tokenizer():
    lines = [json.loads(line) for line in (DATA / "verl/1.jsonl").read_text().splitlines()]
    (groups,) = read_recorded(DATA / "verl/1.jsonl", tokenizer=MODEL).iterations
    # The tokenizer of the example has a token for each character but spaces.
    assert groups[0].prompt_tokens == len(lines[0]["input"].replace(" ", ""))
    assert groups[0].output_tokens == tuple(
        len(line["output"].replace(" ", "")) or 1 for line in lines if line["input"] == lines[0]["input"]
    )


def test_without_a_tokenizer_lengths_are_estimated_and_a_note_says_so(write):
    recorded = read_recorded(write(LINE, {**LINE, "output": "x" * 31}, {**LINE, "output": ""}))
    assert recorded.iterations == [[GroupLengths("0", 3, (1, 11, 1), 11)]]
    assert recorded.notes == (
        "lengths are estimated, 3 characters a token; name the model by --tokenizer DIR",
    )


def test_steps_of_verl_s_in_one_file_are_iterations_in_their_order(write):
    recorded = read_recorded(write(LINE, {**LINE, "step": 2, "output": "x" * 9}))
    assert [groups[0].output_tokens for groups in recorded.iterations] == [(3,), (1,)]


def test_slime_s_dumps_are_read_without_what_did_not_finish_and_without_evaluations():
    recorded = read_recorded(DATA / "slime")
    dumps = [torch.load(DATA / f"slime/rollout_{number}.pt", weights_only=True) for number in (0, 1)]
    expected = [
        [
            [each["response_length"] for each in dump["samples"] if each["group_index"] == group][:4]
            for group in range(3 * dump["rollout_id"], 3 * dump["rollout_id"] + 3)
        ]
        for dump in dumps
    ]
    for groups in expected:
        del groups[1][1]  # the aborted one
    assert [[list(group.output_tokens) for group in groups] for groups in recorded.iterations] == expected
    assert [group.prompt_tokens for group in recorded.iterations[0]] == [5, 6, 7]
    assert recorded.notes == (
        "files of evaluations that are left out: 1",
        "responses that did not finish and are left out: 2 of 24",
    )


def masked(*mask, **fields):
    return {
        **SAMPLE,
        "tokens": [1] * (2 + len(mask)),
        "response_length": len(mask),
        "loss_mask": list(mask),
    } | fields


@pytest.mark.parametrize(
    "unfinished",
    [
        {"status": "aborted", "tokens": [], "response_length": 0},
        {"status": "pending", "tokens": None, "response_length": None},
        {"status": "failed", "response_length": 99, "loss_mask": "x", "group_index": "y"},
        {"status": "aborted", "response_length": -1, "loss_mask": [0]},
        {"status": "completed", "tokens": [], "response_length": 0},
    ],
    ids=str,
)
def test_samples_of_slime_s_that_did_not_finish_are_left_out_before_they_are_checked(save, unfinished):
    recorded = read_recorded(save(SAMPLE, {**SAMPLE, **unfinished}, SAMPLE))
    assert recorded.iterations == [[GroupLengths("0", 2, (3, 3), 3)]]
    assert recorded.notes == ("responses that did not finish and are left out: 1 of 3",)


def test_a_mask_of_slime_s_parts_what_the_model_wrote_from_what_tools_answered(save):
    masks = [(1, 1, 0, 0, 0, 1, 0), (1, 1, 1, 1), (True, 0.0, 1.0), (0, 0, 1, 1), (0, 0, 0)]
    (groups,) = read_recorded(save(*(masked(*mask) for mask in masks), SAMPLE)).iterations
    [group] = groups
    assert group.output_tokens == (7, 4, 3, 2, 3, 3)
    assert group.prompt_tokens == 4  # the longest, with the two tokens before the first turn of the fourth
    assert group.turns == (
        (RecordedTurn(2, 0.0, 3), RecordedTurn(1, 0.0, 1)),
        (RecordedTurn(4, None, 0),),
        (RecordedTurn(1, 0.0, 1), RecordedTurn(1, None, 0)),
        (RecordedTurn(2, None, 0),),
        (RecordedTurn(3, None, 0),),
        (RecordedTurn(3, None, 0),),
    )
    assert read_recorded(save(masked(1, 1, 1), SAMPLE)).iterations[0][0].turns == ()


def test_what_tools_answered_is_not_generated_again(seer, save, tmp_path):
    half = [1] * 10 + [0] * 10
    path = save(*[masked(*half)] * 2)
    result = seer("sim", path, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "tokens of tools, which answer at once, as their times are not logged: 20" in result.stdout
    assert "10 tokens of the model's and 10 of its tools'" in " ".join(result.stdout.split())


def test_samples_of_slime_s_without_a_group_are_grouped_by_their_prompt(save):
    chat = [{"role": "user", "content": "a"}]
    samples = [{**SAMPLE, "group_index": None, "prompt": prompt} for prompt in (chat, "b", chat)]
    (groups,) = read_recorded(save(*samples)).iterations
    assert [group.output_tokens for group in groups] == [(3, 3), (3,)]


def test_requests_share_a_group_if_their_prompts_are_equal(write):
    path = write(
        REQUEST,
        {**REQUEST, "output_length": 6, "timestamp": 1},
        {**REQUEST, "hash_ids": [8]},
        {**REQUEST, "input_length": 10},
        *[{**REQUEST, "hash_ids": []}] * 2,
        {"input_length": 1, "output_length": 0},
    )
    recorded = read_recorded(path)
    (groups,) = recorded.iterations
    assert [group.output_tokens for group in groups] == [(4, 6), (4,), (4,), (4,), (4,)]
    assert recorded.notes == (
        "times of arrival are left out: all requests start at once",
        "responses that did not finish and are left out: 1 of 7",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "Expecting property name"),
        ({**LINE, "output": 5}, "output: expected `str`, got `int`"),
        ({**LINE, "step": 1e400}, "step: expected `int`, got `float`"),
        ({"input": "a", "step": 3}, "object missing required field `output`"),
        ([1], "expected `object`, got `array`"),
        ('{"input": ' + "[" * 5000, "nested too deeply"),
        ('{"step": ' + "9" * 5000 + "}", "thousands of digits"),
    ],
    ids=range(7),
)
def test_a_bad_line_is_named_with_its_file_and_number(write, line, words):
    with pytest.raises(InputError, match=rf"log\.jsonl:2 is not a line of .*verl's: .*{words}.*; delete the"):
        read_recorded(write(LINE, line))


def test_a_last_line_that_is_half_written_is_said_to_end_early(write):
    path = write(LINE)
    with path.open("a") as file:
        file.write('{"input": "1 +')
    with pytest.raises(InputError, match=r"log\.jsonl:2 .* the file ends within it"):
        read_recorded(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": 0}, "input_length: expected `int` >= 1"),
        ({"output_length": 10**12}, "output_length: expected `int` <= 10000000"),
        ({"output_length": None}, "output_length: expected `int`, got `null`"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_is_named(write, change, words):
    with pytest.raises(InputError, match=rf"log\.jsonl:2 is not a line of a trace of requests: {words}"):
        read_recorded(write(REQUEST, {**REQUEST, **change}))


def test_a_directory_of_two_formats_is_refused_with_the_file_s_name(write):
    path = write(LINE, name="1.jsonl")
    write(REQUEST, name="2.jsonl")
    with pytest.raises(InputError, match=r"2\.jsonl:1 is not a line of a rollout dump of verl's"):
        read_recorded(path.parent)


def test_a_directory_of_another_kind_is_refused_with_its_first_file(write):
    path = write({"question": 1})
    with pytest.raises(InputError, match=r"log\.jsonl is not of a dump that is known here.*your-own-logs"):
        read_recorded(path.parent)


class Hostile:
    """An object whose loading runs a command."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_nothing_in_a_dump_of_slime_s_can_run(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"mkdir' beside numbers, texts and tensors.*your-own-logs\.md"):
        read_recorded(save({**SAMPLE, "metadata": Hostile()}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_length": 5}, r"samples\[0\] has 5 tokens, of which 5 are its response"),
        ({"response_length": -1}, r"samples\[0\]: response_length: expected `int` >= 0"),
        ({"tokens": 7}, r"samples\[0\]: tokens: expected a list, got `int`"),
        ({"tokens": []}, r"samples\[0\]: tokens: expected `int` >= 1"),
        ({"status": None}, r"samples\[0\]: status: expected `str`"),
        ({"status": "aborted"}, "no response has finished"),
        ({"loss_mask": [1, 0]}, r"samples\[0\]: loss_mask has 2 entries for 3 tokens"),
        ({"loss_mask": ["1", 0, 0]}, r"samples\[0\]: loss_mask\[0\]: expected `bool \| int \| float`"),
        ({"loss_mask": torch.ones(3)}, r"samples\[0\]: loss_mask: expected `array"),
        ({"response_length": torch.tensor(0)}, r"samples\[0\]: response_length: expected `int`"),
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_is_named(save, change, words):
    with pytest.raises(InputError, match=rf"rollout_0\.pt.*{words}"):
        read_recorded(save({**SAMPLE, **change}))


ZEROS = 400 << 20


def compressed(path, name):
    """Write a dump one part of which are zeros, compressed as PyTorch never does."""
    torch.save({"rollout_id": 0, "samples": [SAMPLE], "big": torch.zeros(9)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in parts.items():
            if not each.endswith(name):
                archive.writestr(each, content)
                continue
            with archive.open(zipfile.ZipInfo(each), "w", force_zip64=True) as part:
                part._compressor = zlib.compressobj(1, zlib.DEFLATED, -15)
                part._zinfo.compress_type = zipfile.ZIP_DEFLATED
                for _ in range(ZEROS >> 20):
                    part.write(bytes(1 << 20))


def overlapping(path):
    """Write a dump whose parts lie in the same bytes, again and again."""
    content = bytes(1 << 20)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        first = archive.getinfo("x/data.pkl")
        for number in range(400):
            again = copy.copy(first)
            again.filename = f"x/data/{number}"
            archive.filelist.append(again)


def pickled(*operations):
    """Return a function that writes a file of PyTorch's with such a pickle."""

    def write(path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02" + b"".join(operations) + b".")
            archive.writestr("x/version", b"3\n")
            archive.writestr("x/byteorder", b"little")

    return write


def billion(depth=40):
    """Return the operations of a list that holds the same list twice, and so on."""
    lists = b"".join(b"](h%ch%ceq%c" % (number - 1, number - 1, number) for number in range(1, depth))
    dump = b"(X\x0a\0\0\0rollout_idK\0X\7\0\0\0samples](}(X\6\0\0\0statusX\x09\0\0\0completed"
    fields = b"X\6\0\0\0tokens](K\1K\1eX\x0f\0\0\0response_lengthK\1X\6\0\0\0prompth%cueu" % (depth - 1)
    return b"X\1\0\0\0aq\x00" + lists + b"}" + dump + fields


HOSTILE_SIZES = {
    "pickle": lambda path: compressed(path, "data.pkl"),
    "tensor": lambda path: compressed(path, "data/0"),
    "overlapping": overlapping,
    "bytes": pickled(b"cbuiltins\nbytearray\nJ\0\0\0\x70\x85R"),
    "copies": pickled(b"cbuiltins\nbytearray\nq\0J\0\0\0\x08\x85Rq\1", *[b"h\0h\1\x85R"] * 100, b"\x85" * 0),
    "tensors": pickled(b"ctorch\nTensor\nJ\0\0\0\x70\x85R"),
    "billion": pickled(billion()),
}


READ_EACH = """
import os, resource, sys, torch
from seer_core.errors import InputError
from seer_lab.recorded import read_recorded

for path in sys.argv[1:]:
    if os.fork() == 0:  # a process for each, of which only the first has to import PyTorch
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            read_recorded(path)
        except InputError as error:
            refused = str(error)
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"{refused}|{kib}", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Return what is said of each hostile file, and by how many KiB the process that read it has grown."""
    paths = {kind: tmp_path_factory.mktemp(kind) / "rollout_0.pt" for kind in HOSTILE_SIZES}
    for kind, path in paths.items():
        HOSTILE_SIZES[kind](path)
        assert path.stat().st_size < 3 << 20
    command = [sys.executable, "-c", READ_EACH, *paths.values()]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(paths, (line.rpartition("|")[::2] for line in found), strict=True))


@pytest.mark.parametrize("kind", HOSTILE_SIZES)
def test_a_small_file_that_fills_the_memory_is_refused_before_it_does(refusals, kind):
    refused, kib = refusals[kind]
    assert "rollout_0.pt" in refused.partition(":")[0]
    bounds = {"pickle": 64 << 10, "tensor": 64 << 10, "overlapping": 64 << 10}
    assert int(kib) < bounds.get(kind, 3 << 20), refused


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        (
            {"rollout_id": 0, "samples": [torch.zeros(3)]},
            r"samples\[0\]: expected a dictionary, got `Tensor`",
        ),
        ({"rollout_id": 0, "samples": [{1: 2}]}, r"samples\[0\]: a key of it: expected `str`"),
        ({"rollout_id": 0, "samples": [SAMPLE | {"tokens": 3}]}, "tokens: expected a list, got `int`"),
        ({"rollout_id": "\ud800", "samples": []}, "a text in it has .*, half of a character"),
        ("\ud800", "expected a dictionary, got `str`"),
    ],
)
def test_a_dump_of_something_else_is_named(tmp_path, dump, words):
    torch.save(dump, tmp_path / "rollout_0.pt")
    with pytest.raises(InputError, match=rf"rollout_0\.pt is not a rollout dump of slime's: .*{words}"):
        read_recorded(tmp_path / "rollout_0.pt")


def test_a_zip_archive_of_others_is_no_dump_of_slime_s(tmp_path):
    with zipfile.ZipFile(tmp_path / "log.zip", "w") as archive:
        archive.writestr("log.jsonl", "{}\n")
    with pytest.raises(InputError, match=r"it is a zip archive without PyTorch's data\.pkl"):
        read_recorded(tmp_path / "log.zip")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_a_trace_in_another_encoding_is_refused_for_that(tmp_path, encoding):
    (tmp_path / "trace.jsonl").write_text('{"input_length": 3, "output_length": 4}\n', encoding)
    with pytest.raises(PromptError, match=r"save it as UTF-8|no text in UTF-8"):
        read_recorded(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("name", ["cut", "array"])
def test_a_file_that_only_begins_as_a_dump_of_slime_s_is_refused(save, tmp_path, name):
    path = save(SAMPLE)
    if name == "cut":
        path.write_bytes(path.read_bytes()[:700])
    else:
        torch.save([1], path)
    with pytest.raises(InputError, match=r"rollout_0\.pt is not a rollout dump of slime's"):
        read_recorded(path)


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("torch", "slime", "needs PyTorch .*`pip install torch`"),
        ("transformers", "verl", "--tokenizer needs transformers"),
    ],
)
def test_a_library_that_is_missing_is_named(monkeypatch, module, source, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=words):
        read_recorded(DATA / source, tokenizer=MODEL if source == "verl" else None)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("slime", {"tokenizer": MODEL}, "whose lengths are in tokens"),
        ("verl", {"where": ["step=1"]}, "--where does not go with .*a rollout dump of verl's"),
        ("verl", {"tokenizer": DATA}, r"has no tokenizer, such as tokenizer\.json"),
    ],
    ids=str,
)
def test_an_option_that_does_not_go_with_a_log_is_refused(source, options, words):
    with pytest.raises(ConfigError, match=words):
        read_recorded(DATA / source, **options)


@pytest.mark.parametrize("source", ["verl", "slime", "requests.jsonl"])
def test_a_log_becomes_a_table_and_a_page(seer, write, tmp_path, source):
    write(REQUEST, {**REQUEST, "output_length": 300}, name="requests.jsonl")
    for name in ("verl", "slime"):
        shutil.copytree(DATA / name, tmp_path / name)
    options = ("--tokenizer", MODEL) if source == "verl" else ()
    result = seer("sim", tmp_path / source, "--report", tmp_path / "out.html", *options)
    assert result.exit_code == 0, result.output
    assert "ratio: to verl" in result.stdout
    assert "<html" in (tmp_path / "out.html").read_text("utf-8")


@pytest.mark.parametrize("command", [("sim",), ("sweep", "--over", "pressure=1")])
def test_a_file_of_the_log_is_never_written(seer, tmp_path, command):
    path = Path(shutil.copytree(DATA / "verl", tmp_path / "verl")) / "2.jsonl"
    name, *options = command
    result = seer(name, path.parent, *options, "--json", path)
    assert result.exit_code == 2
    assert "this command reads it" in " ".join(result.output.split())
    assert path.read_bytes() == (DATA / "verl/2.jsonl").read_bytes()


def test_a_sweep_reads_a_log_and_says_what_was_guessed(seer):
    result = seer("sweep", DATA / "verl", "--over", "pressure=1,2")
    assert result.exit_code == 0, result.output
    assert "lengths are estimated" in result.stdout
