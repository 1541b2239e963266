"""A batch is a forest of sequences that know nothing of each other: each text is the one that its prompt gets alone."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from reference import cache_values, greedy_text
from torch.multiprocessing.reductions import StorageWeakRef

from treepass import attention as attention_module
from treepass import cache as cache_module
from treepass.cache import PassCache, TreeCache
from treepass.drafters import DRAFTERS
from treepass.errors import PromptError, TreepassWarning, UnsupportedModelError
from treepass.generate import TreeDecoder, TreeOutput
from treepass.target import HFTarget, prefill
from treepass.testing import FunctionDrafter, NoDowncasts, WatchedTarget, random_order, random_tree, tiny_llama
from treepass.testing.zoo import zoo_model
from treepass.tree import DraftTree, Forest

arch = pytest.mark.arch

VOCAB = 64
TOKENS = 12
ATTENTIONS = ("dense", "per_sequence")
SETTINGS = {"greedy": {}} | {f"seed {seed}": {"temperature": 0.7, "top_p": 0.9, "seed": seed} for seed in range(3)}
WINDOWED = ("gemma3_text", "mistral", "gpt_oss")
"""Types of the zoo with a window of 8 tokens."""


def random_ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(VOCAB, size=length).tolist()


EIGHT = [random_ids(length, 1) for length in (31, 3, 200, 9, 64, 5, 120, 16)]


@cache
def model_of(name: str):
    return tiny_llama(1, vocab_size=VOCAB) if name == "llama" else zoo_model(name, 1)


@cache
def _alone(name: str, prompt: tuple[int, ...], setting: str, tokens: int) -> tuple[int, ...]:
    if setting == "greedy":
        return tuple(greedy_text(model_of(name), list(prompt), tokens))
    output = TreeDecoder(model_of(name), "none", attention="dense").generate(
        list(prompt), max_new_tokens=tokens, **SETTINGS[setting]
    )
    return tuple(output.ids[0])


def alone(prompts: Sequence[list[int]], setting: str = "greedy", name: str = "llama", tokens: int = TOKENS):
    """What each prompt gets alone: from transformers if greedy, else from a plain decoding of one sequence."""
    return [list(_alone(name, tuple(prompt), setting, tokens)) for prompt in prompts]


def run(decoder: TreeDecoder, prompts: Any, **arguments: Any) -> TreeOutput:
    """``generate`` with every count checked against the passes that the model really made."""
    target = decoder.target
    watched = decoder.target = WatchedTarget(target)
    forests: list[int] = []
    try:
        output = decoder.generate(
            prompts, should_stop=lambda: forests.append(len(watched.forests)), **{"max_new_tokens": TOKENS} | arguments
        )
    finally:
        decoder.target = target
    check_counts(output)
    assert output.report.rows == sum(forest.rows for forest in watched.forests)
    # One pass serves all: there are as many as the sequence with the most passes has.
    passes = watched.forests[forests[0] :]
    assert len(passes) == max(report.passes for report in output.reports)
    assert [len(forest.trees) for forest in passes] == [
        sum(report.passes > number for report in output.reports) for number in range(len(passes))
    ]
    return output


def check_counts(output: TreeOutput) -> None:
    """The identities of every sequence's records and report, and of the report of all."""
    assert len(output.ids) == len(output.reports) == len(output.finish_reasons)
    assert {record.sequence for record in output.records} == set(range(len(output.ids)))
    for sequence, (ids, report) in enumerate(zip(output.ids, output.reports, strict=True)):
        records = [record for record in output.records if record.sequence == sequence]
        assert [record.index for record in records] == list(range(report.passes))
        assert [token for record in records for token in record.emitted] == ids
        assert report.nodes == sum(record.nodes for record in records)
        assert report.accepted == sum(len(record.path) for record in records)
        assert report.cut_on_accepted == sum(record.ended == "accepted" for record in records)
    for report in (*output.reports, output.report):
        assert report.emitted == report.accepted + report.passes - report.cut_on_accepted
        assert report.rows == report.prompt_rows + report.passes + report.nodes
    for name in ("passes", "emitted", "accepted", "cut_on_accepted", "nodes", "prompt_rows", "rows"):
        assert getattr(output.report, name) == sum(getattr(report, name) for report in output.reports)


# --- drafters that know the texts -------------------------------------------------------------------------------------

Shape = Callable[[int, int, list[int], int], DraftTree]
"""(sequence, root, the true continuation, depth) -> tree"""


