"""Settings of transformers on trees: what ``generate`` promises holds along the walk, whatever is drafted."""

import copy
import itertools
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import cache_values, random_prompts
from test_engine import check_identities
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    TopPLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria
from transformers.generation.streamers import BaseStreamer

from treepass.errors import LogitsError
from treepass.generate import TreeDecoder
from treepass.sampling import Sampler
from treepass.testing import FunctionDrafter, NoDowncasts, WatchedTarget, tiny_llama
from treepass.tree import DraftTree

arch = pytest.mark.arch
unit = pytest.mark.unit

VOCAB = 48  # the self-hashing watermark looks at the 40 likeliest tokens
WEIGHTS = 50
LENGTH = 16
NODES = 12
PROMPTS = random_prompts(WEIGHTS, VOCAB, seed=8)


@cache
def tiny(seed: int):
    return tiny_llama(seed, vocab_size=VOCAB)


def plain_output(model, prompt, **settings):
    """What transformers' own ``generate`` returns for one prompt, greedy unless the settings say otherwise."""
    ids = torch.tensor([prompt])
    defaults = {"do_sample": False, "pad_token_id": 0}
    if not settings.keys() & {"max_length", "max_new_tokens", "generation_config"}:
        defaults["max_new_tokens"] = LENGTH
    return model.generate(ids, attention_mask=torch.ones_like(ids), **(defaults | settings))


def plain(model, prompt, **settings) -> list[int]:
    """The new tokens of transformers' own ``generate``."""
    return plain_output(model, prompt, **settings)[0, len(prompt) :].tolist()


@cache
def raw_text(seed: int, prompt: tuple[int, ...]) -> list[int]:
    """What the model writes without any settings."""
    return plain(tiny(seed), list(prompt))


# --- drafters ---------------------------------------------------------------------------------------------------------


def foreseeing(prompt, text, most=NODES) -> FunctionDrafter:
    """Drafts what plain decoding would write, at most ``most`` tokens at a time."""

    def tree_of(session, plan, depth):
        done = len(session.ids) - len(prompt)
        return DraftTree.chain([session.ids[-1], *text[done : done + min(depth, plan.nodes, most)]])

    return FunctionDrafter(tree_of)


def repeating() -> FunctionDrafter:
    """Drafts the last token again and again, and beside it the last three."""

    def tree_of(session, plan, depth):
        root, last = session.ids[-1], session.ids[-3:]
        again = DraftTree.chain([root, *[root] * min(depth, 5)])
        around = DraftTree.chain([root, *(last * 3)[: min(depth, 6)]])
        return DraftTree.merge([again, around])

    return FunctionDrafter(tree_of)


def every_drafter(prompt, text):
    return {"foreseeing": foreseeing(prompt, text), "random": "random", "repeating": repeating()}


# --- processors of our own --------------------------------------------------------------------------------------------


