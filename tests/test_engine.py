"""Greedy text equals transformers' own ``generate``, whatever is drafted, and every record and report adds up."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from reference import greedy_text, random_prompts

from treepass.compare import first_difference
from treepass.drafters import build_drafter
from treepass.errors import LogitsError
from treepass.generate import DEFAULT_NODES, TreeDecoder, TreeOutput
from treepass.record import Report
from treepass.testing import FunctionDrafter, WatchedTarget, random_order, random_tree, tiny_llama
from treepass.tree import DraftTree

arch = pytest.mark.arch
model = pytest.mark.model
slow = pytest.mark.slow

VOCAB = 64
NODE_LIMITS = (1, 4, 16, 64)
DRAFTERS = ("suffix", "recycling", "auto", "random", "none")
MODELS = {"grouped-query": {}, "multi-head": {"kv_heads": 4}, "tied": {"tie": True}, "deep": {"layers": 4}}
MAX_NEW_TOKENS = 24


@cache
def tiny(name: str):
    return tiny_llama(10 + list(MODELS).index(name), vocab_size=VOCAB, **MODELS[name])


@cache
def prompts_and_texts(count: int = 100) -> list[tuple[str, list[int], list[int]]]:
    """Prompts, each with its model's name and with what ``generate`` writes."""
    names = list(MODELS)
    prompts = random_prompts(count, VOCAB, seed=5)
    return [
        (names[i % len(names)], prompt, greedy_text(tiny(names[i % len(names)]), prompt, MAX_NEW_TOKENS))
        for i, prompt in enumerate(prompts)
    ]


def check_identities(output: TreeOutput, node_limit: int) -> None:
    """What every record and every report satisfies."""
    for record in output.records:
        tree = DraftTree.from_parents(record.tokens, record.parents, record.path_prob)
        assert record.nodes <= node_limit
        assert 1 <= len(record.emitted) <= tree.max_depth + 1
        assert list(record.path) == (tree.path(record.path[-1]) if record.path else [])
        assert [record.tokens[row] for row in record.path] == list(record.emitted[: len(record.path)])
        assert len(record.emitted) == len(record.path) + (record.ended != "accepted")
        assert len(record.logprobs) == len(record.scores) == len(record.emitted)
        assert list(record.ranks) == tree.ranks().tolist()
        if record.ended != "accepted":
            last = record.path[-1] if record.path else 0
            assert (record.ended == "bonus") == tree.is_leaf(last)
            assert record.emitted[-1] not in tree.children(last)
    for sequence, (ids, report) in enumerate(zip(output.ids, output.reports, strict=True)):
        records = [record for record in output.records if record.sequence == sequence]
        assert [record.index for record in records] == list(range(len(records)))
        assert [token for record in records for token in record.emitted] == ids
        assert report.passes == len(records)
        assert report.emitted == len(ids) == report.accepted + report.passes - report.cut_on_accepted
        assert report.accepted == sum(len(record.path) for record in records)
        assert report.accepted == sum(report.accepted_by_depth) == sum(report.accepted_by_rank)
        assert report.nodes == sum(record.nodes for record in records)
        assert report.rows == report.prompt_rows + sum(1 + record.nodes for record in records)
        assert report.cut_on_accepted == sum(record.ended == "accepted" for record in records) <= 1
    total = Report()
    for report in output.reports:
        total.merge(report)
    for name in ("passes", "emitted", "accepted", "cut_on_accepted", "nodes", "prompt_rows", "accepted_by_depth"):
        assert getattr(output.report, name) == getattr(total, name)
    assert output.report.emitted == output.report.accepted + output.report.passes - output.report.cut_on_accepted


# --- greedy text against generate -------------------------------------------------------------------------------------


