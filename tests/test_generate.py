"""What ``TreeDecoder`` refuses, what it leaves alone, and what it does at the model's maximum length."""

import copy
import math

import numpy as np
import pytest
import torch
from reference import greedy_text
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from treepass.errors import LogitsError, PromptError, TreepassError, UnsupportedModelError
from treepass.generate import TreeDecoder
from treepass.testing import FunctionDrafter, WatchedTarget, tiny_llama, tiny_recurrent
from treepass.tree import DraftTree

unit = pytest.mark.unit
arch = pytest.mark.arch

VOCAB = 64
PROMPT = [7, 3, 11, 7, 3]
DRAFTERS = ("suffix", "recycling", "auto", "random", "none")


@pytest.fixture(scope="module")
def small():
    """A tiny model with room for 32 tokens."""
    return tiny_llama(4, vocab_size=VOCAB, max_position_embeddings=32)


@pytest.fixture(scope="module")
def decoder(small):
    return TreeDecoder(small)


# --- bad input --------------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        ([[]], "the prompt is empty"),
        ([[1, 2], []], "prompt 1 is empty"),
        (torch.zeros(0, dtype=torch.long), "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), "the prompt is empty"),
        ([1] * 32, "has 32 tokens, but the model's maximum is 32 with at least one new token; shorten the prompt"),
        ([1] * 33, "has 33 tokens"),
        ([[1], [1] * 40], "has 40 tokens"),
        ([1, 64], "token 64, outside the model's vocabulary of 64; was it made with another tokenizer"),
        ([1, -1], "token -1, outside"),
        ([1, 2**70], "outside the model's vocabulary"),
        ([1.0, 2.0], "must be integers, got 1.0"),
        ([1, 2.5], "must be integers, got 2.5"),
        ([True, False], "must be integers, got True"),
        (torch.tensor([1.0, 2.0]), "must be integers, got 1.0"),
        (torch.tensor([[True, False]]), "must be integers, got True"),
        ([1, None], "must be integers, got None"),
        ([1, [2]], "must be integers"),
        ([[[1, 2]]], "one or two dimensions"),
        (["a", "b"], "must be integers, got 'a'"),
        ("Hello", "must be token ids, got a string; encode it with the model's tokenizer"),
        ([[1, 2], 3], "must be"),
        (5, "must be"),
        (None, "must be"),
        (torch.tensor(5), "must be"),
        (torch.tensor(0), "must be"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_prompts_that_are_none_are_refused(decoder, prompt, message):
    with pytest.raises(PromptError, match=message) as caught:
        decoder.generate(prompt, max_new_tokens=2)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@arch
@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        tuple(PROMPT),
        [PROMPT],
        (tuple(PROMPT),),
        torch.tensor(PROMPT),
        torch.tensor([PROMPT], dtype=torch.int32),
        torch.tensor(PROMPT, dtype=torch.uint8),
        np.array(PROMPT),
        np.array([PROMPT], dtype=np.int16),
        [torch.tensor(PROMPT)],
        [np.array(PROMPT)],
        [np.int64(token) for token in PROMPT],
    ],
    ids=lambda value: repr(value)[:60],
)
def test_prompts_come_in_many_forms(small, decoder, prompt):
    assert decoder.generate(prompt, max_new_tokens=4).ids == [greedy_text(small, PROMPT, 4)]


@arch
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 4), "attention_mask must have the shape of input_ids"),
        (torch.ones(2, 5), "attention_mask must have the shape"),
        ([1, 1], "attention_mask must have the shape"),
        ([], "attention_mask must have the shape"),
        (torch.zeros(1, 5), "the prompt is empty"),
    ],
    ids=repr,
)
def test_masks_that_do_not_fit_are_refused(decoder, mask, message):
    with pytest.raises(PromptError, match=message):
        decoder.generate([PROMPT], attention_mask=mask, max_new_tokens=2)