class Parity(LogitsProcessor):
    """Without state: what the prefix adds up to decides which third of the vocabulary loses."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape == (1, input_ids.shape[1])
        assert input_ids.dtype == torch.int64
        scores[:, int(input_ids.sum()) % 3 :: 3] -= 6  # in place, as some processors do
        return scores


class Brackets(LogitsProcessor):
    """A grammar with state: tokens 0, 4, ... open a bracket, 1, 5, ... close one; at most two are open at a time.

    Only the last token of each prefix is read, so that a call too many, one missing, or another sequence's shows.
    """

    stateful = True

    def __init__(self):
        self.length: int | None = None
        self.open = 0

    def __call__(self, input_ids, scores):
        if self.length is not None:
            if input_ids.shape[1] != self.length + 1:
                raise RuntimeError(f"expected {self.length + 1} tokens, got {input_ids.shape[1]}")
            self.open += self.step(int(input_ids[0, -1]))
        self.length = input_ids.shape[1]
        scores = scores.clone()
        if self.open == 0:
            scores[:, 1::4] = -torch.inf
        if self.open == 2:
            scores[:, 0::4] = -torch.inf
        return scores

    @staticmethod
    def step(token: int) -> int:
        return {0: 1, 1: -1}.get(token % 4, 0)

    @classmethod
    def accepts(cls, text: list[int]) -> bool:
        return all(0 <= count <= 2 for count in itertools.accumulate(map(cls.step, text), initial=0))


class Recorder(LogitsProcessor):
    """Keeps every prefix that it is called with."""

    def __init__(self):
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids, scores):
        (prefix,) = input_ids.tolist()
        self.prefixes.append(prefix)
        return scores


def allowed(batch_id, text):
    """For ``prefix_allowed_tokens_fn``: two thirds of the vocabulary, by what the text adds up to."""
    return [token for token in range(VOCAB) if (token + int(text.sum())) % 3]


# --- settings ---------------------------------------------------------------------------------------------------------

# Each maps a prompt and what the model would write after it to the settings, new objects every time.
SETTINGS = {
    "repetition_penalty": lambda prompt, raw: {"repetition_penalty": 1.5},
    "repetition_penalty below 1": lambda prompt, raw: {"repetition_penalty": 0.7},
    "encoder_repetition_penalty": lambda prompt, raw: {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda prompt, raw: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda prompt, raw: {"encoder_no_repeat_ngram_size": 1},
    "repetition_penalty and no_repeat_ngram_size": lambda prompt, raw: {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
    },
    "bad_words_ids": lambda prompt, raw: {"bad_words_ids": [[raw[1]], raw[3:5], raw[6:9]]},
    "min_length": lambda prompt, raw: {"eos_token_id": raw[2], "min_length": len(prompt) + 9},
    "min_new_tokens": lambda prompt, raw: {"eos_token_id": [raw[2], raw[6]], "min_new_tokens": 9},
    "forced_bos_token_id": lambda prompt, raw: {"forced_bos_token_id": (raw[0] + 1) % VOCAB},
    "forced_eos_token_id": lambda prompt, raw: {"forced_eos_token_id": (raw[-1] + 1) % VOCAB},
    "suppress_tokens": lambda prompt, raw: {"suppress_tokens": [raw[1], raw[4]]},
    "begin_suppress_tokens": lambda prompt, raw: {"begin_suppress_tokens": [raw[0], raw[3]]},
    "sequence_bias": lambda prompt, raw: {
        "sequence_bias": {(raw[2],): -7.0, tuple(raw[4:6]): -9.0, ((raw[7] + 1) % VOCAB,): 3.0}
    },
    "exponential_decay_length_penalty": lambda prompt, raw: {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": (raw[-1] + 1) % VOCAB,
    },
    "prefix_allowed_tokens_fn": lambda prompt, raw: {"prefix_allowed_tokens_fn": allowed},
    "watermarking_config": lambda prompt, raw: {
        "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")
    },
    "watermarking_config, self-hash": lambda prompt, raw: {
        "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)
    },
    "watermarking_config, SynthID": lambda prompt, raw: {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340])
    },
    "guidance_scale": lambda prompt, raw: {"guidance_scale": 2.5},
    "guidance_scale with negative_prompt_ids": lambda prompt, raw: {
        "guidance_scale": 2.5,
        "negative_prompt_ids": torch.tensor([raw[3:7]]),
    },
    "renormalize_logits": lambda prompt, raw: {"renormalize_logits": True, "repetition_penalty": 1.4},
    "remove_invalid_values": lambda prompt, raw: {"remove_invalid_values": True, "suppress_tokens": [raw[1]]},
    "logits_processor": lambda prompt, raw: {"logits_processor": [Parity()]},
    "logits_processor with state": lambda prompt, raw: {"logits_processor": [Brackets()]},
    "logits_processor in place of a setting's": lambda prompt, raw: {
        "repetition_penalty": 1.1,
        "logits_processor": [RepetitionPenaltyLogitsProcessor(2.0)],
    },
    "many": lambda prompt, raw: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [raw[3:5]],
        "eos_token_id": raw[2],
        "min_new_tokens": 6,
        "suppress_tokens": [raw[5]],
        "logits_processor": [Parity(), Brackets()],
        "prefix_allowed_tokens_fn": allowed,
        "renormalize_logits": True,
    },
}

SAMPLING = {
    "temperature": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "temperature, top_k, top_p, min_p": {"temperature": 1.6, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "typical_p": {"temperature": 1.0, "typical_p": 0.4},
    "epsilon_cutoff": {"temperature": 1.0, "epsilon_cutoff": 0.08},
    "eta_cutoff": {"temperature": 1.0, "eta_cutoff": 0.08},
    "top_h": {"temperature": 1.0, "top_h": 0.4},
    "temperature, top_h, top_k, top_p": {"temperature": 1.4, "top_h": 0.8, "top_k": 6, "top_p": 0.9},
    "temperature, top_k, typical_p, eta_cutoff": {
        "temperature": 1.4,
        "top_k": 9,
        "typical_p": 0.8,
        "eta_cutoff": 0.01,
    },
    "top_p, renormalize_logits": {"temperature": 1.3, "top_p": 0.7, "renormalize_logits": True},
    "top_k, watermarking_config": {
        "temperature": 1.3,
        "top_k": 8,
        "watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="lefthash"),
    },
}


def cases(table, per_name: int):
    """Names, each with seeds of weights of its own; together they go through all weights."""
    assert len(table) * per_name >= WEIGHTS
    return [(name, [(per_name * i + j) % WEIGHTS for j in range(per_name)]) for i, name in enumerate(table)]


def prompt_of(name: str, seed: int) -> list[int]:
    # A token is forced as the first of a text only after a prompt of one token.
    return PROMPTS[seed][:1] if name.startswith("forced_bos") else PROMPTS[seed]


def made(name: str, seed: int):
    """Settings of transformers, new objects every time."""
    prompt = prompt_of(name, seed)
    return SETTINGS[name](prompt, raw_text(seed, tuple(prompt)))


def check_greedy(name: str, seeds, names=("foreseeing", "random", "repeating")) -> None:
    bites = False
    for seed in seeds:
        prompt = prompt_of(name, seed)
        expected = plain(tiny(seed), prompt, **made(name, seed))
        bites |= expected != raw_text(seed, tuple(prompt))
        for drafter, one in every_drafter(prompt, expected).items():
            if drafter not in names:
                continue
            decoder = TreeDecoder(tiny(seed), one, nodes=NODES)
            output = decoder.generate(prompt, max_new_tokens=LENGTH, **made(name, seed))
            assert output.ids == [expected], f"{name}, weights {seed}, {drafter}"
            check_identities(output, NODES)
            if drafter == "foreseeing" and len(expected) > 1:
                assert output.report.accepted > 0
                assert output.report.passes < len(expected)
    assert bites, f"{name} changes no text, so that nothing was tested"


@arch
@pytest.mark.parametrize(("name", "seeds"), cases(SETTINGS, 2), ids=list(SETTINGS))
def test_greedy_text_with_processors_equals_generate(name, seeds):
    check_greedy(name, seeds)


def check_sampling(settings_of, seeds, limits=(NODES,)) -> None:
    for seed in seeds:
        prompt, common = PROMPTS[seed], {"max_new_tokens": LENGTH, "seed": 100 + seed}
        alone = TreeDecoder(tiny(seed), "none", nodes=0)
        (expected,) = alone.generate(prompt, **common, **settings_of(seed)).ids
        for drafter, one in every_drafter(prompt, expected).items():
            for limit in limits:
                decoder = TreeDecoder(tiny(seed), one, nodes=limit)
                output = decoder.generate(prompt, **common, **settings_of(seed))
                assert output.ids == [expected], f"weights {seed}, {drafter}"
                check_identities(output, limit)
                if drafter == "foreseeing" and len(expected) > 1:
                    assert output.report.accepted > 0


@arch
@pytest.mark.parametrize(("name", "seeds"), cases(SAMPLING, 4), ids=list(SAMPLING))
def test_sampling_is_seed_exact(name, seeds):
    check_sampling(lambda seed: SAMPLING[name], seeds[:2])


@arch
@pytest.mark.parametrize(("name", "seeds"), cases(SETTINGS, 2), ids=list(SETTINGS))
def test_sampling_with_processors_is_seed_exact(name, seeds):
    extra = {"temperature": 0.9, "top_p": 0.95}
    check_sampling(lambda seed: made(name, seed) | extra, seeds[:1])


@arch
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-2, 1.0, 5.0])
def test_extreme_temperatures_stay_finite(temperature):
    for more in ({}, {"top_k": 1}, {"typical_p": 0.5}, {"repetition_penalty": 1.5, "top_p": 0.9}):
        output = TreeDecoder(tiny(3)).generate(PROMPTS[3], max_new_tokens=6, temperature=temperature, seed=0, **more)
        assert np.isfinite(output.logprobs).all()
        assert np.isfinite(output.scores).all()


@arch
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_remove_invalid_values_removes_those_of_the_model(value):
    def spoil(logits):
        """Token 7 of about half of the rows; which ones is a matter of the row alone."""
        spoiled = logits.clone()
        spoiled[..., 7] = torch.where(logits[..., 3] > logits[..., 5], value, logits[..., 7])
        return spoiled

    model, prompt = tiny_llama(5, vocab_size=VOCAB), PROMPTS[5]
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: spoil(logits))
    expected = plain(model, prompt, remove_invalid_values=True)
    hook.remove()
    for drafter in every_drafter(prompt, expected).values():
        decoder = TreeDecoder(model, drafter, nodes=NODES)
        decoder.target = WatchedTarget(decoder.target, lambda forest, logits: spoil(logits))
        output = decoder.generate(prompt, max_new_tokens=LENGTH, remove_invalid_values=True)
        assert output.ids == [expected]


# --- where settings come from -----------------------------------------------------------------------------------------


@arch
def test_settings_of_the_models_own_generation_config_apply_unless_set():
    seed, prompt = 4, PROMPTS[4]
    model = tiny_llama(seed, vocab_size=VOCAB)
    model.generation_config.repetition_penalty = 1.5
    before = copy.deepcopy(model.generation_config.to_dict())
    for settings in ({}, {"repetition_penalty": 1.0}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 3.0}):
        expected = plain(model, prompt, **settings)
        output = TreeDecoder(model, "random").generate(prompt, max_new_tokens=LENGTH, **settings)
        assert output.ids == [expected]
    assert model.generation_config.to_dict() == before


@arch
@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 7, "repetition_penalty": 1.5},
        {"max_length": 19},
        {"max_new_tokens": 9, "suppress_tokens": [1, 2, 3], "eos_token_id": 5},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_a_generation_config_means_what_it_means_to_generate(fields):
    prompt = PROMPTS[6]
    expected = plain(tiny(6), prompt, generation_config=GenerationConfig(**fields))
    output = TreeDecoder(tiny(6)).generate(prompt, generation_config=GenerationConfig(**fields))
    assert output.ids == [expected]


@arch
def test_a_generation_config_that_samples_is_that_sampling():
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=5, top_p=0.9, typical_p=0.9)
    decoder, common = TreeDecoder(tiny(7), "random"), {"max_new_tokens": LENGTH, "seed": 1}
    single = decoder.generate(PROMPTS[7], temperature=0.8, top_k=5, top_p=0.9, typical_p=0.9, **common)
    assert decoder.generate(PROMPTS[7], generation_config=config, **common).ids == single.ids
    assert single.ids != decoder.generate(PROMPTS[7], max_new_tokens=LENGTH).ids


@arch
def test_a_generation_config_says_how_many_samples():
    config = GenerationConfig(do_sample=True, num_return_sequences=2)
    output = TreeDecoder(tiny(7), "random").generate(PROMPTS[7], generation_config=config, max_new_tokens=4, seed=1)
    assert len(output.ids) == 2


@arch
def test_do_sample_samples():
    decoder, common = TreeDecoder(tiny(7), "random"), {"max_new_tokens": LENGTH, "seed": 1}
    sampled = decoder.generate(PROMPTS[7], temperature=1.0, top_k=50, **common).ids
    assert decoder.generate(PROMPTS[7], do_sample=True, **common).ids == sampled


# --- which prefixes processors see ------------------------------------------------------------------------------------


def check_calls(seeds=(11, 12, 13)) -> None:
    for seed in seeds:
        prompt = PROMPTS[seed]
        once = Recorder()
        text = plain(tiny(seed), prompt, logits_processor=[once, Brackets()], repetition_penalty=1.3)
        assert once.prefixes == [prompt + text[:done] for done in range(len(text))]
        for drafter in every_drafter(prompt, text).values():
            recorder = Recorder()
            output = TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(
                prompt, max_new_tokens=LENGTH, logits_processor=[recorder, Brackets()], repetition_penalty=1.3
            )
            assert output.ids == [text]
            assert recorder.prefixes == once.prefixes


@arch
def test_processors_see_every_prefix_of_the_text_once_in_order_and_nothing_else():
    check_calls()


@arch
def test_processors_see_nothing_past_a_stop():
    for seed in (14, 15):
        prompt = PROMPTS[seed]
        end = raw_text(seed, tuple(prompt))[5]
        once = Recorder()
        text = plain(tiny(seed), prompt, logits_processor=[once], eos_token_id=end)
        for drafter in every_drafter(prompt, raw_text(seed, tuple(prompt))).values():
            recorder = Recorder()
            output = TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(
                prompt, max_new_tokens=LENGTH, logits_processor=[recorder], eos_token_id=end
            )
            assert output.ids == [text]
            assert recorder.prefixes == once.prefixes


@arch
def test_processors_and_criteria_run_without_gradients_as_in_generate():
    class Gradients(LogitsProcessor, StoppingCriteria):
        def __init__(self):
            self.seen = set()

        def __call__(self, input_ids, scores):
            self.seen.add(torch.is_grad_enabled())
            return torch.tensor([False]) if scores is None else scores

    for write in (lambda **given: plain(tiny(0), [1, 2], **given), TreeDecoder(tiny(0)).generate):
        processor, criterion = Gradients(), Gradients()
        given = {"logits_processor": [processor], "stopping_criteria": [criterion]}
        write(**given) if write.__name__ == "<lambda>" else write([1, 2], max_new_tokens=4, **given)
        assert processor.seen == criterion.seen == {False}


@arch
def test_prefix_allowed_tokens_fn_sees_what_it_sees_in_generate():
    seed, prompt = 16, PROMPTS[16]

    def recorded(calls):
        def function(batch_id, text):
            calls.append((batch_id, text.tolist()))
            return allowed(batch_id, text)

        return function

    once: list = []
    text = plain(tiny(seed), prompt, prefix_allowed_tokens_fn=recorded(once))
    for drafter in every_drafter(prompt, text).values():
        calls: list = []
        output = TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(
            prompt, max_new_tokens=LENGTH, prefix_allowed_tokens_fn=recorded(calls)
        )
        assert output.ids == [text]
        assert calls == once


@arch
def test_an_error_off_the_walk_cannot_happen():
    for seed in (17, 18):
        prompt = PROMPTS[seed]
        text = plain(tiny(seed), prompt)
        walk = [prompt + text[:done] for done in range(len(text))]

        class Strict(LogitsProcessor):
            def __call__(self, input_ids, scores, walk=walk):
                if input_ids[0].tolist() not in walk:
                    raise RuntimeError("off the walk")
                return scores

        for drafter in every_drafter(prompt, text).values():
            output = TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(
                prompt, max_new_tokens=LENGTH, logits_processor=[Strict()]
            )
            assert output.ids == [text]


def all_rows_with_one_prefix(monkeypatch):
    """Breaks the sampler on purpose: all rows of a tree go through the processors with the root's prefix."""
    original = Sampler.chooser

    def chooser(self, logits, positions, prefix=None):
        if self.process and prefix:
            one = prefix().clone()
            rows = [self.process(one, row, node, positions[node]) for node, row in enumerate(logits)]
            logits, self = torch.stack(rows), copy.copy(self)
            self.process = None
        choose = original(self, logits, positions, prefix)
        return lambda node: (prefix and prefix(), choose(node))[1]

    monkeypatch.setattr(Sampler, "chooser", chooser)