def check_greedy(drafter: str, limits, lengths=None) -> list[TreeOutput]:
    decoders, outputs = {}, []
    for number, (name, prompt, text) in enumerate(prompts_and_texts()):
        for limit in limits if isinstance(limits, tuple) else (limits(number),):
            key = (name, limit)
            if key not in decoders:
                decoders[key] = TreeDecoder(tiny(name), drafter, nodes=limit)
            length = MAX_NEW_TOKENS if lengths is None else lengths(number)
            output = decoders[key].generate(prompt, max_new_tokens=length)
            assert output.ids == [text[:length]], f"prompt {number}, {limit} nodes"
            assert output.sequences.tolist() == [prompt + text[:length]]
            assert output.finish_reasons == ["length"]
            check_identities(output, limit)
            outputs.append(output)
    return outputs


@arch
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_100_greedy_texts_equal_generate(drafter):
    outputs = check_greedy(drafter, lambda number: NODE_LIMITS[number % 4 if number % 8 < 4 else 3 - number % 4])
    accepted = sum(output.report.accepted for output in outputs)
    # A drafter whose nodes are never accepted would make this test say nothing.
    assert accepted > 100 if drafter != "none" else accepted == 0


@arch
@slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_100_greedy_texts_equal_generate_at_every_node_limit(drafter):
    check_greedy(drafter, NODE_LIMITS, lambda number: 1 + number % MAX_NEW_TOKENS)


@arch
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_short_texts_equal_generate(drafter, length):
    for name, prompt, _ in prompts_and_texts()[:4]:
        decoder = TreeDecoder(tiny(name), drafter)
        for _ in range(2):  # the second time the drafter remembers the text
            output = decoder.generate(prompt, max_new_tokens=length)
            assert output.ids == [greedy_text(tiny(name), prompt, length)]
            check_identities(output, DEFAULT_NODES)


def true_chain(text: list[int], prompt_length: int) -> FunctionDrafter:
    """Drafts the true continuation, as deep as it may."""

    def tree_of(session, plan, depth):
        done = len(session.ids) - prompt_length
        return DraftTree.chain([session.ids[-1], *text[done : done + min(depth, plan.nodes)]])

    return FunctionDrafter(tree_of)


@arch
@pytest.mark.parametrize("wrong_after", [None, 3])
def test_text_ends_at_an_end_token_within_an_accepted_path(wrong_after):
    cut_within, cut_at_end = 0, 0
    for name, prompt, text in prompts_and_texts()[:24]:
        # Three end tokens, two of which the text reaches; only the first that is reached counts.
        reached = sorted(set(text[2:20]), key=text.index)[-2:]
        ends = [*reached, next(t for t in range(VOCAB) if t not in text)]
        expected = greedy_text(tiny(name), prompt, MAX_NEW_TOKENS, ends)
        assert expected == text[: len(expected)]
        draft = text if wrong_after is None else [t if i % wrong_after else (t + 1) % VOCAB for i, t in enumerate(text)]
        for drafter in (true_chain(draft, len(prompt)), "auto", "random", "none"):
            for order in (ends, ends[::-1]):
                decoder = TreeDecoder(tiny(name), drafter)
                output = decoder.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=order)
                assert output.ids == [expected]
                assert output.finish_reasons == ["stop"]
                check_identities(output, DEFAULT_NODES)
                tail = output.records[-1]
                cut_within += tail.ended == "accepted"
                cut_at_end += tail.ended != "accepted"
    assert cut_within > 10
    assert cut_at_end > 10


@arch
def test_end_token_in_the_middle_of_a_block_ends_the_text_there():
    name, prompt, text = next(item for item in prompts_and_texts() if text_index(item[2]) is not None)
    place = text_index(text)
    decoder = TreeDecoder(tiny(name), true_chain(text, len(prompt)), nodes=16)
    output = decoder.generate(prompt, max_new_tokens=16, eos_token_id=text[place])
    (record,) = output.records
    assert record.nodes == 15
    assert output.ids == [text[: place + 1]]
    assert record.ended == "accepted"
    assert len(record.path) == place + 1
    assert output.report.cut_on_accepted == 1