@arch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be an integer >= 1, got -3"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer >= 1, got True"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer >= 1, got 1.5"),
        ({"max_new_tokens": "8"}, "max_new_tokens must be an integer >= 1, got '8'"),
        ({"num_return_sequences": 0}, "num_return_sequences must be an integer >= 1, got 0"),
        ({"num_return_sequences": 2.0}, "num_return_sequences must"),
        ({"temperature": -1}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": math.nan}, "temperature must"),
        ({"temperature": math.inf}, "temperature must"),
        ({"top_p": 0}, "top_p must"),
        ({"top_p": 1.1}, "top_p must"),
        ({"min_p": 2}, "min_p must"),
        ({"top_k": -1}, "top_k must"),
        ({"seed": 0.5}, "seed must"),
        ({"eos_token_id": 1.5}, "eos_token_id must"),
        ({"eos_token_id": "x"}, "eos_token_id must"),
        ({"eos_token_id": [1, 2.5]}, "eos_token_id must"),
        ({"eos_token_id": True}, "eos_token_id must"),
    ],
    ids=str,
)
def test_arguments_outside_their_range_are_refused(decoder, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        decoder.generate(PROMPT, **arguments)
    assert "\n" not in str(caught.value)


@arch
@pytest.mark.parametrize("kind", [list, tuple, set, np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]])
def test_end_tokens_come_in_many_forms(small, kind):
    text = greedy_text(small, PROMPT, 16)
    end = text[5]
    decoder = TreeDecoder(small)
    for ends in ([end], [end, text[3]], [(end + 1) % VOCAB, end]):
        expected = greedy_text(small, PROMPT, 16, ends)
        assert len(expected) < 16
        assert decoder.generate(PROMPT, max_new_tokens=16, eos_token_id=kind(ends)).ids == [expected]
    expected = text[: text.index(end) + 1]
    assert decoder.generate(PROMPT, max_new_tokens=16, eos_token_id=np.int64(end)).ids == [expected]
    assert decoder.generate(PROMPT, max_new_tokens=16, eos_token_id=torch.tensor(end)).ids == [expected]


@arch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "sufix"}, "unknown drafter 'sufix'.*did you mean 'suffix'"),
        ({"drafter": "recycle"}, "unknown drafter 'recycle'.*did you mean 'recycling'"),
        ({"drafter": "zzz"}, "unknown drafter 'zzz', known are: auto, suffix"),
        ({"drafter": ""}, "unknown drafter ''"),
        ({"nodes": -1}, "nodes must be an integer from 0 to 512, got -1"),
        ({"nodes": 513}, "nodes must be an integer from 0 to 512, got 513"),
        ({"nodes": True}, "nodes must be an integer"),
        ({"nodes": 2.0}, "nodes must be an integer"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"kernel": "eagr"}, "unknown kernel 'eagr'.*did you mean 'eager'"),
    ],
    ids=str,
)
def test_decoders_with_unknown_settings_are_refused(small, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        TreeDecoder(small, **arguments)
    assert "\n" not in str(caught.value)


@arch
@pytest.mark.parametrize("nodes", [0, 1, 512])
def test_node_limits_at_the_ends_work(small, nodes):
    output = TreeDecoder(small, "random", nodes=nodes).generate(PROMPT, max_new_tokens=20)
    assert output.ids == [greedy_text(small, PROMPT, 20)]
    assert output.report.nodes == 0 or nodes


# --- models that cannot decode trees ----------------------------------------------------------------------------------


def training():
    return tiny_llama(0).train()


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1, num_heads=2)).eval()


def alibi():
    return BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2)).eval()


def on_meta():
    return tiny_llama(0).to("meta")


def decoder_half():
    return BartForCausalLM(BartConfig(vocab_size=16, d_model=8, decoder_layers=1, decoder_attention_heads=2)).eval()


def headless():
    return LlamaModel(tiny_llama(0).config).eval()


