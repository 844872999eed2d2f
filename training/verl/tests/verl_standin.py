"""A stand-in for verl's server of vLLM, without an engine: tokens follow from the seed and their places.

It has the methods and the parts of ``vLLMHttpServer`` that Seer's adapter uses.  It is an actor of Ray's, or,
by ``Here``, an object that is called like one.
"""

import asyncio
import hashlib
import inspect
import random
from types import SimpleNamespace

VOCAB = 96
END = 7
"""The model's end token."""


class Output(SimpleNamespace):
    """The fields of verl's ``TokenOutput``."""


class StandInServer:
    """``token_s`` is what a token takes; ``noise`` is ``keyed``, ``seeded`` or ``free``, as a server's."""

    def __init__(self, name="server", token_s=0.0, noise="keyed", make=Output, ends=True, repeats=False):
        self.name, self.token_s, self.noise, self._make = name, token_s, noise, make
        self._repeats = repeats
        self.global_steps = None
        self.weights = 0
        self.config = SimpleNamespace(max_model_len=512)
        self.model_config = SimpleNamespace(
            local_path="/models/tiny", tokenizer=SimpleNamespace(eos_token_id=END if ends else None)
        )
        model = SimpleNamespace(get_vocab_size=lambda: VOCAB, try_get_generation_config=dict)
        config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(num_gpu_blocks=256, block_size=16, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=32),
        )
        self._ends = ends
        self._aborted = set()
        self._submission_paused = False
        self._resumed = asyncio.Event()
        self._asleep = False
        self.requests = []
        running = self.running = {}
        self.engine = SimpleNamespace(
            vllm_config=config,
            output_processor=SimpleNamespace(request_states=running),
            abort=self._abort,
            output_handler=None,
        )
        self.slept = 0
        self.whole_weights = None
        """The weights that write what is not divided, where they are others."""
        self.fails = False

    async def _abort(self, request_ids):
        self._aborted |= set(request_ids) & set(self.running)

    async def generate(self, prompt_ids, sampling_params, request_id, **more):
        if self.fails:
            raise RuntimeError("this server was made to fail")
        seen = {"prompt": list(prompt_ids), "sampling": dict(sampling_params), "id": request_id, **more}
        self.requests.append(seen)
        self.engine.output_handler = asyncio.current_task()
        while self._submission_paused or self._asleep:
            await asyncio.sleep(0.005)
        most = min(sampling_params.get("max_tokens", 12), self.config.max_model_len - len(prompt_ids))
        seed, heat = sampling_params.get("seed"), sampling_params.get("temperature", 1.0)
        tokens, reason = [], "completed"
        weights = self.weights
        if self.whole_weights is not None and most == 12:
            weights = self.whole_weights
        self.running[request_id] = None
        drawn = random.Random()
        try:
            while len(tokens) < most:
                if request_id in self._aborted:
                    reason = "aborted"
                    break
                if self._repeats and "repetition_detection" in sampling_params and len(tokens) == 6:
                    reason = "repetition"
                    break
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                place = len(tokens) if self.noise == "seeded" else len(prompt_ids) + len(tokens)
                key = drawn.random() if seed is None or self.noise == "free" else seed
                last = tokens[-1] if tokens else prompt_ids[-1]
                if heat == 0:
                    key, place = 0, len(prompt_ids) + len(tokens)
                digest = hashlib.sha256(f"{key} {place} {last} {weights}".encode()).digest()
                token = int.from_bytes(digest[:4]) % VOCAB
                if token == END and (sampling_params.get("ignore_eos") or not self._ends):
                    token = END + 1
                tokens.append(token)
                if token == END:
                    break
        finally:
            self.running.pop(request_id, None)
            self._aborted.discard(request_id)
        experts = None
        if more.get("image_data") is not None:  # a row for each token that went through the model
            experts = [[each] for each in [*prompt_ids, *tokens][:-1]]
        return self._make(
            token_ids=tokens,
            log_probs=[-0.5 - self.weights / 7] * len(tokens) if sampling_params.get("logprobs") else None,
            routed_experts=experts,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": 0},
        )

    async def set_global_steps(self, global_steps):
        self.global_steps = global_steps

    async def set_weights(self, weights):
        """Stand for an update of the weights."""
        self.weights = weights

    async def abort_all_requests(self, reject_request=False):
        self._submission_paused = True
        self._aborted |= set(self.running)

    async def resume_generation(self):
        self._submission_paused = False

    async def sleep(self):
        self._asleep = True
        self.slept += 1

    async def wake_up(self):
        self._asleep = False

    async def seen(self):
        """Return the requests so far."""
        return self.requests

    def __ray_call__(self, function, *arguments):
        return function(self, *arguments)


class Here:
    """Calls a server of this process as an actor of Ray's is called."""

    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        method = getattr(self.server, name)

        async def call(*arguments, **named):
            found = method(*arguments, **named)
            return await found if inspect.isawaitable(found) else found

        return SimpleNamespace(remote=call)

    __ray_call__ = property(lambda self: self.__getattr__("__ray_call__"))