def knowing(prompts: Sequence[list[int]], texts: Sequence[list[int]], shape: Shape) -> FunctionDrafter:
    """A drafter that recognises each sequence by its prompt and knows how it goes on."""
    known = {tuple(prompt): (i, prompt + text) for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))}

    def tree_of(session, plan, depth):
        sequence, whole = known[tuple(session.ids[: session.prompt_length])]
        return shape(sequence, session.ids[-1], whole[len(session.ids) :], depth)

    return FunctionDrafter(tree_of)


def chain(root: int, coming: list[int], right: int, depth: int) -> DraftTree:
    """A chain whose first tokens are right and whose others are not."""
    return DraftTree.chain([root, *(t if i < right else (t + 1) % VOCAB for i, t in enumerate(coming[:depth]))])


def right_for_one(sequence, root, coming, depth):
    return chain(root, coming, 99 if sequence == 2 else 0, min(depth, 6))


def wrong_for_one(sequence, root, coming, depth):
    return chain(root, coming, 0 if sequence == 2 else 99, min(depth, 6))


def deep_or_wide(sequence, root, coming, depth):
    if sequence % 2:
        return DraftTree.from_parents([root, *range(VOCAB)], [-1] + [0] * VOCAB)
    return chain(root, coming, 5 + sequence, depth)


def other_node_counts(sequence, root, coming, depth):
    """From no node at all, sequence by sequence, to a chain as deep as the text may grow."""
    return chain(root, coming, sequence, min(depth, 2 * sequence))


def other_texts(sequence, root, coming, depth):
    """Right only where another sequence would be."""
    tree = chain(root, alone(EIGHT)[(sequence + 1) % 8], 99, min(depth, 4))
    return DraftTree.merge([tree, chain(root, coming, 0, min(depth, 2))])


def out_of_order(sequence, root, coming, depth):
    """Random trees with some of the true text in them, rows and siblings in no order."""
    rng = np.random.default_rng([sequence, len(coming), root])
    noise = random_tree(rng, root, nodes=int(rng.integers(12)), max_depth=min(depth, 4), vocab_size=VOCAB)
    tree = DraftTree.merge([noise, chain(root, coming, 99, min(depth, int(rng.integers(5))))])
    return tree.reorder(random_order(rng, tree))


SHAPES = (right_for_one, wrong_for_one, deep_or_wide, other_node_counts, other_texts, out_of_order)


# --- the same text ----------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_sequence_of_a_batch_gets_the_text_of_its_single_run(drafter, attention):
    decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
    accepted = 0
    for setting, arguments in SETTINGS.items():
        output = run(decoder, EIGHT, **arguments)
        assert output.ids == alone(EIGHT, setting), setting
        assert output.finish_reasons == ["length"] * 8
        longest = max(map(len, EIGHT)) + TOKENS
        assert output.sequences.tolist() == [
            prompt + ids + [0] * (longest - len(prompt + ids)) for prompt, ids in zip(EIGHT, output.ids, strict=True)
        ]
        accepted += output.report.accepted
    for prompt, text in list(zip(EIGHT, alone(EIGHT, "seed 1"), strict=True))[::3]:
        single = TreeDecoder(model_of("llama"), drafter, attention=attention)
        assert run(single, prompt, **SETTINGS["seed 1"]).ids == [text]
    assert accepted > 10 or drafter == "none"


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", ["auto", "random"])
def test_any_order_and_any_neighbours(drafter, attention):
    decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
    rng = np.random.default_rng(0)
    batches = [range(8)[::-1], *(rng.permutation(8) for _ in range(2)), *(rng.choice(8, size) for size in (1, 2, 3, 5))]
    for number, batch in enumerate(batches):
        setting = list(SETTINGS)[number % len(SETTINGS)]
        prompts = [EIGHT[i] for i in batch]
        assert run(decoder, prompts, **SETTINGS[setting]).ids == alone(prompts, setting), list(batch)


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_drafters_that_know_one_sequence_and_not_the_others(shape, attention):
    for setting in ("greedy", "seed 2"):
        texts = alone(EIGHT, setting)
        decoder = TreeDecoder(model_of("llama"), knowing(EIGHT, texts, shape), nodes=64, attention=attention)
        output = run(decoder, EIGHT, **SETTINGS[setting])
        assert output.ids == texts
        accepted = [report.accepted for report in output.reports]
        nodes = [{record.nodes for record in output.records if record.sequence == i} for i in range(8)]
        if shape is right_for_one:
            assert accepted[2] >= TOKENS - 3
            assert accepted[:2] + accepted[3:] == [0] * 7
        elif shape is wrong_for_one:
            assert accepted[2] == 0
            assert min(accepted[:2] + accepted[3:]) >= TOKENS - 3
        elif shape is deep_or_wide:
            assert max(nodes[0]) == TOKENS - 1
            assert max(nodes[1]) == VOCAB
            assert accepted[1] == TOKENS // 2  # one token by a node, one as bonus
        elif shape is other_node_counts:
            assert [max(counts) for counts in nodes] == [min(2 * i, TOKENS - 1) for i in range(8)]
            assert accepted[0] == 0 < accepted[1] < accepted[7]
        elif shape is out_of_order:
            assert min(accepted) > 0


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_drafter_that_fails_for_one_sequence_changes_no_text(attention):
    def failing(sequence, root, coming, depth):
        if sequence == 3 and len(coming) < 12:
            raise RuntimeError("no more ideas")
        return chain(root, coming, 1 + sequence % 3, min(depth, 4))

    decoder = TreeDecoder(model_of("llama"), knowing(EIGHT, alone(EIGHT), failing), attention=attention)
    with pytest.warns(TreepassWarning, match="failed in propose.*no more ideas"):
        output = run(decoder, EIGHT)
    assert output.ids == alone(EIGHT)
    assert output.report.accepted > 0


