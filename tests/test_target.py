"""One pass over a forest equals plain forwards along every path: logits, hidden states, keys and values."""

import numpy as np
import pytest
import torch
from reference import RowValues, path_tokens, row_values

import treepass.attention
from treepass.attention import ATTENTIONS, KERNELS
from treepass.cache import TreeCache
from treepass.errors import UnsupportedModelError
from treepass.target import PREFILL_ROWS, HFTarget, prefill
from treepass.testing import WatchedTarget, random_tree, tiny_llama
from treepass.tree import DraftTree, Forest

arch = pytest.mark.arch
unit = pytest.mark.unit
VOCAB = 64

SHAPES = {
    "grouped-query": {"kv_heads": 2},
    "multi-head": {"kv_heads": 4},
    "one-kv-head": {"kv_heads": 1},
    "tied": {"tie": True},
    "three-layers": {"layers": 3},
}


def decoded_sequence(target: HFTarget, rng: np.random.Generator) -> tuple[list[int], TreeCache]:
    """A text and its cache after a prompt and a few passes, each of which kept a random path of a random tree."""
    ids = rng.integers(VOCAB, size=int(rng.integers(1, 12))).tolist()
    cache = target.new_cache()
    prefill(target, cache, ids[:-1])
    for _ in range(int(rng.integers(4))):
        tree = random_tree(rng, ids[-1], nodes=int(rng.integers(20)), max_depth=4, vocab_size=VOCAB)
        target.forward(Forest((tree,), (cache.length,)), [cache], rows=())
        path = tree.path(int(rng.integers(tree.rows)))
        cache.commit([0, *path])
        ids += [*tree.tokens[path].tolist(), int(rng.integers(VOCAB))]
    return ids, cache


def check_random_forests(
    count: int,
    seed: int,
    *,
    sequences: int = 1,
    kernel: str = "grouped",
    attention: str = "dense",
    tolerance: float = 1e-10,
    max_nodes: int = 64,
    **options,
) -> int:
    """Compares every row of random forests with a plain forward over its whole text. Returns the rows compared."""
    rng = np.random.default_rng(seed)
    compared = 0
    for number in range(count):
        if number % 20 == 0:
            model = tiny_llama(seed + number, vocab_size=VOCAB, **options)
            target = HFTarget(model, attention, kernel)
            layers = model.config.num_hidden_layers
        texts, caches = zip(*(decoded_sequence(target, rng) for _ in range(sequences)), strict=True)
        trees = tuple(
            random_tree(
                rng,
                ids[-1],
                nodes=int(rng.integers(1, max_nodes + 1)),
                max_depth=int(rng.integers(1, 11)),
                vocab_size=VOCAB,
            )
            for ids in texts
        )
        forest = Forest(trees, tuple(cache.length for cache in caches))
        output = target.forward(forest, caches, hidden_layers=range(layers + 1))
        assert output.logits.shape == (forest.rows, VOCAB)
        row = 0
        for ids, tree, cache in zip(texts, trees, caches, strict=True):
            tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
            expected = row_values(model, [ids + path_tokens(tokens, parents, node) for node in range(tree.rows)])
            rows = [cache.rows(layer, cache.length + tree.rows) for layer in range(layers)]
            for node in range(tree.rows):
                got = RowValues(
                    output.logits[row],
                    torch.stack([output.hidden[layer][row] for layer in range(layers + 1)]),
                    torch.stack([keys[:, cache.length + node] for keys, _ in rows]),
                    torch.stack([values[:, cache.length + node] for _, values in rows]),
                )
                error = got.difference(expected[node])
                assert error < tolerance, f"forest {number}, node {node} of a tree of {tree.rows} rows: {error}"
                row += 1
        compared += row
    return compared


@arch
@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_of_a_random_tree_equals_its_path(shape):
    # 5 shapes, 40 trees each: 200 trees in all.
    assert check_random_forests(40, 100 * list(SHAPES).index(shape), **SHAPES[shape]) > 40 * 10


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", ["grouped-query", "multi-head"])
def test_every_node_of_a_random_forest_equals_its_path(shape, attention):
    check_random_forests(12, 1000, sequences=4, attention=attention, max_nodes=24, **SHAPES[shape])


@arch
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_agree_up_to_rounding(kernel, attention, sequences):
    options = {"sequences": sequences, "attention": attention, "kernel": kernel, "max_nodes": 32}
    check_random_forests(4, 2000, **options)
    check_random_forests(6, 2000, tolerance=5e-4, dtype=torch.float32, **options)


