"""The tests of sampling controls that every real engine passes, over the fixtures of its backend."""

import json
import re
import shutil
from functools import cache
from itertools import pairwise

import pytest
from msgspec import structs

from seer_core.model import Sampling, StructuredOutputs

EOS, FURTHER, TOKENS = 2, 11, 60
WIDTHS = (5, 0, 20, 1, 7)
"""How many of the most probable tokens the responses of a batch ask for."""


def joined(response):
    return "".join(f"w{token}" for token in response if token > 2)


def text_of(response):
    return " ".join(f"w{token}" for token in response if token > 2)


def expect_same_tops(ours, theirs, within=2e-5):
    """Log-probs are as near as those of chosen tokens; tokens that are as probable may change places."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert [each for _, each in one] == pytest.approx([each for _, each in other], abs=within)
        both = dict(one).keys() & dict(other).keys()
        assert len(both) >= len(one) - 1
        assert all(dict(one)[token] == pytest.approx(dict(other)[token], abs=within) for token in both)


def with_tops(harness, prompts, sampling, tokens, chunk_tokens):
    """Return token ids, log-probs and most probable tokens of responses in chunks, a batch in each round."""
    found = [([], [], []) for _ in prompts]
    going = dict(enumerate(prompts))
    while going:
        jobs = [
            harness.job(
                [*prompt, *found[seed][0]],
                min(chunk_tokens, tokens - len(found[seed][0])),
                seed,
                structs.replace(sampling, top_logprobs=WIDTHS[seed % len(WIDTHS)]),
                len(prompt),
            )
            for seed, prompt in going.items()
        ]
        for job, output in zip(jobs, harness.run(harness.chunks(jobs)), strict=True):
            for kept, new in zip(
                found[job.seed], (output.token_ids, output.logprobs, output.top_logprobs or ()), strict=True
            ):
                kept.extend(new)
            if output.stopped or len(found[job.seed][0]) == tokens:
                del going[job.seed]
    return found


class SamplingControls:
    """Each control holds, however the work is cut; ``roomy`` is an instance of the engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def two_ends(cls, start, models, tmp_path_factory):
        """An instance of a model whose tokenizer has one end token, and its generation's file two."""
        model = tmp_path_factory.mktemp("two-ends") / "model"
        shutil.copytree(models[0], model)
        ends = {"eos_token_id": [EOS, FURTHER]}
        (model / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        harness = start(model)
        assert harness.info.end_token_ids == (EOS, FURTHER)
        return harness

    @pytest.fixture(scope="class")
    @classmethod
    def uncontrolled(cls, roomy, prompts):
        """Return a function: the responses of 45 tokens without controls; many samplings have the same."""
        return cache(lambda *drawn: roomy.whole(prompts(4), Sampling(*drawn), 45))

    def test_whole_divided_and_alone_give_the_same_tokens(self, roomy, prompts, controlled, uncontrolled):
        some, tokens = prompts(4), 45
        whole = roomy.whole(some, controlled, tokens)
        assert roomy.divided(some, controlled, tokens, chunk_tokens=11) == whole
        assert roomy.alone(some[:2], controlled, tokens) == whole[:2]
        assert uncontrolled(controlled.temperature, controlled.top_p, controlled.top_k) != whole

    def test_a_response_ends_with_the_first_token_that_completes_a_stop_string(self, roomy, prompts):
        stops = ("3 w4", " w99 ", "w50")
        free = roomy.whole(prompts(12), Sampling(1.0), TOKENS)
        held = roomy.whole(prompts(12), Sampling(1.0, stop=stops), TOKENS)
        assert held != free
        for whole, response in zip(free, held, strict=True):
            assert whole[: len(response)] == response
            before, text = text_of(response[:-1]), text_of(response)
            assert not any(stop in before for stop in stops)
            ended = response[-1] == EOS or len(response) == TOKENS
            assert ended or any(stop in text for stop in stops)

    def test_min_tokens_hold_off_every_end(self, roomy, prompts):
        ends = Sampling(1.0, logit_bias={EOS: 9.0}, stop_token_ids=(17,), stop=("w3",))
        short = roomy.whole(prompts(8), ends, TOKENS)
        long = roomy.whole(prompts(8), structs.replace(ends, min_tokens=25), TOKENS)
        assert max(map(len, short)) <= 25 <= min(map(len, long))
        assert not any({EOS, 17} & set(response[:25]) for response in long)

    def test_only_allowed_tokens_are_written_and_no_bad_words(self, roomy, prompts):
        some = Sampling(1.0, allowed_token_ids=(3, 4, 5, 6), bad_words=((3, 4), (5,)))
        for response in roomy.whole(prompts(6), some, TOKENS):
            assert set(response) <= {3, 4, 6}
            assert (3, 4) not in pairwise(response)

    def test_a_response_has_the_form_that_was_asked_for(self, roomy, prompts):
        pattern, choices = re.compile("(w1[0-9]w[2-5]){2,6}"), ("w5w6w7", "w10w11", "w9")
        matching = Sampling(1.0, structured_outputs=StructuredOutputs(regex=pattern.pattern))
        for response in roomy.whole(prompts(8), matching, TOKENS):
            assert pattern.fullmatch(joined(response))
            assert response[-1] == EOS
        chosen = Sampling(1.0, structured_outputs=StructuredOutputs(choice=choices))
        found = {joined(response) for response in roomy.whole(prompts(16), chosen, TOKENS)}
        assert found <= set(choices)
        assert len(found) > 1
        blind = Sampling(1.0, structured_outputs=StructuredOutputs(choice=("w50w51",)), logit_bias={5: 20.0})
        for response in roomy.whole(prompts(4), blind, TOKENS):
            assert response == [5, EOS]  # no token begins with 0: behind w5 none goes on

    def test_log_probs_stay_the_model_s_own_under_every_mask(self, roomy, prompts):
        [prompt] = prompts(1)
        matching = Sampling(1.0, structured_outputs=StructuredOutputs(regex="w17w18"))
        [output] = roomy.run(roomy.chunks([roomy.job(prompt, 8, 3, matching)]))
        assert output.token_ids == [17, 18, EOS]
        assert max(output.logprobs) < -0.5  # under the mask it would be 0: there is one token
        [plain] = roomy.run(roomy.chunks([roomy.job(prompt, 1, 3, Sampling(0.0, allowed_token_ids=(17,)))]))
        assert plain.logprobs == pytest.approx(output.logprobs[:1], abs=1e-4)

    @pytest.mark.parametrize(
        "sampling",
        [Sampling(0.0), Sampling(1.0, presence_penalty=1.0, min_p=0.1, stop=("3 w4", "w50"))],
        ids=["greedy", "drawn, penalized, stopped"],
    )
    def test_the_most_probable_tokens_are_the_model_s_own_however_the_work_is_cut(
        self, roomy, prompts, sampling
    ):
        some, tokens = prompts(10), 45
        whole = with_tops(roomy, some, sampling, tokens, tokens)
        assert [ids for ids, _, _ in whole] == roomy.whole(some, sampling, tokens)
        for number, (ids, logprobs, tops) in enumerate(whole):
            width = WIDTHS[number % len(WIDTHS)]
            assert len(tops) == (len(ids) if width else 0)
            for token, logprob, top in zip(ids, logprobs, tops, strict=False):
                assert len(dict(top)) == width
                assert [each for _, each in top] == sorted((each for _, each in top), reverse=True)
                if token in dict(top):
                    assert dict(top)[token] == logprob
                else:
                    assert logprob <= top[-1][1]
                assert sampling.temperature or top[0][1] == logprob
        cut = with_tops(roomy, some, sampling, tokens, 11)
        assert [ids for ids, _, _ in cut] == [ids for ids, _, _ in whole]
        for (_, _, ours), (_, _, theirs) in zip(cut, whole, strict=True):
            expect_same_tops(ours, theirs)

    @pytest.mark.parametrize("width", [0, 3])
    def test_log_probs_of_a_prompt_are_there_with_a_warm_cache_and_come_once(self, roomy, prompts, width):
        some = prompts(12, tokens=300)
        asking = Sampling(1.0, prompt_logprobs=width, stop=("w50",))

        def scores(sampling):
            jobs = [roomy.job(prompt, 8, seed, sampling) for seed, prompt in enumerate(some)]
            return roomy.run(roomy.chunks(jobs))

        roomy.run(roomy.engine.reset_cache())
        cold, plain, warm = scores(asking), scores(Sampling(1.0)), scores(asking)
        assert all(each.cached_tokens for each in plain)
        for output, other, without, prompt in zip(cold, warm, plain, some, strict=True):
            assert output.cached_tokens == other.cached_tokens == 0
            found, again = output.prompt_logprobs, other.prompt_logprobs
            assert found.fits(width, len(prompt))
            assert found.logprobs == pytest.approx(again.logprobs, abs=2e-5)
            if width:
                expect_same_tops(found.top_logprobs, again.top_logprobs)
            assert without.prompt_logprobs is None
            assert output.token_ids == without.token_ids[: len(output.token_ids)]
        later = roomy.job([*some[0], *cold[0].token_ids], 4, 0, asking, len(some[0]))
        [continued] = roomy.run(roomy.chunks([later]))
        assert continued.prompt_logprobs is None

    def test_log_probs_of_a_prompt_are_those_with_which_its_tokens_were_drawn(self, roomy, prompts):
        some = prompts(6)
        jobs = [
            roomy.job(prompt, 40, seed, Sampling(1.0, top_logprobs=4, ignore_eos=True))
            for seed, prompt in enumerate(some)
        ]
        drawn = roomy.run(roomy.chunks(jobs))
        texts = [[*prompt, *each.token_ids] for prompt, each in zip(some, drawn, strict=True)]
        asked = [Sampling(1.0, prompt_logprobs=4)] * len(texts) + [Sampling(1.0)] * len(texts)
        mixed = [roomy.job(text, 3, 1, sampling) for text, sampling in zip(texts * 2, asked, strict=True)]
        for scored, each in zip(roomy.run(roomy.chunks(mixed)), drawn, strict=False):
            found, start = scored.prompt_logprobs, len(scored.prompt_logprobs.logprobs) - len(each.token_ids)
            assert found.logprobs[start:] == pytest.approx(each.logprobs, abs=2e-5)
            expect_same_tops(found.top_logprobs[start:], each.top_logprobs)

    def test_a_prompt_of_one_token_has_no_log_prob(self, roomy):
        asking = Sampling(1.0, prompt_logprobs=2)
        [output] = roomy.run(roomy.chunks([roomy.job([5], 3, 1, asking)]))
        assert output.prompt_logprobs.fits(2, 1)
        assert list(output.prompt_logprobs.logprobs) == []

    def test_a_grammar_that_is_none_fails_its_own_chunk_alone(self, roomy, prompts):
        [prompt] = prompts(1)
        broken = Sampling(1.0, structured_outputs=StructuredOutputs(regex="(w1"))
        bad, good = roomy.job(prompt, 8, 3, broken), roomy.job(prompt, 8, 3, Sampling(1.0))
        roomy.engine.submit(bad)
        roomy.run(roomy.chunks([good]))
        roomy.run(roomy.until(lambda: bad.id in roomy.failures))
        assert "structured_outputs is no grammar" in roomy.failures[bad.id]

    def test_eos_does_not_end_a_response_that_ignores_it(self, roomy, prompts):
        eager = Sampling(1.0, logit_bias={EOS: 5.0})
        assert min(map(len, roomy.whole(prompts(6), eager, TOKENS))) < TOKENS
        responses = roomy.whole(prompts(6), structs.replace(eager, ignore_eos=True), TOKENS)
        assert {len(response) for response in responses} == {TOKENS}
        assert any(EOS in response[:-1] for response in responses)

    @pytest.mark.parametrize("end", [EOS, FURTHER])
    def test_each_of_several_end_tokens_ends_a_response(self, two_ends, prompts, end):
        wanted = Sampling(1.0, logit_bias={end: 200.0})
        jobs = [two_ends.job(prompts(1)[0], 12, seed, wanted) for seed in range(2)]
        jobs.append(two_ends.job(prompts(1)[0], 12, 2, structs.replace(wanted, ignore_eos=True)))
        *stopped, ignored = two_ends.run(two_ends.chunks(jobs))
        assert [(list(output.token_ids), output.stopped) for output in stopped] == [([end], True)] * 2
        assert (list(ignored.token_ids), ignored.stopped) == ([end] * 12, False)

    def test_a_streamed_chunk_has_no_token_behind_its_stop(self, roomy, prompts):
        jobs = [roomy.job(prompt, TOKENS, 5, Sampling(1.0, stop=("3 w4", "w50"))) for prompt in prompts(8)]
        outputs = roomy.run(roomy.chunks([structs.replace(job, streams=True) for job in jobs]))
        for job, output in zip(jobs, outputs, strict=True):
            assert len(roomy.streamed(job)[0]) <= len(output.token_ids)
            assert output.steps == len(output.token_ids)