@arch
@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, attention) for name in WINDOWED for attention in ATTENTIONS), ("deepseek_v3", "dense")],
)
def test_other_types_of_model(name, attention):
    model, texts = model_of(name), alone(EIGHT, "greedy", name)
    right = knowing(EIGHT, texts, out_of_order)
    assert run(TreeDecoder(model, right, attention=attention), EIGHT).ids == texts
    texts = alone(EIGHT, "seed 0", name)
    backwards = run(TreeDecoder(model, attention=attention), EIGHT[::-1], **SETTINGS["seed 0"])
    assert backwards.ids == texts[::-1]


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", WINDOWED)
def test_sequences_on_both_sides_of_a_sliding_window(name, attention):
    model = model_of(name)
    assert model.config.sliding_window == 8
    # Some cross the edge while they are written, each in another pass; some begin beyond it; all share every pass.
    prompts = [random_ids(length, 2) for length in (1, 40, 2, 5, 6, 7, 8, 9, 20)]
    for setting in ("greedy", "seed 1"):
        texts = alone(prompts, setting, name, 12)
        decoder = TreeDecoder(model, knowing(prompts, texts, out_of_order), attention=attention)
        assert run(decoder, prompts, max_new_tokens=12, **SETTINGS[setting]).ids == texts


# --- prompts ----------------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("lengths", [(1, 50, 7), (1,), (1, 1, 1)], ids=str)
def test_prompts_of_one_token(lengths, attention):
    prompts = [random_ids(length, place) for place, length in enumerate(lengths)]
    for setting in ("greedy", "seed 1"):
        for drafter in ("auto", "none"):
            decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
            output = run(decoder, prompts, **SETTINGS[setting])
            assert output.ids == alone(prompts, setting)
            assert [report.prompt_rows for report in output.reports] == [length - 1 for length in lengths]


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", ["auto", "random", "none"])
def test_equal_prompts(drafter, attention):
    prompts = [EIGHT[3], EIGHT[0], EIGHT[3], EIGHT[3], EIGHT[0], EIGHT[5]]
    decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
    for setting in ("greedy", "seed 1"):
        assert run(decoder, prompts, **SETTINGS[setting]).ids == alone(prompts, setting)


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", ["auto", "random", "none"])
def test_several_samples_of_every_prompt(drafter, attention):
    prompts = [EIGHT[5], EIGHT[2], EIGHT[1], [4], EIGHT[5]]
    decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
    plain = TreeDecoder(model_of("llama"), "none", attention="dense")
    for setting in ("greedy", "seed 1"):
        arguments = {"num_return_sequences": 3} | SETTINGS[setting]
        singles = [plain.generate(prompt, max_new_tokens=TOKENS, **arguments).ids for prompt in prompts]
        output = run(decoder, prompts, **arguments)
        assert output.ids == [ids for single in singles for ids in single]
        assert output.ids[::3] == alone(prompts, setting)  # the first sample is the one that is asked for alone
        for single in singles:
            assert len({tuple(ids) for ids in single}) == (1 if setting == "greedy" else 3)
        for place, row in enumerate(output.sequences.tolist()):
            whole = prompts[place // 3] + output.ids[place]
            assert row == whole + [0] * (len(row) - len(whole))
        # The samples of a prompt share its rows.
        assert [report.prompt_rows for report in output.reports] == [
            rows for prompt in prompts for rows in (len(prompt) - 1, 0, 0)
        ]


def padded(prompts: Sequence[list[int]], pad: int, right: Sequence[int], dtype=torch.int64):
    """The prompts as a tensor with padding, and their mask; ``right`` gives the padding behind each."""
    width = max(len(prompt) + behind for prompt, behind in zip(prompts, right, strict=True))
    ids = torch.full((len(prompts), width), pad, dtype=dtype)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, (prompt, behind) in enumerate(zip(prompts, right, strict=True)):
        columns = slice(width - behind - len(prompt), width - behind)
        ids[row, columns] = torch.tensor(prompt, dtype=dtype)
        mask[row, columns] = 1
    return ids, mask


SHORT = [EIGHT[0], EIGHT[1], EIGHT[3], [7], EIGHT[5]]
LEFT = [0] * len(SHORT)
RIGHT = [31 - len(prompt) for prompt in SHORT]


@arch
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (SHORT, None), id="lists"),
        pytest.param(lambda: ([tuple(prompt) for prompt in SHORT], None), id="tuples"),
        pytest.param(lambda: ([torch.tensor(prompt) for prompt in SHORT], None), id="tensors"),
        pytest.param(lambda: ([np.array(prompt) for prompt in SHORT], None), id="arrays"),
        pytest.param(lambda: ([np.array(prompt, np.int32) for prompt in SHORT], None), id="int32 arrays"),
        pytest.param(lambda: padded(SHORT, 0, LEFT), id="left int64"),
        pytest.param(lambda: padded(SHORT, 0, LEFT, torch.int32), id="left int32"),
        pytest.param(lambda: padded(SHORT, 63, LEFT), id="left, padded with a token that also occurs"),
        pytest.param(lambda: padded(SHORT, -100, LEFT), id="left, padded with no token"),
        pytest.param(lambda: padded(SHORT, 0, RIGHT), id="right"),
        pytest.param(lambda: padded(SHORT, VOCAB, RIGHT, torch.int32), id="right int32, padded with no token"),
        pytest.param(lambda: padded(SHORT, 0, [0, 5, 1, 9, 20]), id="both sides"),
        pytest.param(lambda: padded(SHORT, 0, [2] * 5), id="columns of padding only"),
    ],
)
def test_padding_in_every_form_gives_the_same_texts(make):
    ids, mask = make()
    masks = [None] if mask is None else [mask, mask.bool(), mask.int(), mask.to(torch.uint8), mask.numpy()]
    masks += [] if mask is None else [mask.bool().numpy(), mask.tolist(), mask.bool().tolist()]
    decoder = TreeDecoder(model_of("llama"))
    for form in masks:
        assert run(decoder, ids, attention_mask=form, max_new_tokens=3).ids == alone(SHORT, tokens=3)
    if isinstance(ids, torch.Tensor):
        for form in (ids.numpy(), ids.tolist(), list(ids)):
            assert run(decoder, form, attention_mask=mask, max_new_tokens=3).ids == alone(SHORT, tokens=3)