@arch
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_trees_equal_their_paths(shape):
    check_random_forests(400, 5000, **SHAPES[shape])
    check_random_forests(60, 6000, sequences=5, **SHAPES[shape])


def depth_is_row_index(monkeypatch):
    wrong = property(
        lambda forest: np.concatenate(
            [np.arange(tree.rows) + length for tree, length in zip(forest.trees, forest.context_lengths, strict=True)]
        )
    )
    monkeypatch.setattr(Forest, "positions", wrong)


def change_visibility(monkeypatch, change):
    right = treepass.attention.tree_visibility

    def wrong(tree):
        visible = right(tree).copy()
        for row in range(1, tree.rows):
            change(visible, tree, row)
        return visible

    monkeypatch.setattr(treepass.attention, "tree_visibility", wrong)


def show_a_sibling(visible, tree, row):
    for other in range(1, row):
        if tree.parents[other] == tree.parents[row]:
            visible[row, other] = True


def drop_the_parent(visible, tree, row):
    visible[row, tree.parents[row]] = False


def drop_ancestors_but_the_parent(visible, tree, row):
    if tree.parents[row] > 0:
        visible[row, tree.parents[tree.parents[row]]] = False


def hide_itself(visible, tree, row):
    visible[row, row] = False


def see_all_rows_before(visible, tree, row):
    visible[row, :row] = True


def context_of_a_neighbour(monkeypatch):
    right = treepass.attention.forest_visibility

    def wrong(forest, own_keys):
        visible, positions = right(forest, own_keys)
        visible[-1, : forest.context_lengths[0]] = True
        return visible, positions

    monkeypatch.setattr(treepass.attention, "forest_visibility", wrong)


def context_without_its_first_token(monkeypatch):
    right = treepass.attention.forest_visibility

    def wrong(forest, own_keys):
        visible, positions = right(forest, own_keys)
        visible[:, 0] = False
        return visible, positions

    monkeypatch.setattr(treepass.attention, "forest_visibility", wrong)


@arch
@pytest.mark.parametrize(
    "change",
    [show_a_sibling, drop_the_parent, drop_ancestors_but_the_parent, hide_itself, see_all_rows_before],
    ids=lambda change: change.__name__,
)
def test_a_wrong_mask_is_caught(monkeypatch, change):
    change_visibility(monkeypatch, change)
    with pytest.raises(AssertionError, match="node"):
        check_random_forests(5, 0)