@arch
@pytest.mark.parametrize(
    ("build", "kind", "reason"),
    [
        (tiny_recurrent, "mamba", "recurrent state cannot be rolled back"),
        (training, "llama", r"training mode, in whole or in part; call model.eval\(\) first"),
        (encoder_decoder, "t5", "encoder-decoder"),
        (decoder_half, "bart", "takes no position ids"),
        (alibi, "bloom", "computed from row numbers"),
        (on_meta, "llama", "meta device"),
        (headless, "llama", "no language-model head"),
        (lambda: torch.nn.Linear(2, 2), "Linear", "not a transformers model"),
        (lambda: None, "NoneType", "not a transformers model"),
        (lambda: torch.nn.DataParallel(tiny_llama(0)), "DataParallel", "not a transformers model"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_models_that_cannot_decode_trees_are_refused(build, kind, reason):
    with pytest.raises(UnsupportedModelError, match=f"model type '{kind}': .*{reason}") as caught:
        TreeDecoder(build())
    assert "\n" not in str(caught.value)


@arch
def test_a_model_put_into_training_mode_later_is_refused():
    model = tiny_llama(0)
    decoder = TreeDecoder(model)
    decoder.generate(PROMPT, max_new_tokens=2)
    model.train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        decoder.generate(PROMPT, max_new_tokens=2)


# --- the user's model is left as it was -------------------------------------------------------------------------------


def state_of(model) -> dict:
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "generation config": copy.deepcopy(model.generation_config.to_dict()),
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "weights": [(name, weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()],
        "gradients": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state(),
        "numpy random": np.random.get_state()[1].tolist(),
    }


def check_same(before: dict, after: dict) -> None:
    for name, value in before.items():
        if name == "weights":
            for (one, a, grad), (other, b, other_grad) in zip(value, after[name], strict=True):
                assert one == other
                assert torch.equal(a, b)
                assert grad == other_grad
        elif name == "random":
            assert torch.equal(value, after[name])
        else:
            assert value == after[name], name


@arch
@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("kernel", ["grouped", "sdpa", "eager"])
def test_the_model_is_left_as_it_was(own, kernel):
    model = tiny_llama(0, attn=own, dtype=torch.float32)
    text = greedy_text(model, PROMPT, 8)
    before = state_of(model)
    decoder = TreeDecoder(model, kernel=kernel)
    check_same(before, state_of(model))
    decoder.generate(PROMPT, max_new_tokens=8)
    decoder.generate(PROMPT, max_new_tokens=8, temperature=1.0)
    check_same(before, state_of(model))
    assert greedy_text(model, PROMPT, 8) == text
    # It can still be trained.
    model.train()(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert model.lm_head.weight.grad is not None


@arch
@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("kernel", ["grouped", "sdpa", "eager"])
@pytest.mark.parametrize("call", [1, 3, 6])
def test_the_model_is_left_as_it_was_after_an_exception_within_the_pass(own, kernel, call):
    model = tiny_llama(0, attn=own, dtype=torch.float32)
    text = greedy_text(model, PROMPT, 8)
    decoder = TreeDecoder(model, "random", kernel=kernel)
    before = state_of(model)
    layer, calls = model.model.layers[1].mlp, 0
    forward = layer.forward

    def failing(hidden):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("the device is gone")
        return forward(hidden)

    layer.forward = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        decoder.generate(PROMPT, max_new_tokens=8)
    del layer.forward
    check_same(before, state_of(model))
    assert greedy_text(model, PROMPT, 8) == text
    # The decoder works on as well.
    assert decoder.generate(PROMPT, max_new_tokens=8).ids == [text]


@arch
def test_a_decoder_works_on_after_an_interrupt_and_an_error_in_the_logits(small):
    decoder = TreeDecoder(small)
    expected = greedy_text(small, PROMPT, 12)

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPT, max_new_tokens=12, callback=interrupt)
    right = decoder.target
    decoder.target = WatchedTarget(right, lambda forest, logits: logits * math.nan)
    with pytest.raises(LogitsError, match="node 0"):
        decoder.generate(PROMPT, max_new_tokens=12)
    decoder.target = right
    assert decoder.generate(PROMPT, max_new_tokens=12).ids == [expected]


# --- the model's maximum length ---------------------------------------------------------------------------------------


def deepest_chain(session, plan, depth) -> DraftTree:
    """A draft that goes as deep as it is told, and then further."""
    return DraftTree.chain([session.ids[-1]] * (depth + 40))


@arch
@pytest.mark.parametrize("drafter", [*DRAFTERS, FunctionDrafter(deepest_chain)], ids=lambda d: getattr(d, "name", d))
@pytest.mark.parametrize("length", [1, 5, 29, 30, 31])
def test_text_ends_at_the_models_maximum(small, drafter, length):
    prompt = [(7 * i + 3) % VOCAB for i in range(length)]
    decoder = TreeDecoder(small, drafter, nodes=64)
    target = decoder.target = WatchedTarget(decoder.target)
    room = 32 - length
    for asked in (room - 1, room, room + 1, 1000):
        if asked < 1:
            continue
        output = decoder.generate(prompt, max_new_tokens=asked)
        emitted = min(asked, room)
        assert output.ids == [greedy_text(small, prompt, emitted)]
        assert output.finish_reasons == ["length"]
        assert output.sequences.shape == (1, length + emitted)
        cut = [warning for warning in output.report.warnings if "max_new_tokens" in warning]
        assert cut == (
            [f"max_new_tokens was cut from {asked} to {room} by the model's maximum length"] if asked > room else []
        )
    assert max(int(forest.positions.max()) for forest in target.forests) < 32


@arch
def test_drafts_stop_where_the_text_must_end(small):
    """No node is deeper than the text may grow: the last level is the target's own choice."""
    depths = []

    def tree_of(session, plan, depth):
        depths.append(depth)
        return deepest_chain(session, plan, depth)

    decoder = TreeDecoder(small, FunctionDrafter(tree_of), nodes=64)
    output = decoder.generate(PROMPT, max_new_tokens=6)
    written = 0
    # Where only one token is left, the drafter is not even asked.
    for record, depth in zip(output.records, [*depths, 0][: len(output.records)], strict=True):
        assert depth == 6 - written - 1
        assert record.nodes == depth
        written += len(record.emitted)
    assert written == 6


@arch
def test_a_batch_near_the_maximum_ends_sequence_by_sequence(small):
    prompts = [[1] * 30, [2, 3, 4], [5] * 31, list(range(20))]
    decoder = TreeDecoder(small, "random")
    target = decoder.target = WatchedTarget(decoder.target)
    output = decoder.generate(prompts, max_new_tokens=16)
    assert output.ids == [greedy_text(small, prompt, min(16, 32 - len(prompt))) for prompt in prompts]
    assert max(int(forest.positions.max()) for forest in target.forests) < 32
    assert len([warning for warning in output.report.warnings if "max_new_tokens" in warning]) == 3
    assert [len(report.warnings) for report in output.reports] == [1, 0, 1, 1]


# --- what comes back --------------------------------------------------------------------------------------------------


@arch
def test_callback_and_records_are_the_same(small):
    seen = []
    decoder = TreeDecoder(small)
    output = decoder.generate([PROMPT, [1, 2]], max_new_tokens=8, callback=seen.append)
    assert seen == output.records
    assert {record.sequence for record in seen} == {0, 1}
    again = TreeDecoder(small).generate([PROMPT, [1, 2]], max_new_tokens=8, keep_records=False)
    assert again.records == []
    assert again.ids == output.ids
    assert again.report.passes == output.report.passes


@arch
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_text_can_be_interrupted(small, after):
    calls = 0

    def should_stop():
        nonlocal calls
        calls += 1
        return calls > after

    expected = greedy_text(small, PROMPT, 20)
    output = TreeDecoder(small, "none").generate(PROMPT, max_new_tokens=20, should_stop=should_stop)
    assert output.ids == [expected[:after]]
    assert output.finish_reasons == ["interrupted"]
    assert output.report.passes == after


@arch
def test_the_output_says_how_it_was_made(small):
    output = TreeDecoder(small, "random").generate(PROMPT, max_new_tokens=4, seed=12)
    assert (output.drafter, output.rule, output.lossless, output.seed) == ("random", "follow", True, 12)
    assert output.sequences.dtype == torch.int64


@unit
def test_errors_are_of_one_family():
    for error in (PromptError, UnsupportedModelError, LogitsError):
        assert issubclass(error, TreepassError)
    assert not issubclass(TreepassError, ValueError)


# --- the model's own settings -----------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 5}])
def test_settings_of_the_model_apply(setting):
    model = tiny_llama(4, vocab_size=VOCAB, eos_token_id=[9, 22, 40])
    plain = greedy_text(model, PROMPT, 20, [9, 22, 40])
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    expected = greedy_text(model, PROMPT, 20, [9, 22, 40])
    output = TreeDecoder(model).generate(PROMPT, max_new_tokens=20)
    assert output.ids == [expected]
    assert output.report.warnings == []
    assert expected != plain or setting == {"min_new_tokens": 5}


@arch
def test_settings_that_leave_the_text_alone_are_not_named(small):
    assert TreeDecoder(small).generate(PROMPT, max_new_tokens=3).report.warnings == []