# --- the end of each --------------------------------------------------------------------------------------------------


def ends_only(sequence: int, texts: list[list[int]]) -> int:
    """A token in the middle of one text that stands in no other."""
    others = {token for i, text in enumerate(texts) if i != sequence for token in text}
    return next(token for token in texts[sequence][3:12] if token not in others)


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("setting", ["greedy", "seed 0"])
@pytest.mark.parametrize("drafter", ["auto", "random", "right", "other node counts"])
def test_one_sequence_ends_while_the_others_go_on(drafter, setting, attention):
    prompts = [EIGHT[i] for i in (0, 1, 2, 3)]
    texts = alone(prompts, setting)
    shapes = {
        "right": lambda sequence, root, coming, depth: chain(root, coming, 99, min(depth, 5)),
        "other node counts": other_node_counts,
    }
    drafts = knowing(prompts, texts, shapes[drafter]) if drafter in shapes else drafter
    decoder = TreeDecoder(model_of("llama"), drafts, attention=attention)
    found = 0
    for sequence in range(4):
        try:
            end = ends_only(sequence, texts)
        except StopIteration:
            continue
        found += 1
        output = run(decoder, prompts, eos_token_id=end, **SETTINGS[setting])
        cut = texts[sequence][: texts[sequence].index(end) + 1]
        assert output.ids == [*texts[:sequence], cut, *texts[sequence + 1 :]]
        assert output.finish_reasons == ["length"] * sequence + ["stop"] + ["length"] * (3 - sequence)
        if setting == "greedy":
            assert cut == greedy_text(model_of("llama"), prompts[sequence], TOKENS, [end])
        width = max(map(len, prompts)) + TOKENS
        whole = prompts[sequence] + cut
        assert output.sequences[sequence].tolist()[: len(whole)] == whole
        assert set(output.sequences[sequence].tolist()[len(whole) : width]) <= {0}
    assert found >= 2


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sequences_end_one_by_one(drafter, attention):
    texts = alone(EIGHT)
    ends = [text[2 + 2 * i] for i, text in enumerate(texts[:5])]
    expected = [greedy_text(model_of("llama"), prompt, TOKENS, ends) for prompt in EIGHT]
    assert len({len(text) for text in expected}) >= 4
    output = run(TreeDecoder(model_of("llama"), drafter, attention=attention), EIGHT, eos_token_id=ends)
    assert output.ids == expected
    assert output.finish_reasons == ["stop" if text[-1] in ends else "length" for text in expected]


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("tokens", [1, 2, 7, TOKENS])
def test_sequences_reach_max_new_tokens_in_different_passes(tokens, attention):
    texts = alone(EIGHT)

    def shape(sequence, root, coming, depth):
        return chain(root, coming, 99, min(depth, sequence))

    decoder = TreeDecoder(model_of("llama"), knowing(EIGHT, texts, shape), attention=attention)
    output = run(decoder, EIGHT, max_new_tokens=tokens)
    assert output.ids == [text[:tokens] for text in texts]
    assert output.finish_reasons == ["length"] * 8
    assert [report.passes for report in output.reports] == [math.ceil(tokens / (i + 1)) for i in range(8)]


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_interrupted_batch_returns_what_every_sequence_has(attention):
    texts = alone(EIGHT)
    answers = iter([False] * 3 + [True])
    decoder = TreeDecoder(model_of("llama"), knowing(EIGHT, texts, right_for_one), attention=attention)
    output = decoder.generate(EIGHT, max_new_tokens=TOKENS, should_stop=lambda: next(answers))
    assert [len(ids) for ids in output.ids] == [3, 3, TOKENS, 3, 3, 3, 3, 3]
    assert output.ids == [text[: len(ids)] for text, ids in zip(texts, output.ids, strict=True)]
    assert output.finish_reasons == ["interrupted"] * 2 + ["length"] + ["interrupted"] * 5
    check_counts(output)


