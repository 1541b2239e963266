"""Trees inside ``model.generate``, and texts that go on over several turns."""

import copy
import threading

import numpy as np
import pytest
import torch
from reference import greedy_text, row_values
from transformers import DynamicCache, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import treepass
from treepass.drafters import LanguageModelDrafter
from treepass.errors import LogitsError, PromptError
from treepass.generate import TreeDecoder
from treepass.testing import WatchedTarget, tiny_llama

arch = pytest.mark.arch

VOCAB = 64
BATCH = torch.tensor([[0, 0, 5, 9, 3], [7, 3, 2, 1, 9], [0, 4, 4, 2, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
SETTINGS = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "prompt's n-grams": {"encoder_no_repeat_ngram_size": 2},
    "encoder penalty": {"encoder_repetition_penalty": 1.5},
    "minimum and two ends": {"min_new_tokens": 10, "eos_token_id": [26, 3, 17]},
    "minimum length": {"min_length": 14, "eos_token_id": [26, 3, 17, 9]},
    "bad words": {"bad_words_ids": [[26], [3, 4]]},
    "forced end": {"forced_eos_token_id": 11},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, text: [row + 1, row + 20, int(text[-1]) // 2 + 5, 40]},
    "bias": {"sequence_bias": {(5,): 3.0, (7, 9): -4.0}},
}


class Collected(BaseStreamer):
    def __init__(self):
        self.values, self.ends = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.fixture(scope="module")
def model():
    return tiny_llama(3, vocab_size=VOCAB)


@arch
@pytest.mark.parametrize("drafter", ["auto", "random"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_padded_batch_is_what_generate_writes(model, name, drafter):
    options = {
        **{"attention_mask": MASK, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0},
        **{"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        **SETTINGS[name],
    }
    expected = model.generate(BATCH, **options)
    trees = treepass.tree_decoding(drafter)
    got = model.generate(BATCH, custom_generate=trees, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert trees.output.report.accepted + trees.output.report.passes > 24
    assert len(got.scores) == len(got.logits) == len(expected.scores)
    for row, ids in enumerate(trees.output.ids):
        for step in range(len(ids)):  # generate goes on computing rows of texts that have ended
            # transformers rounds its rows to float32
            torch.testing.assert_close(got.logits[step][row].float(), expected.logits[step][row], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(got.scores[step][row].float(), expected.scores[step][row], atol=1e-5, rtol=1e-5)


@arch
def test_samples_share_a_prefill_and_torchs_seed_decides(model):
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 3, "max_new_tokens": 12}
    texts = []
    for drafter, nodes in (("auto", 16), (None, 0)):
        torch.manual_seed(5)
        trees = treepass.tree_decoding(drafter, nodes=nodes)
        texts.append(
            model.generate(BATCH, attention_mask=MASK, pad_token_id=0, custom_generate=trees, **options)[:, 5:]
        )
        assert [report.prompt_rows for report in trees.output.reports] == [2, 0, 0, 4, 0, 0, 3, 0, 0]
    assert torch.equal(*texts)
    assert len({tuple(row.tolist()) for row in texts[0][:3]}) > 1
    torch.manual_seed(6)
    other = model.generate(
        BATCH, attention_mask=MASK, pad_token_id=0, custom_generate=treepass.tree_decoding(), **options
    )
    assert not torch.equal(other[:, 5:], texts[0])


@arch
@pytest.mark.parametrize("form", ["callable", "folder"])
def test_a_streamer_gets_every_token_and_nothing_past_the_end(model, form):
    ids = BATCH[1:2]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [26, 17, 6], "pad_token_id": 0}
    expected, got = Collected(), Collected()
    text = model.generate(ids, streamer=expected, **options)
    if form == "callable":
        same = model.generate(ids, custom_generate=treepass.tree_decoding(streamer=got), **options)
    else:
        same = model.generate(ids, custom_generate=treepass.RECIPE, trust_remote_code=True, streamer=got, **options)
    assert torch.equal(text, same)
    assert got.values == expected.values
    assert got.ends == expected.ends == 1


@arch
def test_what_does_not_fit_is_refused_by_name(model):
    trees = treepass.tree_decoding()
    cache = DynamicCache()
    model(BATCH[1:2, :3], past_key_values=cache)
    for options, message in (
        ({"past_key_values": cache}, "a cache from elsewhere"),
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"inputs_embeds": torch.zeros(1, 2, 32, dtype=torch.float64)}, "inputs_embeds|empty|at least one"),
    ):
        with pytest.raises((ValueError, PromptError), match=message):
            model.generate(BATCH[1:2], max_new_tokens=4, custom_generate=trees, **options)
    with pytest.raises(ValueError, match="one prompt and one sample"):
        model.generate(
            BATCH, attention_mask=MASK, pad_token_id=0, custom_generate=treepass.tree_decoding(streamer=Collected())
        )
    with pytest.raises(ValueError, match="tokenizer"):
        treepass.tree_decoding(stop_strings="x")


@arch
def test_the_models_settings_stay_as_they_were(model):
    before = copy.deepcopy(model.generation_config.to_dict())
    TreeDecoder(model).generate([1, 2, 3], max_new_tokens=3, repetition_penalty=1.3, eos_token_id=5)
    model.generate(BATCH[1:2], max_new_tokens=3, custom_generate=treepass.tree_decoding())
    assert model.generation_config.to_dict() == before


# --- texts that go on -------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("drafter", ["auto", "random", "none"])
def test_a_second_turn_computes_only_what_is_new(model, drafter):
    decoder = TreeDecoder(model, drafter)
    decoder.target = watched = WatchedTarget(decoder.target)
    session = decoder.session()
    first = session.generate([5, 9, 3, 7], max_new_tokens=10)
    assert first.ids[0] == greedy_text(model, [5, 9, 3, 7], 10)
    second_prompt = [*session.ids, 33, 12, 60]
    watched.forests.clear()
    second = session.generate(second_prompt, max_new_tokens=12)
    assert second.ids[0] == greedy_text(model, second_prompt, 12)
    # The last token of the first turn has no row yet; of the new prompt all but the last are computed ahead.
    assert second.report.prompt_rows == 3
    assert second.records[0].context_length == len(second_prompt) - 1
    assert watched.forests[0].context_lengths == (13,)
    rows = [keys for keys, _ in (session._cache.rows(layer) for layer in range(2))]
    fresh = row_values(model, [session.ids[:-1]])[0]
    assert float((torch.stack([keys[:, -1] for keys in rows]) - fresh.keys).abs().max()) < 1e-10


@arch
def test_a_turn_that_departs_from_the_text_or_fails_leaves_the_session_right(model):
    session = TreeDecoder(model).session()
    session.generate([5, 9, 3, 7], max_new_tokens=10)
    edited = [*session.ids[:6], 1, 2, 3]
    out = session.generate(edited, max_new_tokens=8)
    assert out.report.prompt_rows == 2
    assert out.ids[0] == greedy_text(model, edited, 8)
    shorter = session.ids[:4]
    assert session.generate(shorter, max_new_tokens=8).ids[0] == greedy_text(model, shorter, 8)

    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 9:
                raise RuntimeError("broken")
            return scores

    with pytest.raises(LogitsError, match="Broken at node"):
        session.generate([*shorter, 8, 8], max_new_tokens=20, logits_processor=[Broken()])
    again = [*shorter, 8, 8, 1]
    assert session.generate(again, max_new_tokens=8).ids[0] == greedy_text(model, again, 8)
    for wrong, message in (({"num_return_sequences": 2}, "one text"), ({}, "one prompt")):
        with pytest.raises(ValueError, match=message):
            session.generate([[1], [2]] if not wrong else [1, 2], **wrong)


@arch
def test_sampling_goes_on_as_in_one_text(model):
    rng = np.random.default_rng(0)
    prompt = rng.integers(VOCAB, size=6).tolist()
    whole = TreeDecoder(model).generate(prompt, max_new_tokens=24, temperature=0.8, seed=3).ids[0]
    session = TreeDecoder(model).session()
    parts: list[int] = []
    for _ in range(3):
        parts += session.generate([*prompt, *parts], max_new_tokens=8, temperature=0.8, seed=3).ids[0]
    assert parts == whole


# --- token by token ---------------------------------------------------------------------------------------------------


@arch
def test_a_stream_gives_the_tokens_of_generate_and_ends_with_its_reader(model):
    decoder = TreeDecoder(model)
    whole = decoder.generate([5, 9, 3], max_new_tokens=20, temperature=0.8, seed=4)
    streamed = list(decoder.stream([5, 9, 3], max_new_tokens=20, temperature=0.8, seed=4))
    assert [choice.token for choice in streamed] == whole.ids[0]
    np.testing.assert_allclose([choice.logprob for choice in streamed], whole.logprobs[0], rtol=0, atol=1e-10)
    records = []
    stream = decoder.stream([5, 9, 3], max_new_tokens=400, callback=records.append)
    first = next(stream)
    assert first.token == greedy_text(model, [5, 9, 3], 1)[0]
    threads = threading.active_count()
    stream.close()
    assert threading.active_count() == threads - 1
    assert sum(len(record.emitted) for record in records) < 400


@arch
def test_an_error_of_a_stream_is_raised_where_it_is_read(model):
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 6:
                raise RuntimeError("broken")
            return scores

    stream = TreeDecoder(model, "none").stream([5, 9, 3], logits_processor=[Broken()])
    assert [next(stream).token for _ in range(4)] == greedy_text(model, [5, 9, 3], 4)
    with pytest.raises(LogitsError, match="Broken at node"):
        next(stream)
    with pytest.raises(ValueError, match="one prompt and one sample"):
        next(TreeDecoder(model).stream([[1], [2]]))


# --- another model as the drafter -------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 8, "seed": 6}])
def test_a_draft_model_changes_no_text_and_one_that_is_the_target_is_accepted_whole(model, sampling):
    prompts = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6]]
    plain = TreeDecoder(model, None).generate(prompts, max_new_tokens=30, eos_token_id=(), **sampling)
    same = TreeDecoder(model, model).generate(prompts, max_new_tokens=30, eos_token_id=(), **sampling)
    other = TreeDecoder(model, tiny_llama(8, vocab_size=VOCAB, layers=1)).generate(
        prompts, max_new_tokens=30, eos_token_id=(), **sampling
    )
    assert same.drafter == "lm"
    assert same.ids == other.ids == plain.ids
    # Of a chain of 5 as many are bought as seem worth it, and all of those are right.
    assert same.report.tokens_per_pass > 2.5
    assert same.report.accepted == same.report.nodes


@arch
def test_a_draft_model_computes_no_row_twice(model):
    drafter = LanguageModelDrafter(model, VOCAB)
    drafter.target = watched = WatchedTarget(drafter.target)
    out = TreeDecoder(model, drafter).generate([5, 9, 3, 7], max_new_tokens=25)
    rows = sum(forest.rows for forest in watched.forests)
    # Every token of the text but the last, and at most one more per pass for the node behind an accepted chain.
    assert rows <= 4 + 25 + out.report.passes
    assert drafter._drafts == {}


@arch
def test_another_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match="vocabulary of 4000 tokens, the target one of 64"):
        TreeDecoder(model, tiny_llama(0, vocab_size=4000))


# --- forced tokens ----------------------------------------------------------------------------------------------------

TEMPLATE = [11, 12, 13, 14, 15, 16, 17, 18]


class Form(LogitsProcessor):
    """Every fourth token is free; the ones between are those of a template, which it says beforehand."""

    def __init__(self, start):
        self.start, self.calls = start, []

    def forced_token(self, input_ids):
        place = input_ids.shape[1] - self.start
        return None if place % 4 == 3 else TEMPLATE[place % 4]

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids[0].tolist())
        token = self.forced_token(input_ids)
        if token is None:
            return scores
        only = torch.full_like(scores, -float("inf"))
        only[:, token] = scores[:, token]
        return only