def text_index(text: list[int]) -> int | None:
    """A place in the middle whose token stands nowhere before."""
    return next((place for place in range(4, 9) if text[place] not in text[:place]), None)


@arch
def test_end_tokens_come_from_the_generation_config_unless_given():
    name, prompt, text = prompts_and_texts()[0]
    config = MODELS[name]
    seed = 10 + list(MODELS).index(name)
    ended = tiny_llama(seed, vocab_size=VOCAB, eos_token_id=[text[3], text[9]], **config)
    decoder = TreeDecoder(ended)
    first = min(text.index(text[3]), text.index(text[9]))
    assert decoder.generate(prompt, max_new_tokens=20).ids == [text[: first + 1]]
    assert decoder.generate(prompt, max_new_tokens=20, eos_token_id=[]).ids == [text[:20]]
    only = text[9]
    assert decoder.generate(prompt, max_new_tokens=20, eos_token_id=only).ids == [text[: text.index(only) + 1]]


@arch
def test_an_end_token_in_the_prompt_ends_nothing():
    name, prompt, text = prompts_and_texts()[1]
    absent = next(token for token in range(VOCAB) if token not in text)
    prompt = [absent, *prompt[1:], absent]
    expected = greedy_text(tiny(name), prompt, 10, [absent])
    assert TreeDecoder(tiny(name)).generate(prompt, max_new_tokens=10, eos_token_id=absent).ids == [expected]


@arch
def test_logprobs_are_those_of_a_plain_forward():
    for temperature, top_p in ((0.0, 1.0), (0.8, 0.9)):
        for name, prompt, _ in prompts_and_texts()[:8]:
            output = TreeDecoder(tiny(name)).generate(
                prompt, max_new_tokens=20, temperature=temperature, top_p=top_p, seed=3
            )
            ids = output.ids[0]
            with torch.no_grad():
                logits = tiny(name)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
            got = [value for record in output.records for value in record.logprobs]
            assert got == pytest.approx(expected, abs=1e-9)
            scores = [value for record in output.records for value in record.scores]
            chosen = (logits[range(len(ids)), ids] / (temperature or 1.0)).tolist()
            assert scores == pytest.approx(chosen, abs=1e-9)


# --- drafters that know the text --------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 15])
def test_a_drafter_that_equals_the_target_is_accepted_to_the_leaf(depth):
    for name, prompt, text in prompts_and_texts()[:8]:
        output = TreeDecoder(tiny(name), true_chain(text, len(prompt)), nodes=depth).generate(
            prompt, max_new_tokens=MAX_NEW_TOKENS
        )
        assert output.ids == [text]
        check_identities(output, depth)
        for record in output.records:
            assert len(record.path) == record.nodes
            assert record.ended == "bonus"
        assert output.report.passes == math.ceil(MAX_NEW_TOKENS / (depth + 1))


@arch
def test_a_random_tree_that_holds_the_true_text_is_accepted_along_it():
    rng = np.random.default_rng(0)
    for name, prompt, text in prompts_and_texts()[:16]:

        def tree_of(session, plan, depth, text=text, prompt=prompt):
            root, done = session.ids[-1], len(session.ids) - len(prompt)
            noise = random_tree(rng, root, nodes=20, max_depth=depth, vocab_size=VOCAB)
            tree = DraftTree.merge([noise, DraftTree.chain([root, *text[done : done + min(depth, 6)]])])
            return tree.reorder(random_order(rng, tree))

        output = TreeDecoder(tiny(name), FunctionDrafter(tree_of), nodes=64).generate(
            prompt, max_new_tokens=MAX_NEW_TOKENS
        )
        assert output.ids == [text]
        check_identities(output, 64)
        # Seven tokens a pass at least: six of the chain and one more.
        assert output.report.passes <= math.ceil(MAX_NEW_TOKENS / 7)