# --- rows and memory --------------------------------------------------------------------------------------------------


class Keeping(FunctionDrafter):
    """Keeps a copy of every sequence's rows when it leaves."""

    def __init__(self, drafter: FunctionDrafter) -> None:
        super().__init__(drafter._tree_of)
        self.kept: list[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def end(self, session: Any) -> None:
        layers = range(session.cache.num_layers)
        rows = [tuple(rows.clone() for rows in session.cache.rows(layer)) for layer in layers]
        self.kept.append((list(session.ids), rows))


@arch
@pytest.mark.parametrize("ending", ["length", "stop"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, attention) for name in ("llama", "gemma3_text", "gpt_oss") for attention in ATTENTIONS),
        ("deepseek_v3", "dense"),
    ],
)
def test_rows_of_a_batch_equal_a_fresh_prefill(name, attention, ending):
    model = model_of(name)
    texts = alone(EIGHT, name=name)
    drafter = Keeping(knowing(EIGHT, texts, out_of_order))
    with NoDowncasts():
        ends = [text[9] for text in texts[::2]] if ending == "stop" else []
        output = run(TreeDecoder(model, drafter, attention=attention), EIGHT, eos_token_id=ends)
        assert len(drafter.kept) == 8
        assert sorted(ids for ids, _ in drafter.kept) == sorted(
            prompt + ids for prompt, ids in zip(EIGHT, output.ids, strict=True)
        )
        moved = [
            record
            for record in output.records
            if record.path != tuple(range(1, len(record.path) + 1)) and len(record.path) > 1
        ]
        assert moved
        for ids, rows in drafter.kept:
            for layer, (got, want) in enumerate(zip(rows, fresh_rows(model, name, ids[:-1]), strict=True)):
                for mine, theirs in zip(got, want, strict=True):
                    assert mine.shape == theirs.shape
                    assert float((mine - theirs).abs().max()) < 1e-10, f"layer {layer}"