def one_prefix_per_pass(monkeypatch):
    """Breaks the sampler on purpose: rows of the walk are judged one by one, but with the root's prefix."""
    original = Sampler.chooser

    def chooser(self, logits, positions, prefix=None):
        one = prefix().clone() if prefix else None
        return original(self, logits, positions, lambda: (prefix(), one)[1])

    monkeypatch.setattr(Sampler, "chooser", chooser)


DEPEND_ON_THE_PREFIX = [
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "begin_suppress_tokens"),
    *("sequence_bias", "exponential_decay_length_penalty", "prefix_allowed_tokens_fn", "watermarking_config"),
    *("watermarking_config, SynthID", "guidance_scale", "logits_processor", "logits_processor with state", "many"),
]


@arch
@pytest.mark.parametrize("mutant", [all_rows_with_one_prefix, one_prefix_per_pass])
def test_a_processor_with_one_prefix_for_all_rows_is_noticed(mutant, monkeypatch):
    table = dict(cases(SETTINGS, 2))
    for name in DEPEND_ON_THE_PREFIX:
        check_greedy(name, table[name], ["foreseeing"])
    mutant(monkeypatch)
    for name in DEPEND_ON_THE_PREFIX:
        with pytest.raises((AssertionError, LogitsError), match=r"assert|logits processor"):
            check_greedy(name, table[name], ["foreseeing"])
    with pytest.raises((AssertionError, LogitsError), match=r"assert|logits processor"):
        check_calls()