@arch
@pytest.mark.parametrize(
    ("mutate", "sequences"),
    [(depth_is_row_index, 1), (context_of_a_neighbour, 3), (context_without_its_first_token, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_positions_and_contexts_are_caught(monkeypatch, mutate, sequences):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="node"):
        check_random_forests(5, 0, sequences=sequences)


def pass_over(target: HFTarget, forest: Forest, caches) -> torch.Tensor:
    return target.forward(forest, [cache.copy() for cache in caches]).logits


@arch
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_rows_behind_the_pass_have_no_effect(kernel, attention, sequences):
    rng = np.random.default_rng(0)
    target = HFTarget(tiny_llama(0), attention, kernel)
    texts, caches = zip(*(decoded_sequence(target, rng) for _ in range(sequences)), strict=True)
    forest = Forest(
        tuple(random_tree(rng, ids[-1], nodes=12, max_depth=4, vocab_size=VOCAB) for ids in texts),
        tuple(cache.length for cache in caches),
    )
    clean = pass_over(target, forest, caches)
    for cache, ids in zip(caches, texts, strict=True):
        for layer in range(cache.num_layers):
            # A sequence of one token has no rows yet, and so no buffer to poison.
            for buffer in (cache._keys[layer], cache._values[layer]) if len(ids) > 1 else ():
                buffer[:, cache.length :] = float("nan")
    poisoned = target.forward(forest, caches).logits
    assert torch.equal(poisoned, clean)
    # The rows of this pass are forgotten; what they held must not matter to the next.
    for cache in caches:
        cache.commit([])
    assert torch.equal(target.forward(forest, caches).logits, clean)


@arch
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("poison", [1e6, -1e30])
def test_masked_rows_of_the_pass_have_no_effect(monkeypatch, kernel, poison):
    rng = np.random.default_rng(1)
    target = HFTarget(tiny_llama(0), kernel=kernel)
    ids, cache = decoded_sequence(target, rng)
    tree = random_tree(rng, ids[-1], nodes=30, max_depth=5, vocab_size=VOCAB)
    forest = Forest((tree,), (cache.length,))
    clean = pass_over(target, forest, [cache])
    victim = next(row for row in range(1, tree.rows) if not tree.is_leaf(row))
    sees = np.array([victim in (*tree.path(row), row) for row in range(tree.rows)])
    append = TreeCache.append

    def poisoned_append(self, layer, keys, values):
        keys, values = append(self, layer, keys, values)
        keys[:, self.length + victim] = poison
        values[:, self.length + victim] = poison
        return keys, values

    monkeypatch.setattr(TreeCache, "append", poisoned_append)
    dirty = pass_over(target, forest, [cache])
    assert torch.equal(dirty[~sees], clean[~sees])
    assert not torch.equal(dirty[sees], clean[sees])


@arch
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_neighbours_context_has_no_effect(kernel, attention):
    rng = np.random.default_rng(2)
    target = HFTarget(tiny_llama(0), attention, kernel)
    (ids, cache), (other_ids, other) = (decoded_sequence(target, rng) for _ in range(2))
    trees = tuple(random_tree(rng, text[-1], nodes=12, max_depth=4, vocab_size=VOCAB) for text in (ids, other_ids))
    forest = Forest(trees, (cache.length, other.length))
    clean = pass_over(target, forest, [cache, other])
    for layer in range(other.num_layers):
        for rows in other.rows(layer):
            rows[:] = 1e30
    dirty = pass_over(target, forest, [cache, other])
    assert torch.equal(dirty[: trees[0].rows], clean[: trees[0].rows])
    assert not torch.equal(dirty[trees[0].rows :], clean[trees[0].rows :])


@arch
def test_only_the_named_rows_come_back_in_the_order_asked_for():
    rng = np.random.default_rng(3)
    target = HFTarget(tiny_llama(0))
    ids, cache = decoded_sequence(target, rng)
    forest = Forest((random_tree(rng, ids[-1], nodes=20, max_depth=4, vocab_size=VOCAB),), (cache.length,))
    everything = pass_over(target, forest, [cache])
    rows = [7, 0, 20, 3]
    some = target.forward(forest, [cache], rows=rows)
    torch.testing.assert_close(some.logits, everything[rows], rtol=0, atol=1e-12)
    assert dict(some.hidden) == {}
    assert target.forward(forest, [cache], rows=()).logits.shape == (0, VOCAB)


@arch
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_in_chunks_equals_a_prompt_in_one(extra):
    length = PREFILL_ROWS + extra
    model = tiny_llama(0, max_position_embeddings=2 * PREFILL_ROWS)
    target = HFTarget(model)
    ids = np.random.default_rng(4).integers(VOCAB, size=length + 1).tolist()
    cache = target.new_cache()
    watched = WatchedTarget(target)
    prefill(watched, cache, ids[:-1])
    assert cache.length == length
    assert len(watched.forests) == (1 if extra <= 0 else 2)
    assert max(forest.rows for forest in watched.forests) <= PREFILL_ROWS
    got = target.forward(Forest((DraftTree.root_only(ids[-1]),), (length,)), [cache]).logits[0]
    assert float((got - row_values(model, [ids])[0].logits).abs().max()) < 1e-10


@arch
def test_a_pass_that_does_not_fit_its_caches_is_refused():
    target = HFTarget(tiny_llama(0, max_position_embeddings=8))
    cache = target.new_cache()
    prefill(target, cache, [1, 2, 3])
    with pytest.raises(ValueError, match="context lengths"):
        target.forward(Forest((DraftTree.root_only(1),), (2,)), [cache])
    with pytest.raises(ValueError, match="node 1: token must be below the vocabulary size 64, got 64"):
        target.forward(Forest((DraftTree.chain([1, 64]),), (3,)), [cache])
    with pytest.raises(ValueError, match="below the model's maximum 8, got 8"):
        target.forward(Forest((DraftTree.chain([1] * 6),), (3,)), [cache])
    assert target.forward(Forest((DraftTree.chain([1] * 5),), (3,)), [cache]).logits.shape == (5, 64)


@unit
@pytest.mark.parametrize(("argument", "near"), [({"attention": "dens"}, "dense"), ({"kernel": "eagre"}, "eager")])
def test_unknown_attention_names_the_nearest(argument, near):
    with pytest.raises(ValueError, match=f"unknown {next(iter(argument))}.*did you mean '{near}'"):
        HFTarget(tiny_llama(0), **argument)


@unit
def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="not a transformers model"):
        HFTarget(torch.nn.Linear(2, 2))