def fresh_rows(model, name: str, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if name == "llama":
        return cache_values(model, ids)
    # transformers' cache of these types keeps the window only, or something else than keys and values.
    target = HFTarget(model, attention="dense")
    cache = target.new_cache()
    prefill(target, cache, ids)
    return [cache.rows(layer) for layer in range(cache.num_layers)]


@pytest.fixture
def born(monkeypatch):
    """Weak references to every cache and to the memory of every buffer that is made."""
    references: list[Callable[[], bool]] = []
    init, buffer = TreeCache.__init__, cache_module._buffer

    def watched_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        reference = weakref.ref(self)
        references.append(lambda: reference() is not None)

    def watched_buffer(*args, **kwargs):
        new = buffer(*args, **kwargs)
        reference = StorageWeakRef(new.untyped_storage())
        references.append(lambda: not reference.expired())
        return new

    monkeypatch.setattr(TreeCache, "__init__", watched_init)
    monkeypatch.setattr(cache_module, "_buffer", watched_buffer)
    return references


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", ["auto", "random", "none"])
def test_nothing_keeps_the_caches_alive(born, drafter, attention):
    decoder = TreeDecoder(model_of("llama"), drafter, attention=attention)
    outputs = []
    for arguments in ({}, {"num_return_sequences": 2, "temperature": 0.7}, {"eos_token_id": list(range(32))}):
        outputs.append(decoder.generate(EIGHT[:4], max_new_tokens=8, **arguments))
        assert len(born) >= 4 * (1 + 2 * 2)
        gc.collect()
        assert not any(alive() for alive in born)
    assert outputs[0].ids == alone(EIGHT[:4], tokens=8)


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_nothing_keeps_the_caches_alive_after_an_error_or_an_interrupt(born, attention):
    decoder = TreeDecoder(model_of("llama"), attention=attention)

    def failing(record):
        if record.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(EIGHT[:4], max_new_tokens=8, callback=failing)
    gc.collect()
    assert not any(alive() for alive in born)
    answers = iter([False, False, True])
    output = decoder.generate(EIGHT[:4], max_new_tokens=8, should_stop=lambda: next(answers))
    assert output.finish_reasons == ["interrupted"] * 4
    gc.collect()
    assert len(born) >= 8 * (1 + 2 * 2)
    assert not any(alive() for alive in born)


# --- bad input --------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
ONES = torch.ones_like(IDS)


def mask_with(value: Any, *places: tuple[int, int]) -> torch.Tensor:
    mask = ONES.clone() if isinstance(value, int) else ONES.double()
    for place in places:
        mask[place] = value
    return mask


def has(*words: Any) -> str:
    """A pattern for a message that holds all of these, each as a word of its own."""
    return "".join(rf"(?=.*(?<![\w.]){word}(?![\w]))" for word in words)


@arch
@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        # Shapes: the message gives the one that was got and the one that was wanted.
        pytest.param(IDS, ONES[:2], has("attention_mask", 2, 3), id="mask rows missing"),
        pytest.param(IDS, torch.ones(5, 4), has("attention_mask", 5, 3), id="mask rows too many"),
        pytest.param(IDS, ONES[:, :2], has("attention_mask", 2, 4), id="mask columns missing"),
        pytest.param(IDS, torch.ones(3, 7), has("attention_mask", 7, 4), id="mask columns too many"),
        pytest.param(IDS, ONES.T, has("attention_mask", 3, 4), id="mask transposed"),
        pytest.param(IDS, ONES[0], has("attention_mask", 4), id="1-D mask for a batch"),
        pytest.param(IDS, torch.ones(3), has("attention_mask", 3), id="1-D mask of the batch's size"),
        pytest.param(IDS, ONES[:, :, None].expand(3, 4, 4), "attention_mask.*got", id="3-D mask"),
        pytest.param(IDS, ONES[:, None, None], "attention_mask.*got", id="4-D mask"),
        pytest.param(IDS, 1, "attention_mask.*got", id="a number as mask"),
        pytest.param([[1, 2, 3], [4]], [[1, 1, 1], [1, 1]], has("attention_mask", 1, 2), id="ragged mask too long"),
        pytest.param(IDS[None], None, r"(shape|dimension|nested|3-D).*", id="3-D ids"),
        pytest.param(IDS[:, None], None, r"(shape|dimension|nested|3-D).*", id="3-D ids of one row each"),
        pytest.param(IDS[None], ONES[None], r"(shape|dimension|nested|3-D).*", id="3-D ids and mask"),
        # Masks: the message names the prompt and what stands there.
        pytest.param(IDS, mask_with(0, (1, 1)), has("holes", "prompt 1"), id="a hole"),
        pytest.param(IDS, mask_with(0, (2, 1), (2, 2)), has("prompt 2"), id="a hole of two"),
        pytest.param(IDS, mask_with(0, (0, 0), (0, 2)), has("prompt 0"), id="a hole behind padding"),
        pytest.param(IDS, mask_with(2, (1, 0)), has("0 and 1", "prompt 1", 2), id="2 in a mask"),
        pytest.param(IDS, mask_with(-1, (1, 0)), has("0 and 1", "prompt 1", "-1"), id="-1 in a mask"),
        pytest.param(IDS, mask_with(-math.inf, (2, 0)), has("0 and 1", "prompt 2", "-inf"), id="-inf in a mask"),
        pytest.param(IDS, mask_with(math.nan, (2, 0)), has("0 and 1", "prompt 2", "nan"), id="nan in a mask"),
        pytest.param(IDS, mask_with(0.5, (0, 3)), has("0 and 1", "prompt 0", r"0\.5"), id="0.5 in a mask"),
        pytest.param(IDS, [["1"] * 4] * 3, has("0 and 1", "prompt 0", "'1'"), id="strings in a mask"),
        pytest.param(IDS, (1 - ONES).double().masked_fill(ONES > 0, -math.inf), "0 and 1.*-inf", id="additive mask"),
        pytest.param(IDS, mask_with(0, (1, 0), (1, 1), (1, 2), (1, 3)), has("empty", "prompt 1"), id="a row of zeros"),
        pytest.param(IDS, 0 * ONES, has("empty", "prompt 0"), id="zeros only"),
        # Ids: the message names the prompt and the token.
        pytest.param([[1, 2], [3], [4, VOCAB, 5]], None, has("prompt 2", VOCAB), id="the vocabulary's size"),
        pytest.param([[1, 2], [3, -1], [4]], None, has("prompt 1", "-1"), id="a negative token"),
        pytest.param(IDS + 52 * (IDS == 12), None, has("prompt 2", 64, "vocabulary"), id="outside, in a tensor"),
        pytest.param(IDS - 9 * (IDS == 5), mask_with(0, (0, 0)), has("prompt 1", "-4"), id="negative, under a mask"),
        pytest.param(IDS.double(), None, has("integers", r"1\.0"), id="float ids"),
        pytest.param([[1, 2], [3, 4.5]], None, has("integers", r"4\.5"), id="a float among others"),
        pytest.param(IDS.double().numpy(), ONES, has("integers", r"1\.0"), id="float array"),
        pytest.param(IDS > 0, None, has("integers", "True"), id="bool ids"),
        pytest.param([], None, "empty", id="an empty batch"),
        pytest.param(IDS[:0], None, "empty", id="an empty tensor"),
        pytest.param(IDS[:0], ONES[:0], "empty", id="an empty tensor and mask"),
        pytest.param(IDS[:, :0], None, "empty", id="a tensor without columns"),
        pytest.param([[1, 2], [3], []], None, has("empty", "prompt 2"), id="an empty prompt among others"),
        pytest.param([[], [1, 2]], None, has("empty", "prompt 0"), id="an empty prompt first"),
        pytest.param([[1, 2], [3] * 600], None, has(600, 512, "prompt 1"), id="one prompt too long"),
        pytest.param([[1, 2], 3], None, "(integers|list).*3", id="a number among prompts"),
        pytest.param([1, [2, 3]], None, r"integers.*\[2, 3\]", id="a prompt among numbers"),
    ],
)
def test_bad_batches_are_refused_before_any_pass(ids, mask, message):
    decoder = TreeDecoder(model_of("llama"))
    watched = decoder.target = WatchedTarget(decoder.target)
    with pytest.raises(PromptError, match=message) as caught:
        decoder.generate(ids, attention_mask=mask, max_new_tokens=2)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert not watched.forests
    assert decoder.generate(SHORT, max_new_tokens=2).ids == alone(SHORT, tokens=2)