# --- a batch ----------------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_batch_of_unequal_prompts_equals_each_alone(drafter):
    name = "grouped-query"
    items = [(prompt, text) for other, prompt, text in prompts_and_texts() if other == name][:9]
    for start in (0, 3, 6):
        batch = items[start : start + 3]
        output = TreeDecoder(tiny(name), drafter).generate([prompt for prompt, _ in batch], max_new_tokens=20)
        assert output.ids == [text[:20] for _, text in batch]
        check_identities(output, DEFAULT_NODES)


@arch
def test_sequences_of_a_batch_end_one_by_one():
    name = "grouped-query"
    items = [(prompt, text) for other, prompt, text in prompts_and_texts() if other == name][:5]
    end = items[0][1][4]
    expected = [greedy_text(tiny(name), prompt, 20, [end]) for prompt, _ in items]
    assert len({len(text) for text in expected}) > 1
    output = TreeDecoder(tiny(name)).generate([prompt for prompt, _ in items], max_new_tokens=20, eos_token_id=end)
    assert output.ids == expected
    check_identities(output, DEFAULT_NODES)
    longest = max(len(prompt) + len(text) for (prompt, _), text in zip(items, expected, strict=True))
    assert output.sequences.shape == (5, longest)
    for (prompt, _), text, row in zip(items, expected, output.sequences.tolist(), strict=True):
        ids = prompt + text
        assert row == ids + [0] * (longest - len(ids))


@arch
def test_a_padded_tensor_equals_its_prompts():
    name = "multi-head"
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    padded = torch.zeros(3, 4, dtype=torch.long)
    mask = torch.zeros(3, 4, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, 4 - len(prompt) :] = torch.tensor(prompt)
        mask[row, 4 - len(prompt) :] = 1
    decoder = TreeDecoder(tiny(name))
    expected = [greedy_text(tiny(name), prompt, 10) for prompt in prompts]
    assert decoder.generate(padded, attention_mask=mask, max_new_tokens=10).ids == expected
    assert decoder.generate(prompts, max_new_tokens=10).ids == expected


# --- logits that are no numbers ---------------------------------------------------------------------------------------


def spoiled_decoder(name, drafter, spoils, value, nodes=16):
    """A decoder whose logits are ``value`` at the rows of the first tree for which ``spoils(tree)`` is true."""

    def change(forest, logits):
        if len(logits) == forest.rows:
            sequences = zip(forest.trees, forest.context_lengths, strict=True)
            spoil = np.concatenate([spoils(tree, length) for tree, length in sequences])
            logits[torch.from_numpy(spoil)] = value
        return logits

    decoder = TreeDecoder(tiny(name), drafter, nodes=nodes)
    decoder.target = WatchedTarget(decoder.target, change)
    return decoder


@arch
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_number_on_the_walk_is_an_error_that_names_the_node(value, temperature):
    name, prompt, _ = prompts_and_texts()[0]
    text = TreeDecoder(tiny(name), "none").generate(prompt, max_new_tokens=8, temperature=temperature, seed=1).ids[0]
    drafter = true_chain(text, len(prompt))
    for node in (0, 2, 5):
        decoder = spoiled_decoder(name, drafter, lambda tree, _, node=node: np.arange(tree.rows) == node, value)
        position = len(prompt) - 1 + node
        with pytest.raises(LogitsError, match=rf"at node {node} \(position {position}\)") as caught:
            decoder.generate(prompt, max_new_tokens=8, temperature=temperature, seed=1)
        assert "\n" not in str(caught.value)