# --- log-probabilities, scores, rows ----------------------------------------------------------------------------------


def check_rows(seed, prompt, settings_of, monkeypatch, temperature=0.0, **sampling):
    """Everything that is reported for a token, against the rows of ``generate`` along the same text, in float64."""
    model = tiny(seed)
    with NoDowncasts():
        output = TreeDecoder(model, "auto", nodes=NODES).generate(
            prompt,
            max_new_tokens=10,
            seed=seed,
            temperature=temperature,
            **sampling,
            **settings_of(),
            top_logprobs=4,
            keep_rows=True,
        )
        (ids,), (choices,) = output.ids, output.choices
        law = {"do_sample": True, "temperature": temperature, "top_k": 0} | sampling if temperature else {}
        with monkeypatch.context() as patch, torch.no_grad():
            # generate samples with torch's own noise: it is made to draw our tokens instead.
            drawn = iter(ids)
            patch.setattr(torch, "multinomial", lambda probs, num_samples: torch.tensor([[next(drawn)]]))
            reference = plain_output(
                model,
                prompt,
                max_new_tokens=10,
                **law,
                **settings_of(),
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    assert reference.sequences[0, len(prompt) :].tolist() == ids
    assert [choice.token for choice in choices] == ids
    assert output.logprobs == [[choice.logprob for choice in choices]]
    assert output.scores == [[choice.score for choice in choices]]
    assert [v for record in output.records for v in record.logprobs] == output.logprobs[0]
    assert [v for record in output.records for v in record.scores] == output.scores[0]
    law_of_all = logits.log_softmax(-1)
    assert output.logprobs[0] == pytest.approx(law_of_all[range(len(ids)), ids].tolist(), abs=1e-6)
    for step, choice in enumerate(choices):
        torch.testing.assert_close(choice.logits, logits[step], atol=1e-6, rtol=0)
        if "logits_processor" not in settings_of():  # one that writes in place spoils what generate calls raw
            torch.testing.assert_close(choice.logits, reference.logits[step][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(choice.processed, reference.scores[step][0], atol=1e-6, rtol=1e-9)
        assert choice.score == pytest.approx(float(reference.scores[step][0, choice.token]), abs=1e-6)
        values, tokens = law_of_all[step].topk(4)
        assert [token for token, _ in choice.top] == tokens.tolist()
        assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-6)


@arch
@pytest.mark.parametrize("name", list(SAMPLING))
def test_rows_under_sampling_equal_those_of_generate(name, monkeypatch):
    for seed in (20, 21):
        check_rows(seed, PROMPTS[seed], dict, monkeypatch, **SAMPLING[name])


@arch
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_rows_with_processors_equal_those_of_generate(name, temperature, monkeypatch):
    seed = 22 + list(SETTINGS).index(name)
    sampling = {"temperature": temperature, "top_k": 8, "top_p": 0.9} if temperature else {}
    check_rows(seed, prompt_of(name, seed), lambda: made(name, seed), monkeypatch, **sampling)


@arch
def test_rows_of_a_processor_like_one_of_samplings_own_equal_those_of_generate(monkeypatch):
    def settings():
        return {"logits_processor": [TopPLogitsWarper(0.01, min_tokens_to_keep=3)]}

    check_rows(23, PROMPTS[23], settings, monkeypatch)
    check_rows(23, PROMPTS[23], settings, monkeypatch, temperature=1.0)
    check_rows(23, PROMPTS[23], settings, monkeypatch, temperature=1.3, top_p=0.9)


@arch
def test_nothing_is_kept_unless_asked_for():
    output = TreeDecoder(tiny(0)).generate(PROMPTS[0], max_new_tokens=4)
    assert output.choices == [[]]
    assert len(output.logprobs[0]) == len(output.scores[0]) == 4


# --- stopping ---------------------------------------------------------------------------------------------------------


class Watched(FunctionDrafter):
    """A drafter that looks at the sequence when it leaves."""

    def end(self, session):
        self.ids = list(session.ids)
        self.rows = [tuple(stream.clone() for stream in session.cache.rows(layer)) for layer in range(2)]


def check_stop(seed, prompt, settings_of, reason, most=(1, 2, 3, 4, NODES)) -> list:
    """Ids, log-probabilities, rows and report are cut where ``generate`` stops. Returns how the last passes ended."""
    model, endings = tiny(seed), []
    expected = plain(model, prompt, **settings_of())
    beyond = plain(model, prompt, max_new_tokens=LENGTH + 8)
    whole = expected + beyond[len(expected) :] if beyond[: len(expected)] == expected else expected + [0] * 8
    chains = [(f"{count} foreseen", Watched(foreseeing(prompt, whole, count)._tree_of)) for count in most]
    for name, drafter in [*chains, ("repeating", Watched(repeating()._tree_of)), ("random", "random")]:
        settings = {"max_new_tokens": LENGTH} | settings_of()
        if "max_length" in settings or "generation_config" in settings:
            settings.pop("max_new_tokens")
        output = TreeDecoder(model, drafter, nodes=NODES).generate(prompt, **settings)
        assert output.ids == [expected], f"weights {seed}, {name}"
        assert output.sequences.tolist() == [prompt + expected]
        assert output.finish_reasons == [reason]
        assert len(output.logprobs[0]) == len(output.scores[0]) == len(expected)
        assert output.report.emitted == len(expected)
        check_identities(output, NODES)
        if name.endswith("foreseen"):
            endings.append(output.records[-1].ended)
        if isinstance(drafter, Watched):
            assert drafter.ids == prompt + expected
            for kept, wanted in zip(drafter.rows, cache_values(model, drafter.ids[:-1]), strict=True):
                for stream, reference in zip(kept, wanted, strict=True):
                    torch.testing.assert_close(stream, reference, atol=1e-5, rtol=1e-5)
    return endings


STOP_SEEDS = range(30, 36)


def first_new(text, start) -> int:
    """The first place from ``start`` on whose token stands nowhere before."""
    return next(place for place in range(start, len(text)) if text[place] not in text[:place])


@arch
@pytest.mark.parametrize("several", [False, True])
def test_text_ends_at_an_end_token(several):
    endings = []
    for seed in STOP_SEEDS:
        prompt = PROMPTS[seed]
        raw = raw_text(seed, tuple(prompt))
        place = first_new(raw, 3)
        absent = [token for token in range(VOCAB) if token not in raw]
        ends = [absent[0], raw[place], raw[-1]] if several else raw[place]
        endings += check_stop(seed, prompt, lambda ends=ends: {"eos_token_id": ends}, "stop")
    assert {"accepted", "bonus"} <= set(endings)


@arch
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_text_ends_at_max_new_tokens(length):
    for seed in STOP_SEEDS[:2]:
        check_stop(seed, PROMPTS[seed], lambda: {"max_new_tokens": length}, "length")


@arch
@pytest.mark.parametrize("new_tokens", [1, 2, 5, 11])
def test_text_ends_at_max_length(new_tokens):
    for seed in STOP_SEEDS[:2]:
        prompt = PROMPTS[seed]
        check_stop(seed, prompt, lambda prompt=prompt: {"max_length": len(prompt) + new_tokens}, "length")


@arch
def test_max_new_tokens_takes_precedence_over_max_length():
    prompt = PROMPTS[31]
    for length in (4, 30):
        settings = {"max_new_tokens": 9, "max_length": len(prompt) + length}
        expected = plain(tiny(31), prompt, **settings)
        assert TreeDecoder(tiny(31)).generate(prompt, **settings).ids == [expected]


@arch
@pytest.mark.parametrize("seconds", [0, 2.5, 6.5])
def test_text_ends_when_the_time_is_over(seconds, monkeypatch):
    clock = itertools.count()  # a second passes between one look at the clock and the next
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: float(next(clock))))
    for seed in STOP_SEEDS[:2]:
        assert len(plain(tiny(seed), PROMPTS[seed], max_time=seconds)) == int(seconds) + 1
        check_stop(seed, PROMPTS[seed], lambda: {"max_time": seconds}, "time")


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of 48 tokens of one to three letters, made as the ones of the command line's tests."""
    single = list("abcdefgh")
    pairs = [a + b for a, b in itertools.product("abcdefgh", "bdh")]
    triples = [pair + "ahbgcfde"[place % 8] for place, pair in enumerate(pairs[:16])]
    vocab = {token: number for number, token in enumerate([*single, *pairs, *triples])}
    merges = [*((pair[0], pair[1]) for pair in pairs), *((triple[:2], triple[2]) for triple in triples)]
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def across(text, place) -> str:
    """A string that begins inside token ``place`` and ends inside or at the end of the next but one."""
    parts = [letters().decode([token]) for token in text[place : place + 3]]
    return parts[0][-1] + parts[1] + parts[2][0]