def without_one_parameter(name: str):
    model = tiny_llama(1, vocab_size=VOCAB)
    part, _, weight = name.rpartition(".")
    setattr(model.get_submodule(part), weight, torch.nn.Parameter(model.get_parameter(name).to("meta")))
    return model


@arch
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: tiny_llama(1).to("meta"), id="whole"),
        *(
            pytest.param(lambda name=name: without_one_parameter(name), id=name)
            for name in (
                "model.embed_tokens.weight",
                "model.layers.1.self_attn.k_proj.weight",
                "model.layers.0.input_layernorm.weight",
                "lm_head.weight",
            )
        ),
    ],
)
def test_a_model_on_the_meta_device_is_refused(make):
    with pytest.raises(UnsupportedModelError, match=r"'llama'.*meta device") as caught:
        TreeDecoder(make())
    assert "\n" not in str(caught.value)


@arch
def test_a_model_moved_to_the_meta_device_later_is_refused():
    model = tiny_llama(1)
    decoder = TreeDecoder(model)
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="meta device"):
        decoder.generate(SHORT, max_new_tokens=2)


# --- errors put in on purpose -----------------------------------------------------------------------------------------

SAME_LENGTH = [random_ids(12, seed) for seed in range(4)]


def second_sequence_shifted(monkeypatch):
    positions = Forest.positions.fget

    def wrong(self):
        right = positions(self).copy()
        if len(self.trees) > 1:
            right[self.trees[0].rows :][: self.trees[1].rows] += 1
        return right

    monkeypatch.setattr(Forest, "positions", property(wrong))