@arch
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["random", "auto"])
def test_no_number_off_the_walk_leaves_the_text_as_it_is(value, temperature, drafter):
    for name, prompt, _ in prompts_and_texts()[:6]:
        settings = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
        ids = TreeDecoder(tiny(name), "none").generate(prompt, **settings).ids
        whole = prompt + ids[0]
        spoiled = []

        def off_the_walk(tree, length, whole=whole, spoiled=spoiled):
            off = np.array(
                [tree.tokens[tree.path(row)].tolist() != walk(whole, length, tree, row) for row in range(tree.rows)]
            )
            spoiled.append(off.sum())
            return off

        decoder = spoiled_decoder(name, drafter, off_the_walk, value)
        assert decoder.generate(prompt, **settings).ids == ids
        assert sum(spoiled) > 0


def walk(whole: list[int], length: int, tree: DraftTree, row: int) -> list[int]:
    """The text's own tokens at the depths of the path to ``row``."""
    return whole[length + 1 : length + 1 + int(tree.depths[row])]


# --- the default model in float32 -------------------------------------------------------------------------------------

ENGLISH = [
    "The library closes at six, so we should",
    "Write a short letter to a friend about your new garden.",
    "List five animals that live in the sea and say one thing about each.",
    "What is the difference between weather and climate?",
    "Once upon a time, in a village between two rivers, there lived a baker who",
    "Explain to a child why the moon seems to change its shape.",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "Repeat the sentence three times: the quick brown fox jumps over the lazy dog.",
    "The train from the coast was late again, and the people on the platform",
    "Give me a recipe for a soup with carrots and lentils.",
    "How many days are there in each month of the year? Write one line per month.",
    "Translate into French: good morning, how are you today?",
    "A dialogue between a teacher and a pupil about fractions:\nTeacher:",
    "Summarise in two sentences: bees visit flowers to gather nectar, and while they do so they carry pollen.",
    "The three most important rules of our workshop are: 1.",
    "Why do ships made of steel float on water?",
    "Count from one to thirty in words, separated by commas: one, two, three,",
    "My grandmother used to say that patience",
    "Compare a bicycle with a car: cost, speed, comfort, and what each does to the air.",
    '{"name": "Ada", "age": 36, "skills": ["mathematics", "writing"]}\n{"name": "Ben", "age":',
]


def check_default_model(loaded, drafters, prompts, length: int, nodes: int) -> dict[str, float]:
    """Texts equal ``generate``'s, or part at a near tie. Returns the tokens per pass by drafter."""
    texts = [(ids, greedy_text(loaded.model, ids, length)) for ids in map(loaded.tokenizer.encode, prompts)]
    tokens_per_pass = {}
    for drafter in drafters:
        decoder = TreeDecoder(loaded.model, drafter, nodes=nodes)
        total = Report()
        for number, (ids, text) in enumerate(texts):
            output = decoder.generate(ids, max_new_tokens=length, eos_token_id=[])
            check_identities(output, nodes)
            total.merge(output.report)
            difference = first_difference(loaded.model, ids, output.ids[0], text)
            if difference is not None:
                assert difference.margin < 1e-4, f"{drafter}, prompt {number}: {difference}"
                print(f"near tie: {drafter}, prompt {number}: {difference}")  # noqa: T201
        tokens_per_pass[drafter] = total.tokens_per_pass
    return tokens_per_pass


@model
def test_default_model_writes_what_generate_writes(default_model):
    drafters = ("suffix", "recycling", "auto", "random")
    check_default_model(default_model, drafters, ENGLISH[:4], 32, nodes=8)


@model
@slow
def test_default_model_writes_what_generate_writes_at_length(default_model):
    drafters = ("suffix", "recycling", "auto", "random", "none")
    tokens_per_pass = check_default_model(default_model, drafters, ENGLISH, 128, DEFAULT_NODES)
    assert tokens_per_pass["auto"] > 1.3
    assert tokens_per_pass["none"] == 1


@arch
def test_every_named_drafter_is_in_these_tests():
    from treepass.drafters import DRAFTERS as NAMES

    assert set(NAMES) - {"union"} == set(DRAFTERS)
    union, auto = (build_drafter(name, vocab_size=VOCAB) for name in ("union", "auto"))
    assert union.name == auto.name
