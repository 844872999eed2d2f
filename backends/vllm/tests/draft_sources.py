"""Draft sources for tests, imported by workers; they check what they are given as they go."""

import json
import random
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from seer_vllm.blocks import VllmLayers
from seer_worker.weights.checkpoint import Directory

from seer_core.errors import EngineError

VOCAB = 128


class Scripted:
    """Drafts as the name of the group says: perfect, garbage, mixed, complain, raise, beyond,
    foreign; else nothing.

    ``perfect`` and ``mixed`` read the responses from the file ``answers.json``, a list by seed.
    """

    def __init__(self, settings, host):
        self.host = host
        self.notes = Path(settings["notes"])
        self.random = random.Random(1)
        self.open_jobs = {}
        self.texts = {}
        self.answers = {}
        self.handle = 0
        self.proposals = 0
        if "complaint" in settings:
            host.report(settings["complaint"])
        self.note("made", host.draft_tokens, host.vocab_size, host.max_running, host.max_model_tokens)

    def note(self, *words):
        with (self.notes / "calls.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def open(self, job):
        self.handle += 1
        self.open_jobs[self.handle] = job
        self.texts[self.handle] = list(job.token_ids)
        if job.group_id in ("perfect", "mixed"):
            answers = json.loads((self.notes / "answers.json").read_text())
            self.answers[self.handle] = job.token_ids[: job.prompt_tokens] + answers[job.seed]
        self.note("open", self.handle, job.id, len(job.token_ids))
        return self.handle

    def propose(self, batch):
        self.proposals += 1
        size = len(batch.handles)
        assert self.host.paths == 1
        assert size == len(batch.lengths) == len(batch.counts) == len(batch.limits) == len(set(batch.handles))
        assert batch.drafts.shape == (size, self.host.draft_tokens)
        assert {array.dtype for array in (batch.new_tokens, batch.drafts, batch.lengths)} == {
            np.dtype(np.int32)
        }
        assert not batch.counts.any()
        for b, (handle, written) in enumerate(zip(batch.handles.tolist(), batch.each_written(), strict=True)):
            job, length, limit = self.open_jobs[handle], int(batch.lengths[b]), int(batch.limits[b])
            text = self.texts[handle]
            text += written.tolist()
            assert length == len(text)
            left = len(job.token_ids) + job.max_tokens - length
            assert limit == (max(min(self.host.draft_tokens, left - 1), 0) if len(written) else 0)
            if job.group_id == "perfect":
                answer = self.answers[handle]  # a step may go on beyond its end
                assert text[: len(answer)] == answer[:length]
            draft = self.draft(job.group_id, handle, length, limit)
            batch.counts[b] = len(draft)
            batch.drafts[b, : len(draft)] = draft[: self.host.draft_tokens]

    def draft(self, group, handle, length, limit):
        match group:
            case "perfect":
                return self.answers[handle][length : length + limit]
            case "garbage":
                return [self.random.randrange(VOCAB) for _ in range(limit)]
            case "mixed":
                true = self.answers[handle][length : length + self.random.randint(0, limit)]
                return [token if self.random.random() < 0.8 else 7 for token in true]
            case "complain":
                self.host.report("no idea for chunk of seed 0")
            case "raise":
                raise ValueError("no draft today")
            case "foreign":
                return [VOCAB] * limit
            case "beyond":
                return [1] * (limit + 1)
        return []

    def close(self, handle):
        del self.open_jobs[handle]
        self.note("close", handle)

    def add_sibling_tokens(self, text):
        self.note("learn", text.request_id, text.start, text.token_ids.tolist())

    def forget(self, group_id):
        self.note("forget", group_id)

    def reset(self):
        assert not self.open_jobs
        self.note("reset")

    def stats(self):
        return {"proposals": float(self.proposals), "open": float(len(self.open_jobs))}

    def stop(self):
        self.note("stop")


class Unfinished:
    """Lacks methods."""

    def open(self, job):
        return 0


class Broken(Scripted):
    """Cannot be made."""

    def __init__(self, settings, host):
        raise RuntimeError("the draft model is not there")


class Saboteur(Scripted):
    """Breaks its worker from within, where a test could not reach.

    Each new weights are loaded with a fault for every kind there is, first; what became of that is written to
    ``faults.json``.  The KV of the first chunk of the group ``poisoned`` becomes NaN in one step.
    """

    def __init__(self, settings, host):
        super().__init__(settings, host)
        from seer_vllm import sampling, weights

        self.load = weights.load
        self.weights = weights
        weights.load = self.load_with_faults
        positions = sampling.VllmSampler._positions

        def poison_and_go_on(sampler):
            self.poison(sampler._runner)
            return positions(sampler)

        sampling.VllmSampler._positions = poison_and_go_on

    def load_with_faults(self, worker, source, version):
        faults = {}
        old = Directory({"directory": worker.vllm_config.model_config.model})
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "nothing"):
            self.load(worker, old, version)
            try:
                with self.stale(worker, name):
                    faults[name] = self.load(worker, source, version)
            except EngineError as error:
                faults[name] = str(error)
        (self.notes / "faults.json").write_text(json.dumps(faults))
        return self.load(worker, source, version)

    @contextmanager
    def stale(self, worker, name):
        """Let a layer of this name keep the packed copy of its old weights."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        if name == "lm_head":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.weights, "_tied", lambda layers: [])
                yield
            return
        modules = worker.model_runner.get_model().named_modules()
        broken = [layer for path, layer in modules if re.fullmatch(rf"model\.layers\.2\..*{name}", path)]
        pack = UnquantizedLinearMethod.process_weights_after_loading

        def forgetful(method, layer):
            old = layer.cpu_linear
            pack(method, layer)
            if layer in broken:
                layer.cpu_linear = old

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", forgetful)
            yield

    def poison(self, runner):
        done = self.notes / "poisoned"
        if not done.exists():
            for id in runner.input_batch.req_ids:
                request = runner.requests[id]
                if request.sampling_params.extra_args.get("group") == "poisoned":
                    layers = {str(number): layer for number, layer in enumerate(runner.kv_caches)}
                    kv = VllmLayers(layers, runner.kv_cache_config.num_blocks)
                    block_ids = request.block_ids[0]
                    nothing = np.full(kv.read(block_ids).shape, 0xFF, np.uint8)  # which is NaN in every dtype
                    kv.write(block_ids, nothing)
                    done.touch()
