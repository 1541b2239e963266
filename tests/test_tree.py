"""The draft tree and the forest: what they refuse, and what every builder and every change of a tree keeps."""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from treepass.attention import ForestPass, forest_visibility, tree_visibility
from treepass.testing import random_order, random_tree
from treepass.tree import DraftTree, Draws, Forest
from treepass.verify import follow

pytestmark = pytest.mark.unit

VOCAB = 12


@st.composite
def trees(draw, max_nodes: int = 40, root: int | None = None):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random_tree(
        rng,
        int(rng.integers(VOCAB)) if root is None else root,
        nodes=draw(st.integers(0, max_nodes)),
        max_depth=draw(st.integers(0, 10)),
        vocab_size=VOCAB,
    )


def path_of(tree: DraftTree, row: int) -> tuple[int, ...]:
    """Tokens below the root down to ``row``."""
    tokens: list[int] = []
    while row:
        tokens.append(int(tree.tokens[row]))
        row = int(tree.parents[row])
    return tuple(tokens[::-1])


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tree as a set of paths with their probabilities: equal for trees that differ in row order alone."""
    return {path_of(tree, row): float(tree.path_prob[row]) for row in range(1, tree.rows)}


# --- literal tables ---------------------------------------------------------------------------------------------------

#            5 (0)
#          /   |   \
#      8 (1) 2 (2)  9 (5)
#       |     |  \
#     2 (4) 8 (3) 1 (6)
#       |
#     7 (7)
TREE = DraftTree.from_parents(
    [5, 8, 2, 8, 2, 9, 1, 7],
    [-1, 0, 0, 2, 1, 0, 2, 4],
    [1.0, 0.5, 0.3, 0.2, 0.5, 0.1, 0.05, 0.25],
    {0: Draws((8, 8, 2, 9), "q0"), 2: Draws((8, 1), "q2"), 4: Draws((7,), "q4")},
)


def test_table_of_a_tree():
    assert (TREE.rows, TREE.nodes, TREE.max_depth, TREE.is_chain) == (8, 7, 3, False)
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 1, 2, 3]
    assert [TREE.children(row) for row in range(8)] == [
        {8: 1, 2: 2, 9: 5},
        {2: 4},
        {8: 3, 1: 6},
        {},
        {7: 7},
        {},
        {},
        {},
    ]
    assert [TREE.is_leaf(row) for row in range(8)] == [False, False, False, True, False, True, True, True]
    assert [TREE.path(row) for row in range(8)] == [[], [1], [2], [2, 3], [1, 4], [5], [2, 6], [1, 4, 7]]
    assert TREE.child(0, 9) == 5
    assert TREE.child(0, 5) is None
    assert TREE.child(3, 8) is None
    assert TREE.ranks().tolist() == [0, 0, 1, 0, 0, 2, 1, 0]
    assert TREE.rank_paths() == [(0,), (1,), (1, 0), (0, 0), (2,), (1, 1), (0, 0, 0)]
    assert [np.flatnonzero(row).tolist() for row in TREE.ancestors()] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 2, 3],
        [0, 1, 4],
        [0, 5],
        [0, 2, 6],
        [0, 1, 4, 7],
    ]


def test_table_of_a_chain():
    chain = DraftTree.chain([4, 4, 7])
    assert chain.is_chain
    assert chain.depths.tolist() == [0, 1, 2]
    assert [chain.children(row) for row in range(3)] == [{4: 1}, {7: 2}, {}]
    assert [chain.child(0, 4), chain.child(0, 7), chain.child(1, 7), chain.child(2, 7)] == [1, None, 2, None]
    assert [chain.is_leaf(row) for row in range(3)] == [False, False, True]
    assert chain.path(2) == [1, 2]
    assert chain.ancestors().tolist() == np.tri(3, dtype=bool).tolist()
    root = DraftTree.root_only(3)
    assert (root.rows, root.nodes, root.max_depth, root.is_leaf(0), root.children(0)) == (1, 0, 0, True, {})


@pytest.mark.parametrize(
    ("tokens", "parents", "path_prob", "message"),
    [
        ([1, 2, 3], [-1, 2, 0], None, "node 1: its parent must be an earlier row, got 2"),
        ([1, 2, 3], [-1, 0, 2], None, "node 2: its parent must be an earlier row, got 2"),
        ([1, 2, 3], [-1, 0, -1], None, "node 2: its parent must be an earlier row, got -1"),
        ([1, 2, 3], [-1, 0, -2], None, "node 2: its parent must be an earlier row, got -2"),
        ([1, 2, 3], [-1, 0, 9], None, "node 2: its parent must be an earlier row, got 9"),
        ([1, 2, 3], [0, 0, 1], None, "node 0: the root's parent must be -1, got 0"),
        ([1, 2, 3, 2], [-1, 0, 0, 0], None, "node 3: sibling of node 1 with the same token 2"),
        ([1, 2, 3, 7, 7], [-1, 0, 1, 2, 2], None, "node 4: sibling of node 3 with the same token 7"),
        ([1, 2, -3], [-1, 0, 1], None, "node 2: token must be >= 0, got -3"),
        ([-1], [-1], None, "node 0: token must be >= 0, got -1"),
        ([1, 2, 3], [-1, 0, 0], [1, 0.5, np.nan], "node 2: path probability must be finite, got nan"),
        ([1, 2, 3], [-1, 0, 0], [1, np.inf, 0.1], "node 1: path probability must be finite, got inf"),
        ([1, 2, 3], [-1, 0, 1], [1, 0.5, 0.6], "node 2: path probability must not exceed its parent's, got 0.6"),
        ([1, 2], [-1, 0], [1, 1.5], r"node 1: path probability must lie in \[0, 1\], got 1.5"),
        ([1, 2], [-1, 0], [1, -0.5], r"node 1: path probability must lie in \[0, 1\], got -0.5"),
        ([1, 2], [-1, 0], [0.5, 0.5], "node 0: the root's path probability must be 1, got 0.5"),
        ([], [], None, "a tree needs a root row, got 0 rows"),
        ([1, 2], [-1], None, "one entry per row, got 2, 1 and 2"),
        ([1, 2], [-1, 0], [1.0], "one entry per row, got 2, 2 and 1"),
        ([[1, 2]], [-1, 0], [1.0, 1.0], "one dimension"),
        ([1.0, 2.5], [-1, 0], None, "tokens must be integers"),
        ([1, 2], [-1.0, 0.0], None, "parents must be integers"),
        ([True, False], [-1, 0], None, "tokens must be integers"),
    ],
)
def test_what_is_no_tree_is_refused(tokens, parents, path_prob, message):
    with pytest.raises(ValueError, match=message) as caught:
        DraftTree.from_parents(tokens, parents, path_prob)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [True, False], [1, None], ["a", "b"]], ids=repr)
def test_a_chain_of_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match="tokens must be integers, got"):
        DraftTree.chain(tokens)


def test_tokens_outside_the_vocabulary_are_named():
    TREE.check_vocabulary(10)
    with pytest.raises(ValueError, match="node 5: token must be below the vocabulary size 9, got 9"):
        TREE.check_vocabulary(9)


def test_a_tree_cannot_be_changed():
    tokens = np.array([1, 2, 3])
    tree = DraftTree.chain(tokens)
    tokens[1] = 9
    assert tree.tokens.tolist() == [1, 2, 3]
    for array in (tree.tokens, tree.parents, tree.path_prob, tree.depths):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    children = TREE.children(0)
    children.clear()
    assert TREE.children(0) == {8: 1, 2: 2, 9: 5}
    with pytest.raises(AttributeError):
        tree.tokens = tokens


# --- builders ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB), min_size=1, max_size=30))
def test_a_chain_is_its_parent_array(tokens):
    chain = DraftTree.chain(tokens)
    tree = DraftTree.from_parents(tokens, range(-1, len(tokens) - 1))
    assert chain.is_chain
    assert tree.is_chain
    assert chain.tokens.tolist() == tree.tokens.tolist() == tokens
    assert path_of(chain, chain.rows - 1) == tuple(tokens[1:])


@given(trees())
def test_rank_paths_round_trip(tree):
    names = tree.rank_paths()
    assert len(set(names)) == tree.nodes
    candidates: dict[tuple[int, ...], list[int]] = {}
    for row, name in enumerate(names, start=1):
        siblings = candidates.setdefault(name[:-1], [])
        assert len(siblings) == name[-1]
        siblings.append(int(tree.tokens[row]))
    again = DraftTree.from_rank_paths(int(tree.tokens[0]), names[::-1], candidates)
    assert set(paths_of(again)) == set(paths_of(tree))
    assert set(again.rank_paths()) == set(names)


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 2**32))
def test_widths_round_trip(widths, seed):
    rng = np.random.default_rng(seed)
    levels, count = [], 1
    for width in widths:
        levels.append([int(t) for _ in range(count) for t in rng.permutation(VOCAB)[:width]])
        count *= width
    tree = DraftTree.from_widths(3, levels, widths)
    assert tree.rows == 1 + sum(map(len, levels))
    assert np.bincount(tree.depths).tolist() == [1, *map(len, levels)]
    for row in range(tree.rows):
        expected = widths[tree.depths[row]] if tree.depths[row] < len(widths) else 0
        assert len(tree.children(row)) == expected
    assert tree.tokens[1:].tolist() == [token for level in levels for token in level]


def test_builders_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"level 2 needs 2 \* 3 tokens, got 5"):
        DraftTree.from_widths(0, [[1, 2], [1, 2, 3, 4, 5]], [2, 3])
    with pytest.raises(ValueError, match="zip"):
        DraftTree.from_widths(0, [[1, 2]], [2, 3])
    with pytest.raises(ValueError, match="node 2: sibling of node 1 with the same token 4"):
        DraftTree.from_widths(0, [[4, 4]], [2])
    with pytest.raises(ValueError, match=r"path \(1, 0\) has no parent \(1,\)"):
        DraftTree.from_rank_paths(0, [(0,), (1, 0)], {(): [5, 6], (1,): [7]})
    with pytest.raises(ValueError, match=r"path \(2,\) asks for rank 2, which has no candidate"):
        DraftTree.from_rank_paths(0, [(2,)], {(): [5, 6]})
    with pytest.raises(ValueError, match="merge needs at least one tree"):
        DraftTree.merge([])
    with pytest.raises(ValueError, match="share their root token, got 1 and 2"):
        DraftTree.merge([DraftTree.root_only(1), DraftTree.root_only(2)])


@given(st.lists(trees(max_nodes=15, root=3), min_size=1, max_size=4))
def test_merge_is_the_union_of_paths_with_the_larger_probability(parts):
    merged = DraftTree.merge(parts)
    expected: dict[tuple[int, ...], float] = {}
    for part in parts:
        for path, prob in paths_of(part).items():
            expected[path] = max(prob, expected.get(path, 0.0))
    assert paths_of(merged) == expected
    assert paths_of(DraftTree.merge(parts[::-1])) == expected
    assert paths_of(DraftTree.merge([merged, merged])) == expected


# --- parts and orders of a tree ---------------------------------------------------------------------------------------


@given(trees(), st.data())
def test_prune_keeps_the_nodes_and_their_ancestors(tree, data):
    keep = data.draw(st.lists(st.integers(0, tree.rows - 1)))
    pruned = tree.prune(keep)
    expected = {path_of(tree, row)[:length] for row in keep for length in range(1, len(path_of(tree, row)) + 1)}
    before = paths_of(tree)
    assert paths_of(pruned) == {path: before[path] for path in expected}
    order = {path_of(tree, row): row for row in range(tree.rows)}
    rows = [order[path_of(pruned, row)] for row in range(pruned.rows)]
    assert rows == sorted(rows)
    assert paths_of(tree.prune(range(tree.rows))) == before
    assert tree.prune([]).rows == 1


@given(trees(), st.integers(0, 45), st.sampled_from(["own", "equal", "halves"]))
def test_best_nodes_are_closed_under_ancestors(tree, nodes, scores):
    prob = {"own": tree.path_prob, "equal": np.ones(tree.rows), "halves": 0.5 ** (tree.depths // 2)}[scores]
    tree = DraftTree.from_parents(tree.tokens, tree.parents, prob)
    best = tree.best(nodes)
    assert best.nodes == min(nodes, tree.nodes)
    chosen, everything = paths_of(best), paths_of(tree)
    assert chosen.items() <= everything.items()
    assert all(path[:-1] in chosen for path in chosen if len(path) > 1)
    left = [prob for path, prob in everything.items() if path not in chosen]
    assert not left or not chosen or max(left) <= min(chosen.values())
    # Of equal nodes the shallower ones.
    for path, prob in everything.items():
        if path not in chosen:
            assert all(len(other) <= len(path) for other, p in chosen.items() if p == prob)


def test_a_negative_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="nodes must be >= 0, got -1"):
        TREE.best(-1)


@given(trees(), st.integers(0, 12))
def test_depth_can_be_cut(tree, depth):
    before = paths_of(tree)
    assert paths_of(tree.truncate_depth(depth)) == {path: p for path, p in before.items() if len(path) <= depth}


@given(trees(), st.integers(0, 2**32))
def test_any_order_of_the_rows_is_the_same_tree(tree, seed):
    rng = np.random.default_rng(seed)
    draws = {
        row: Draws(tuple(tree.children(row)), ("law of", path_of(tree, row)))
        for row in range(tree.rows)
        if tree.children(row)
    }
    tree = DraftTree.from_parents(tree.tokens, tree.parents, tree.path_prob, draws)
    order = random_order(rng, tree)
    other = tree.reorder(order)
    assert paths_of(other) == paths_of(tree)
    assert {path_of(other, row): draw for row, draw in other.draws.items()} == {
        path_of(tree, row): draw for row, draw in tree.draws.items()
    }
    assert (other.ancestors() == tree.ancestors()[np.ix_(order, order)]).all()
    assert (other.depths == tree.depths[order]).all()
    back = other.reorder(np.argsort(order))
    assert back.tokens.tolist() == tree.tokens.tolist()
    assert back.parents.tolist() == tree.parents.tolist()
    assert back.draws == tree.draws


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2, 3, 4, 5, 6], "permutation of the 8 rows"),
        ([0, 1, 2, 3, 4, 5, 6, 6], "permutation of the 8 rows"),
        ([0, 3, 1, 2, 4, 5, 6, 7], "node 1: its parent must be an earlier row"),
        ([1, 0, 2, 3, 4, 5, 6, 7], "node 0: the root's parent must be -1"),
    ],
)
def test_an_order_that_is_none_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        TREE.reorder(order)


def test_draws_of_kept_parents_stay_whole():
    pruned = TREE.prune([3])
    assert paths_of(pruned) == {(2,): 0.3, (2, 8): 0.2}
    assert pruned.draws == {0: Draws((8, 8, 2, 9), "q0"), 1: Draws((8, 1), "q2")}


@given(trees())
def test_ancestors_are_the_paths(tree):
    seen = tree.ancestors()
    assert seen.dtype == np.bool_
    for row in range(tree.rows):
        assert np.flatnonzero(seen[row]).tolist() == sorted({0, row, *tree.path(row)})
        assert tree.depths[row] == len(tree.path(row))
        assert tree.is_leaf(row) == (row not in tree.parents[1:])
        assert all(tree.child(row, token) == child for token, child in tree.children(row).items())
        assert all(tree.parents[child] == row for child in tree.children(row).values())
    ranks = tree.ranks()
    for row in range(tree.rows):
        siblings = list(tree.children(row).values())
        assert sorted(ranks[siblings].tolist()) == list(range(len(siblings)))
        by_rank = sorted(siblings, key=lambda child: ranks[child])
        assert by_rank == sorted(siblings, key=lambda child: (-tree.path_prob[child], child))


# --- the walk ---------------------------------------------------------------------------------------------------------


class Token:
    def __init__(self, token: int) -> None:
        self.token = token


@given(trees(), st.integers(0, 2**32))
def test_the_walk_depends_on_paths_alone(tree, seed):
    choices: dict[tuple[int, ...], int] = {}
    rng = np.random.default_rng(seed)

    def choose_for(tree, judged):
        def choose(row):
            judged.append(row)
            path = path_of(tree, row)
            if path not in choices:
                children = list(tree.children(row))
                likely = children and rng.random() < 0.7
                choices[path] = int(rng.choice(children)) if likely else int(rng.integers(VOCAB))
            return Token(choices[path])

        return choose

    judged: list[int] = []
    verdict = follow(tree, choose_for(tree, judged))
    assert judged == [0, *verdict.path]
    assert list(verdict.path) == (tree.path(verdict.path[-1]) if verdict.path else [])
    assert 1 <= len(verdict.tokens) <= tree.max_depth + 1
    assert verdict.tokens[:-1] == tuple(tree.tokens[list(verdict.path)].tolist())
    last = verdict.path[-1] if verdict.path else 0
    assert tree.child(last, verdict.tokens[-1]) is None
    assert verdict.ended == ("bonus" if tree.is_leaf(last) else "correction")
    other = tree.reorder(random_order(rng, tree))
    again = follow(other, choose_for(other, []))
    assert again.tokens == verdict.tokens
    assert again.ended == verdict.ended


# --- the forest -------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.tuples(trees(max_nodes=12), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_forest_is_its_trees_one_after_the_other(items):
    forest = Forest(tuple(tree for tree, _ in items), tuple(length for _, length in items))
    assert forest.rows == sum(tree.rows for tree, _ in items)
    seen, positions = forest_visibility(forest)
    assert seen.shape == (forest.rows, forest.rows + sum(forest.context_lengths))
    assert positions.shape == (1, seen.shape[1])
    own, own_positions = forest_visibility(forest, own_keys=True)
    assert own.shape == own_positions.shape == (forest.rows, max(t.rows + length for t, length in items))
    # Built again from what each key is: the token at a place of a context, or a row of a tree.
    keys = [
        key
        for number, (tree, length) in enumerate(items)
        for key in [("context", number, place) for place in range(length)]
        + [("row", number, row) for row in range(tree.rows)]
    ]
    queries = [(number, row) for number, (tree, _) in enumerate(items) for row in range(tree.rows)]
    for place, (number, row) in enumerate(queries):
        tree, length = items[number]
        assert forest.tokens[place] == tree.tokens[row]
        assert forest.positions[place] == length + len(tree.path(row))
        assert place == forest.offsets[number] + row
        for column, (kind, of, index) in enumerate(keys):
            expected = of == number and (kind == "context" or index in (0, row, *tree.path(row)))
            position = index if kind == "context" else items[of][1] + len(items[of][0].path(index))
            assert bool(seen[place, column]) == expected
            assert positions[0, column] == position
            if of == number:
                mine = index if kind == "context" else length + index
                assert bool(own[place, mine]) == expected
                assert own_positions[place, mine] == position
        assert not own[place, length + tree.rows :].any()


@pytest.mark.parametrize(("attention", "columns"), [("dense", 13), ("per_sequence", 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_says_in_numbers_what_visibility_says(attention, columns, dtype):
    forest = Forest((TREE, DraftTree.chain([1, 2])), (3, 0))
    seen = torch.from_numpy(forest_visibility(forest, own_keys=attention == "per_sequence")[0])
    current = ForestPass(forest, attention, "eager", keys=None)
    mask = current.mask(causal_mask_function, dtype, torch.device("cpu"))
    assert mask.shape == (1, 1, 10, columns)
    assert mask.dtype == dtype
    assert torch.equal(mask[0, 0] == 0, seen)
    assert torch.equal(mask[0, 0] == float("-inf"), ~seen)
    assert current.masks == 1


@pytest.mark.parametrize("attention", ["dense", "per_sequence"])
@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_a_window_is_a_test_on_positions(attention, window):
    # Two trees, one with siblings far apart in rows, after contexts of 5 and 1 tokens.
    forest = Forest((TREE, DraftTree.chain([1, 2])), (5, 1))
    current = ForestPass(forest, attention, "eager", keys=None)
    mask = current.mask(sliding_window_causal_mask_function(window), torch.float32, torch.device("cpu"))[0, 0]
    row = first = 0
    for tree, context in zip(forest.trees, forest.context_lengths, strict=True):
        for node in range(tree.rows):
            path = [0, *tree.path(node)] if node else [0]
            text = [*range(context), *(context + step for step in path)]  # own column of every token of the path
            expected = [first + key for key in text[-window:]]
            assert (mask[row + node] == 0).nonzero()[:, 0].tolist() == sorted(expected)
        row += tree.rows
        first += context + tree.rows if attention == "dense" else 0


@pytest.mark.parametrize(
    ("count", "lengths", "message"),
    [(0, (), "at least one tree"), (1, (1, 2), "got 1 trees and 2 lengths"), (2, (1, -1), "must be >= 0, got -1")],
)
def test_what_is_no_forest_is_refused(count, lengths, message):
    with pytest.raises(ValueError, match=message):
        Forest((TREE,) * count, lengths)


# --- size -------------------------------------------------------------------------------------------------------------

LONG = 20_000


def test_long_chains_are_fast_and_never_square():
    tokens = np.arange(LONG) % 50_000
    tracemalloc.start()
    start = time.perf_counter()
    chain = DraftTree.chain(tokens)
    forest = Forest((chain,), (0,))
    assert chain.max_depth == LONG - 1
    assert forest.positions[-1] == LONG - 1
    chain.check_vocabulary(50_000)
    assert len(chain.path(LONG - 1)) == LONG - 1
    assert chain.child(LONG - 2, int(tokens[-1])) == LONG - 1
    assert chain.best(100).rows == 101
    assert chain.truncate_depth(7).rows == 8
    assert chain.prune([500]).rows == 501
    assert chain.ranks().sum() == 0
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    # A square matrix of one byte per entry would take 400 MB.
    assert peak < 30e6


def test_deep_trees_need_no_recursion():
    # A chain with one side branch, so that nothing takes the short cut for chains.
    depth = 5000
    tree = DraftTree.from_parents([*range(depth), 7], [*range(-1, depth - 1), 0])
    assert not tree.is_chain
    assert tree.max_depth == depth - 1
    assert len(tree.path(depth - 1)) == depth - 1
    assert DraftTree.merge([tree, DraftTree.chain([0, 9, 9])]).nodes == tree.nodes + 2
    assert len(follow(tree, lambda row: Token(row + 1)).path) == depth - 1
    assert tree.best(depth - 1).rows == depth
    assert tree.prune([depth - 1]).is_chain
    assert tree.rank_paths()[0] == (0,)


def test_visibility_of_a_chain_is_a_triangle():
    assert tree_visibility(DraftTree.chain([1, 2, 3, 4])).tolist() == np.tri(4, dtype=bool).tolist()