@arch
@pytest.mark.parametrize("several", [False, True])
def test_text_ends_at_a_stop_string(several):
    endings, lengths = [], set()
    for seed in STOP_SEEDS:
        prompt = PROMPTS[seed]
        raw = raw_text(seed, tuple(prompt))
        for place in (2, 5):
            stop = across(raw, place)
            strings = ["no such text", stop, across(raw, 8)] if several else stop

            def settings(strings=strings):
                return {"stop_strings": strings, "tokenizer": letters()}

            text = plain(tiny(seed), prompt, **settings())
            assert stop in letters().decode(prompt + text)
            lengths.add(len(text))
            endings += check_stop(seed, prompt, settings, "stop", most=(2, 3, 4, 5, NODES))
    assert {"accepted", "bonus"} <= set(endings)
    assert max(lengths) > 4


@arch
def test_a_stop_string_holds_under_sampling():
    for seed in STOP_SEEDS:
        prompt, common = PROMPTS[seed], {"max_new_tokens": LENGTH, "seed": seed, "temperature": 0.9}
        alone = TreeDecoder(tiny(seed), "none", nodes=0)
        (free,) = alone.generate(prompt, **common).ids
        stop = {"stop_strings": [across(free, 4)], "tokenizer": letters()}
        (expected,) = alone.generate(prompt, **common, **stop).ids
        assert expected == free[: len(expected)]
        assert len(expected) <= 7
        for drafter in every_drafter(prompt, free).values():
            output = TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(prompt, **common, **stop)
            assert output.ids == [expected]
            assert output.finish_reasons == ["stop"]