def context_of_the_sequence_before_visible(monkeypatch):
    """In the joined keys, one key of the first sequence for all rows of the second."""
    visibility = attention_module.forest_visibility

    def wrong(forest, own_keys=False):
        visible, positions = visibility(forest, own_keys)
        if len(forest.trees) > 1 and not own_keys:
            visible = visible.copy()
            visible[forest.offsets[1] :][: forest.trees[1].rows, 0] = True
        return visible, positions

    monkeypatch.setattr(attention_module, "forest_visibility", wrong)


def keys_of_the_neighbour(monkeypatch):
    """In attention per sequence, the first key of every sequence is that of the one before it."""
    sequences = PassCache.sequences

    def wrong(self, keys, values):
        pairs = list(sequences(self, keys, values))
        shifted = [pairs[i - 1] for i in range(len(pairs))]
        return [
            (torch.cat([other_k[:, :1], k[:, 1:]], 1), torch.cat([other_v[:, :1], v[:, 1:]], 1))
            for (k, v), (other_k, other_v) in zip(pairs, shifted, strict=True)
        ]

    monkeypatch.setattr(PassCache, "sequences", wrong)


def rows_kept_by_number(monkeypatch):
    """Every sequence keeps as many rows as it accepted, but the first ones of its tree."""
    commit = TreeCache.commit
    monkeypatch.setattr(TreeCache, "commit", lambda self, rows: commit(self, range(len(rows))))


@arch
@pytest.mark.parametrize("prompts", [EIGHT, SAME_LENGTH], ids=["unequal", "equal lengths"])
@pytest.mark.parametrize(
    ("mutate", "attention"),
    [
        (second_sequence_shifted, "dense"),
        (second_sequence_shifted, "per_sequence"),
        (context_of_the_sequence_before_visible, "dense"),
        (keys_of_the_neighbour, "per_sequence"),
        (rows_kept_by_number, "dense"),
        (rows_kept_by_number, "per_sequence"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_batch_that_mixes_up_its_sequences_is_caught(monkeypatch, mutate, attention, prompts):
    texts = alone(prompts)
    decoder = TreeDecoder(model_of("llama"), knowing(prompts, texts, out_of_order), attention=attention)
    assert run(decoder, prompts).ids == texts
    mutate(monkeypatch)
    wrong = decoder.generate(prompts, max_new_tokens=TOKENS)
    with pytest.raises(AssertionError):
        assert wrong.ids == texts
    # The error sits where it was put: a sequence alone does not notice.
    if mutate is not rows_kept_by_number:
        assert wrong.ids[0] == texts[0] or mutate is keys_of_the_neighbour
        assert run(decoder, prompts[1]).ids == [texts[1]]