@arch
@pytest.mark.parametrize("drafter", ["none", "auto", "random"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
def test_forced_tokens_cost_no_rows_but_their_own(model, drafter, sampling):
    form = Form(4)
    out = TreeDecoder(model, drafter).generate(
        [5, 9, 3, 7], max_new_tokens=40, eos_token_id=(), logits_processor=[form], **sampling
    )
    plain = TreeDecoder(model, nodes=0).generate(
        [5, 9, 3, 7], max_new_tokens=40, eos_token_id=(), logits_processor=[Form(4)], **sampling
    )
    assert out.ids == plain.ids
    text = [5, 9, 3, 7, *out.ids[0]]
    assert form.calls == [text[:length] for length in range(4, 44)]
    # Three forced tokens and the free one behind them come from each pass, whose tree is those three.
    assert [record.emitted[:3] for record in out.records] == [(11, 12, 13)] * 10
    assert out.report.passes == 10
    assert out.report.nodes == out.report.accepted == 30


@arch
def test_a_prefix_function_that_allows_one_token_forces_it(model):
    def allowed(row, text):
        place = len(text) - 4
        return [TEMPLATE[place]] if place < len(TEMPLATE) else list(range(20, 60))

    out = TreeDecoder(model, "none").generate(
        [5, 9, 3, 7], max_new_tokens=12, eos_token_id=(), prefix_allowed_tokens_fn=allowed
    )
    ids = torch.tensor([[5, 9, 3, 7]])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )
    assert out.ids[0] == expected[0, 4:].tolist()
    assert out.records[0].emitted == (*TEMPLATE, out.ids[0][8])