class Sum(StoppingCriteria):
    """Without state: stops where the last two tokens add up to a multiple of 5."""

    def __call__(self, input_ids, scores, **arguments):
        return input_ids[:, -2:].sum(-1) % 5 == 0


class Count(StoppingCriteria):
    """With state: stops at its ``most``-th call, and keeps every prefix that it saw."""

    stateful = False

    def __init__(self, most):
        self.most = most
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids, scores, **arguments):
        (prefix,) = input_ids.tolist()
        self.prefixes.append(prefix)
        return torch.tensor([len(self.prefixes) >= self.most])


class CountOfItsOwn(Count):
    """The same, declared: every sequence gets one of its own."""

    stateful = True


@arch
def test_text_ends_where_a_stopping_criterion_says():
    stopped = 0
    for seed in STOP_SEEDS:
        if len(plain(tiny(seed), PROMPTS[seed], stopping_criteria=[Sum()])) < LENGTH:
            check_stop(seed, PROMPTS[seed], lambda: {"stopping_criteria": [Sum()]}, "stop")
            stopped += 1
    assert stopped > 2


@arch
def test_a_batch_ends_sequence_by_sequence_where_single_runs_end():
    raws = [raw_text(30, tuple(prompt)) for prompt in PROMPTS[30:34]]

    def settings():
        ends = {"eos_token_id": raws[0][4], "stop_strings": across(raws[1], 5), "tokenizer": letters()}
        return ends | {"stopping_criteria": [Sum()]}

    expected = [plain(tiny(30), prompt, **settings()) for prompt in PROMPTS[30:34]]
    assert len({len(text) for text in expected}) > 1
    for drafter in ("auto", "random", repeating()):
        output = TreeDecoder(tiny(30), drafter).generate(PROMPTS[30:34], max_new_tokens=LENGTH, **settings())
        assert output.ids == expected
        check_identities(output, 32)


@arch
@pytest.mark.parametrize("most", [1, 2, 6, LENGTH, LENGTH + 1])
def test_a_stopping_criterion_with_state_sees_every_prefix_once_and_none_past_the_end(most):
    for seed in STOP_SEEDS[:3]:
        prompt = PROMPTS[seed]
        once = Count(most)
        text = plain(tiny(seed), prompt, stopping_criteria=[once])
        assert once.prefixes == [prompt + text[: done + 1] for done in range(len(text))]
        reason = "stop" if most <= LENGTH else "length"
        check_stop(seed, prompt, lambda: {"stopping_criteria": [Count(most)]}, reason)
        for drafter in every_drafter(prompt, raw_text(seed, tuple(prompt))).values():
            count = Count(most)
            TreeDecoder(tiny(seed), drafter, nodes=NODES).generate(
                prompt, max_new_tokens=LENGTH, stopping_criteria=[count]
            )
            assert count.prefixes == once.prefixes


@arch
def test_a_declared_stopping_criterion_counts_for_every_sequence():
    prompts = PROMPTS[30:33]
    count = CountOfItsOwn(5)
    decoder = TreeDecoder(tiny(30), "random")
    for _ in range(2):
        output = decoder.generate(prompts, max_new_tokens=LENGTH, stopping_criteria=[count])
        assert output.ids == [plain(tiny(30), prompt, max_new_tokens=5) for prompt in prompts]
        assert output.finish_reasons == ["stop"] * 3
    assert count.prefixes == []


# --- streaming --------------------------------------------------------------------------------------------------------


class Puts(BaseStreamer):
    def __init__(self):
        self.got: list = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")


STREAMS = {
    "length": lambda raw: {},
    "end token": lambda raw: {"eos_token_id": raw[first_new(raw, 3)]},
    "stop string": lambda raw: {"stop_strings": across(raw, 4), "tokenizer": letters()},
    "criterion": lambda raw: {"stopping_criteria": [Count(6)]},
}


@arch
@pytest.mark.parametrize("stop", list(STREAMS))
def test_a_streamer_gets_what_it_gets_from_generate(stop, capsys):
    for seed in STOP_SEEDS[:3]:
        prompt = PROMPTS[seed]
        raw = raw_text(seed, tuple(prompt))

        def text_streamer():
            return TextStreamer(letters())

        def iterator():
            return TextIteratorStreamer(letters(), skip_prompt=True, timeout=1)

        puts = Puts()
        text = plain(tiny(seed), prompt, streamer=puts, **STREAMS[stop](raw))
        assert puts.got == [[prompt], *([token] for token in text), "end"]
        capsys.readouterr()
        plain(tiny(seed), prompt, streamer=text_streamer(), **STREAMS[stop](raw))
        printed = capsys.readouterr().out
        pieces = iterator()
        plain(tiny(seed), prompt, streamer=pieces, **STREAMS[stop](raw))
        pieces = list(pieces)
        for drafter in every_drafter(prompt, raw).values():
            decoder = TreeDecoder(tiny(seed), drafter, nodes=NODES)

            def streamed(streamer, decoder=decoder, prompt=prompt, raw=raw):
                decoder.generate(prompt, max_new_tokens=LENGTH, streamer=streamer, **STREAMS[stop](raw))
                return streamer

            assert streamed(Puts()).got == puts.got
            streamed(text_streamer())
            assert capsys.readouterr().out == printed
            assert list(streamed(iterator())) == pieces


# --- refusals ---------------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("token_healing", True),
        ("prompt_lookup_num_tokens", 3),
        ("force_words_ids", [[1]]),
        ("constraints", [1]),
        ("assistant_early_exit", 1),
        ("use_mtp", True),
    ],
)
def test_other_ways_of_decoding_are_refused_by_name(name, value):
    decoder = TreeDecoder(tiny(0))
    with pytest.raises(ValueError, match=name):
        decoder.generate([1, 2], max_new_tokens=4, **{name: value})
    config = GenerationConfig()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name):
        decoder.generate([1, 2], max_new_tokens=4, generation_config=config)
    assert decoder.generate([1, 2], max_new_tokens=4).ids == [plain(tiny(0), [1, 2], max_new_tokens=4)]


@arch
@pytest.mark.parametrize("name", ["assistant_model", "inputs_embeds"])
def test_other_arguments_of_generate_are_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        TreeDecoder(tiny(0)).generate([1, 2], max_new_tokens=4, **{name: tiny(0)})


@arch
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("repetition_penalti", "repetition_penalty"),
        ("no_repeat_ngrams", "no_repeat_ngram_size"),
        ("bad_word_ids", "bad_words_ids"),
        ("stop_string", "stop_strings"),
        ("max_tokens", "max_new_tokens"),
        ("logit_processor", "logits_processor"),
        ("stopping_criterion", "stopping_criteria"),
        ("top_logprob", "top_logprobs"),
    ],
)
def test_unknown_settings_are_refused_with_the_nearest_name(wrong, right):
    with pytest.raises(ValueError, match=f"'{wrong}'.*did you mean '{right}'"):
        TreeDecoder(tiny(0)).generate([1, 2], max_new_tokens=4, **{wrong: 1})


@arch
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": -1.0},
        {"no_repeat_ngram_size": 1.5},
        {"min_length": -3, "eos_token_id": 1},
        {"min_new_tokens": 0.5, "eos_token_id": 1},
        {"bad_words_ids": []},
        {"bad_words_ids": [[-1]]},
        {"sequence_bias": {}},
        {"sequence_bias": {(1,): "much"}},
        {"early_stopping": "perhaps"},
        {"cache_implementation": "nonsense"},
        {"suppress_tokens": [3, 4], "forced_eos_token_id": 3},
        {"suppress_tokens": [3, 4], "forced_bos_token_id": [3, 4]},
        {"watermarking_config": WatermarkingConfig(seeding_scheme="nonsense")},
        {"watermarking_config": WatermarkingConfig(greenlist_ratio=2.0)},
        {"forced_eos_token_id": -1},
        {"compile_config": 3},
    ],
    ids=str,
)
def test_bad_and_conflicting_settings_get_the_errors_of_generate(settings):
    def error_of(call):
        try:
            call()
        except Exception as error:
            return type(error), str(error)
        return None

    expected = error_of(lambda: plain(tiny(0), [1, 2], **settings))
    got = error_of(lambda: TreeDecoder(tiny(0)).generate([1, 2], max_new_tokens=LENGTH, **settings))
    assert got == expected
    assert expected is None or issubclass(expected[0], ValueError)


@arch
@pytest.mark.parametrize("settings", [{"typical_p": 0.0}, {"top_h": 3.0}], ids=str)
def test_bad_sampling_settings_get_the_errors_of_generate(settings):
    with pytest.raises(ValueError, match=r"."):
        plain(tiny(0), [1, 2], do_sample=True, **settings)
    with pytest.raises(ValueError, match=next(iter(settings))):
        TreeDecoder(tiny(0)).generate([1, 2], temperature=1.0, **settings)


@arch
def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        TreeDecoder(tiny(0)).generate([1, 2], stop_strings="ab")


@arch
def test_a_streamer_takes_one_sequence():
    for prompts, count in (([[1], [2]], 1), ([[1]], 2)):
        puts = Puts()
        with pytest.raises(ValueError, match="streamer"):
            TreeDecoder(tiny(0)).generate(prompts, num_return_sequences=count, temperature=1.0, streamer=puts)
        assert puts.got == []


# --- processors that fail ---------------------------------------------------------------------------------------------


class Faulty(LogitsProcessor):
    """Fails at the prefix of one length."""

    def __init__(self, fault, length):
        self.fault = fault
        self.length = length

    def __call__(self, input_ids, scores):
        return self.fault(scores) if input_ids.shape[1] == self.length else scores


def raises(scores):
    raise KeyError("my own")


FAULTS = {
    "a row of another shape": (lambda scores: scores[0], "shape"),
    "too few tokens": (lambda scores: scores[:, :-1], "shape"),
    "nothing": (lambda scores: None, "shape"),
    "an error": (raises, "KeyError.*my own"),
    "all masked": (lambda scores: torch.full_like(scores, -torch.inf), "no token"),
    "no number": (lambda scores: torch.full_like(scores, torch.nan), "NaN"),
}


@arch
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_processor_that_fails_is_named_with_its_node_and_the_decoder_goes_on(fault, temperature):
    seed, prompt = 40, PROMPTS[40]
    common = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 2}
    (text,) = TreeDecoder(tiny(seed), "none").generate(prompt, **common).ids
    function, message = FAULTS[fault]
    for drafter, nodes in ((foreseeing(prompt, text), (0, 1, 4)), ("auto", (0,)), ("random", (0,))):
        decoder = TreeDecoder(tiny(seed), drafter, nodes=NODES)
        for node in nodes:
            length = len(prompt) + node
            where = rf"Faulty at node {node} \(position {length - 1}\).*{message}"
            with pytest.raises(LogitsError, match=where) as caught:
                decoder.generate(prompt, **common, logits_processor=[Faulty(function, length)])
            assert "\n" not in str(caught.value)
            output = decoder.generate(prompt, **common)
            assert output.ids == [text]
            check_identities(output, NODES)


@arch
def test_a_processor_that_fails_in_a_batch_leaves_the_decoder_as_it_was():
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    decoder = TreeDecoder(tiny(41), "auto")
    expected = decoder.generate(prompts, max_new_tokens=LENGTH, repetition_penalty=1.5).ids
    for length in (7, 12):
        with pytest.raises(LogitsError, match="Faulty at node"):
            decoder.generate(prompts, max_new_tokens=LENGTH, logits_processor=[Brackets(), Faulty(raises, length)])
        assert decoder.generate(prompts, max_new_tokens=LENGTH, repetition_penalty=1.5).ids == expected


@arch
def test_a_processor_of_transformers_that_fails_is_named():
    decoder = TreeDecoder(tiny(42), "auto")
    with pytest.raises(LogitsError, match=r"PrefixConstrainedLogitsProcessor at node 0 \(position 1\)"):
        decoder.generate([1, 2], max_new_tokens=4, prefix_allowed_tokens_fn=lambda batch_id, text: [])
    with pytest.raises(LogitsError, match=r"SuppressTokensLogitsProcessor at node 0 \(position 1\)"):
        decoder.generate([1, 2], max_new_tokens=4, suppress_tokens=list(range(VOCAB)))
    assert decoder.generate([1, 2], max_new_tokens=4).ids == [plain(tiny(42), [1, 2], max_new_tokens=4)]


# --- batches ----------------------------------------------------------------------------------------------------------

BATCH = [PROMPTS[43], PROMPTS[44], PROMPTS[45], PROMPTS[43][::-1]]


@arch
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if not name.startswith("forced_bos") and "negative" not in name]
)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
def test_a_batch_with_processors_equals_its_single_runs(name, temperature):
    seed = 43
    raw = raw_text(seed, tuple(BATCH[0]))
    common = {"max_new_tokens": 10, "temperature": temperature, "seed": 5}
    singles = [
        TreeDecoder(tiny(seed), "random").generate(prompt, **common, **SETTINGS[name](BATCH[0], raw)).ids[0]
        for prompt in BATCH
    ]
    output = TreeDecoder(tiny(seed), "auto").generate(BATCH, **common, **SETTINGS[name](BATCH[0], raw))
    assert output.ids == singles
    if temperature == 0:
        settings = SETTINGS[name]
        assert singles == [plain(tiny(seed), p, max_new_tokens=10, **settings(BATCH[0], raw)) for p in BATCH]


@arch
@pytest.mark.parametrize("count", [1, 2])
def test_prefix_allowed_tokens_fn_gets_the_index_of_the_prompt(count):
    calls = []

    def function(batch_id, text):
        calls.append((batch_id, text.tolist()))
        return [token for token in range(VOCAB) if (token + batch_id) % 4]

    output = TreeDecoder(tiny(43), "random").generate(
        BATCH,
        max_new_tokens=8,
        num_return_sequences=count,
        temperature=0.9,
        seed=0,
        prefix_allowed_tokens_fn=function,
    )
    walks = [
        (row // count, BATCH[row // count] + ids[:done]) for row, ids in enumerate(output.ids) for done in range(8)
    ]
    assert sorted(calls) == sorted(walks)
    for row, ids in enumerate(output.ids):
        assert all((token + row // count) % 4 for token in ids)


@arch
def test_state_does_not_leak_between_sequences_or_requests():
    seed, brackets = 43, Brackets()
    singles = [plain(tiny(seed), prompt, logits_processor=[Brackets()]) for prompt in BATCH]
    assert singles != [raw_text(seed, tuple(prompt)) for prompt in BATCH]
    decoder = TreeDecoder(tiny(seed), "auto")
    for _ in range(2):
        output = decoder.generate(BATCH, max_new_tokens=LENGTH, logits_processor=[brackets])
        assert output.ids == singles
        assert decoder.generate(BATCH[1], max_new_tokens=LENGTH, logits_processor=[brackets]).ids == [singles[1]]
        assert (brackets.length, brackets.open) == (None, 0)
    with pytest.raises(LogitsError, match="Faulty"):
        decoder.generate(BATCH[0], max_new_tokens=9, logits_processor=[brackets, Faulty(raises, len(BATCH[0]) + 3)])
    assert decoder.generate(BATCH, max_new_tokens=LENGTH, logits_processor=[brackets]).ids == singles


@arch
@pytest.mark.parametrize("prompts", [BATCH[:1], BATCH[:2]], ids=["one prompt", "two prompts"])
@pytest.mark.parametrize(
    "settings_of",
    [
        lambda: {"logits_processor": [Brackets()]},
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836])},
        lambda: {"guidance_scale": 2.0},
    ],
    ids=["brackets", "SynthID", "guidance_scale"],
)
def test_samples_of_one_prompt_have_processors_of_their_own(prompts, settings_of):
    common = {"max_new_tokens": LENGTH, "num_return_sequences": 3, "temperature": 1.0, "seed": 9}
    expected = TreeDecoder(tiny(43), "none", nodes=0).generate(prompts, **common, **settings_of()).ids
    assert len(set(map(tuple, expected))) == 3 * len(prompts)
    for drafter in ("auto", "random"):
        assert TreeDecoder(tiny(43), drafter).generate(prompts, **common, **settings_of()).ids == expected
    # The first sample of a request is the one that is drawn alone.
    for row, prompt in enumerate(prompts):
        alone = TreeDecoder(tiny(43), "auto").generate(prompt, **common | {"num_return_sequences": 1}, **settings_of())
        assert alone.ids[0] == expected[3 * row]
    if "logits_processor" in settings_of():
        assert all(map(Brackets.accepts, expected))


@unit
def test_the_grammar_of_these_tests_is_one():
    assert Brackets.accepts([0, 4, 1, 2, 5])
    assert not Brackets.accepts([1])
    assert not Brackets.accepts([0, 0, 3, 0])
    assert not all(Brackets.accepts(raw_text(seed, tuple(PROMPTS[seed]))) for seed in range(5))


@unit
def test_the_tokenizer_of_these_tests_reads_its_own_text():
    tokenizer = letters()
    assert [tokenizer.decode([token]) for token in (0, 8, 32)] == ["a", "ab", "aba"]
    assert tokenizer.decode(tokenizer("abcdefgh")["input_ids"]) == "abcdefgh"
