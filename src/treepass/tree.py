"""The draft tree and the forest: immutable, on the host, and nothing but arrays.

A tree is a parent array. Row 0 is the root, the last committed token, whose keys and values are not written yet; the
other rows are drafted nodes. Parents come before their children, so one sweep from left to right computes whatever
follows from the parents: depths, ancestors, paths. A prompt is the tree in which every node has one child.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """How the children of one node were drawn, for rules that judge the law of the draw.

    Attributes:
        tokens: child tokens in draw order; a token that was drawn twice stands here twice.
        law: whatever the rule needs to know of q, such as its probabilities over the vocabulary.
    """

    tokens: tuple[int, ...]
    law: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of drafted tokens below the root.

    Attributes:
        tokens: int64 [rows], token ids; ``tokens[0]`` is the last committed token.
        parents: int64 [rows], row of the parent; -1 for the root, and always smaller than the row itself.
        path_prob: float64 [rows], estimated probability that the row lies on the accepted path; 1 for the root, never
            above the parent's.
        draws: for rules that need the law of the draw, by row of the parent.

    Raises:
        ValueError: at construction, naming the first node that breaks an invariant.
    """

    tokens: IntArray
    parents: IntArray
    path_prob: FloatArray
    draws: Mapping[int, Draws] = field(default_factory=dict)
    depths: IntArray = field(init=False)
    _children: tuple[dict[int, int], ...] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens = _frozen(self.tokens, np.int64, "tokens")
        parents = _frozen(self.parents, np.int64, "parents")
        path_prob = _frozen(self.path_prob, np.float64, "path_prob")
        if not len(tokens) == len(parents) == len(path_prob):
            raise ValueError(
                "tokens, parents and path_prob must have one entry per row, "
                f"got {len(tokens)}, {len(parents)} and {len(path_prob)}"
            )
        if len(tokens) == 0:
            raise ValueError("a tree needs a root row, got 0 rows")
        _check_parents(parents)
        _check_first(tokens < 0, "token must be >= 0", tokens)
        _check_path_prob(path_prob, parents)
        chain = bool((parents == np.arange(-1, len(parents) - 1)).all())
        for name, value in (("tokens", tokens), ("parents", parents), ("path_prob", path_prob)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_children", None if chain else _children_by_token(tokens, parents))
        object.__setattr__(self, "depths", _frozen(_depths(parents, chain), np.int64, "depths"))

    @property
    def rows(self) -> int:
        """Rows that a pass computes: the drafted nodes and the root."""
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        """Drafted nodes; the root does not count."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has exactly one child, the next row."""
        return self._children is None

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for a root alone."""
        return int(self.depths.max())

    def children(self, node: int) -> dict[int, int]:
        """The children of ``node`` by token: {token: row}, in row order."""
        if self._children is not None:
            return dict(self._children[node])
        return {int(self.tokens[node + 1]): node + 1} if node + 1 < self.rows else {}

    def child(self, node: int, token: int) -> int | None:
        """The row of the child of ``node`` that carries ``token``, or None."""
        if self._children is not None:
            return self._children[node].get(token)
        return node + 1 if node + 1 < self.rows and int(self.tokens[node + 1]) == token else None

    def is_leaf(self, node: int) -> bool:
        """Whether ``node`` has no children."""
        return not self._children[node] if self._children is not None else node + 1 == self.rows

    def path(self, node: int) -> list[int]:
        """Rows from the root (left out) down to ``node`` (included); empty for the root. O(depth)."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def ancestors(self) -> BoolArray:
        """bool [rows, rows]: ``[v, u]`` is True where u is an ancestor of v, or v itself. O(rows * rows)."""
        seen = np.zeros((self.rows, self.rows), dtype=np.bool_)
        seen[0, 0] = True
        for row in range(1, self.rows):
            seen[row] = seen[self.parents[row]]
            seen[row, row] = True
        return seen

    def ranks(self) -> IntArray:
        """int64 [rows]: place of each node among its siblings by path probability, 0 the likeliest; root 0.

        Equal siblings keep their row order.
        """
        ranks = np.zeros(self.rows, dtype=np.int64)
        seen = np.zeros(self.rows, dtype=np.int64)
        for row in np.argsort(-self.path_prob[1:], kind="stable") + 1:
            parent = self.parents[row]
            ranks[row] = seen[parent]
            seen[parent] += 1
        return ranks

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError naming the first node whose token is not below ``vocab_size``."""
        _check_first(self.tokens >= vocab_size, f"token must be below the vocabulary size {vocab_size}", self.tokens)

    def prune(self, keep: Iterable[int]) -> "DraftTree":
        """The tree of the rows in ``keep`` and their ancestors, in row order; draws of kept parents stay whole."""
        chosen = np.zeros(self.rows, dtype=np.bool_)
        chosen[0] = True
        chosen[list(keep)] = True
        for row in range(self.rows - 1, 0, -1):
            if chosen[row]:
                chosen[self.parents[row]] = True
        return self._select(np.flatnonzero(chosen))

    def best(self, nodes: int) -> "DraftTree":
        """The ``nodes`` likeliest nodes, closed under ancestors; ties go to the shallower node, then to row order."""
        if nodes < 0:
            raise ValueError(f"nodes must be >= 0, got {nodes}")
        if nodes >= self.nodes:
            return self
        order = np.lexsort((np.arange(1, self.rows), self.depths[1:], -self.path_prob[1:])) + 1
        # A parent is never less likely and always shallower than its child, so the order itself is ancestor-closed.
        return self._select(np.sort(np.append(order[:nodes], 0)))

    def truncate_depth(self, depth: int) -> "DraftTree":
        """The nodes down to ``depth``."""
        return self if depth >= self.max_depth else self._select(np.flatnonzero(self.depths <= depth))

    def reorder(self, order: ArrayLike) -> "DraftTree":
        """The same tree with its rows in another parent-before-child order: new row i is old row ``order[i]``.

        Raises:
            ValueError: if ``order`` is no permutation of the rows, or puts a child before its parent.
        """
        rows = np.asarray(order, dtype=np.int64)
        if rows.shape != (self.rows,) or not np.array_equal(np.sort(rows), np.arange(self.rows)):
            raise ValueError(f"order must be a permutation of the {self.rows} rows, got {rows.tolist()}")
        return self._select(rows)

    def _select(self, rows: IntArray) -> "DraftTree":
        new = np.full(self.rows, -1, dtype=np.int64)
        new[rows] = np.arange(len(rows))
        parents = np.where(self.parents[rows] < 0, -1, new[self.parents[rows]])
        draws = {int(new[row]): draw for row, draw in self.draws.items() if new[row] >= 0}
        return DraftTree(self.tokens[rows], parents, self.path_prob[rows], draws)

    @classmethod
    def root_only(cls, token: int) -> "DraftTree":
        """A root without drafted nodes: a pass over it is plain decoding."""
        return cls.chain([token])

    @classmethod
    def chain(cls, tokens: Sequence[int] | IntArray, path_prob: ArrayLike | None = None) -> "DraftTree":
        """A chain: ``tokens[0]`` is the root, every later token the child of the one before it."""
        values = np.asarray(tokens)
        prob = np.ones(len(values)) if path_prob is None else np.asarray(path_prob, dtype=np.float64)
        return cls(values, np.arange(-1, len(values) - 1), prob)

    @classmethod
    def from_parents(
        cls, tokens: ArrayLike, parents: ArrayLike, path_prob: ArrayLike | None = None, draws: Any = None
    ) -> "DraftTree":
        """A tree from its parent array; without ``path_prob`` every node counts as certain."""
        values = np.asarray(tokens)
        prob = np.ones(len(values)) if path_prob is None else np.asarray(path_prob, dtype=np.float64)
        return cls(values, np.asarray(parents), prob, draws or {})

    @classmethod
    def from_widths(cls, root: int, levels: Sequence[Sequence[int]], widths: Sequence[int]) -> "DraftTree":
        """SpecInfer's expansion: every node of level i gets ``widths[i]`` children.

        Args:
            root: token of the root.
            levels: for each level the tokens of its nodes, parents in row order, each parent's children together:
                ``len(levels[i]) == widths[0] * ... * widths[i]``.
            widths: children per node for each level.
        """
        tokens, parents, frontier = [root], [-1], [0]
        for depth, (level, width) in enumerate(zip(levels, widths, strict=True), start=1):
            if len(level) != len(frontier) * width:
                raise ValueError(f"level {depth} needs {len(frontier)} * {width} tokens, got {len(level)}")
            first = len(tokens)
            parents += [parent for parent in frontier for _ in range(width)]
            tokens += level
            frontier = list(range(first, len(tokens)))
        return cls.from_parents(tokens, parents)

    @classmethod
    def from_rank_paths(
        cls, root: int, paths: Iterable[Sequence[int]], candidates: Mapping[tuple[int, ...], Sequence[int]]
    ) -> "DraftTree":
        """The list-of-paths form of Medusa and EAGLE: a path names a node by the rank chosen at each level.

        Args:
            root: token of the root.
            paths: rank paths such as ``(0,)``, ``(0, 0)``, ``(1,)``, in any order; every prefix must be there too.
            candidates: for each parent path, ``()`` for the root, its candidate tokens, best first.

        Raises:
            ValueError: if a path's parent is missing or a rank has no candidate.
        """
        rows: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents = [root], [-1]
        for path in sorted({tuple(p) for p in paths if len(p)}, key=lambda p: (len(p), p)):
            parent = path[:-1]
            if parent not in rows:
                raise ValueError(f"path {path} has no parent {parent} among the paths")
            if path[-1] >= len(candidates.get(parent, ())):
                raise ValueError(f"path {path} asks for rank {path[-1]}, which has no candidate token")
            rows[path] = len(tokens)
            tokens.append(candidates[parent][path[-1]])
            parents.append(rows[parent])
        return cls.from_parents(tokens, parents)

    def rank_paths(self) -> list[tuple[int, ...]]:
        """The tree's shape as rank paths, one per drafted node in row order; ranks follow row order of siblings."""
        paths: list[tuple[int, ...]] = [()]
        count = [0] * self.rows
        for parent in self.parents[1:].tolist():
            paths.append((*paths[parent], count[parent]))
            count[parent] += 1
        return paths[1:]

    @classmethod
    def merge(cls, trees: Sequence["DraftTree"]) -> "DraftTree":
        """The union of trees over one root: nodes with the same path are joined.

        A joined node takes the largest of its path probabilities: drafters read the same text, so their evidence is
        not independent, and the maximum predicted better than ``1 - prod(1 - p)`` on held-out text. Draws do not
        survive a merge.

        Raises:
            ValueError: without trees, or if their roots carry different tokens.
        """
        if not trees:
            raise ValueError("merge needs at least one tree, got none")
        root = int(trees[0].tokens[0])
        rows: dict[tuple[int, int], int] = {}
        tokens, parents, path_prob = [root], [-1], [1.0]
        for tree in trees:
            if int(tree.tokens[0]) != root:
                raise ValueError(f"trees to merge must share their root token, got {root} and {int(tree.tokens[0])}")
            new = [0]
            for token, parent, prob in zip(
                tree.tokens[1:].tolist(), tree.parents[1:].tolist(), tree.path_prob[1:].tolist(), strict=True
            ):
                edge = (new[parent], token)
                row = rows.setdefault(edge, len(tokens))
                if row == len(tokens):
                    tokens.append(token)
                    parents.append(edge[0])
                    path_prob.append(prob)
                path_prob[row] = max(path_prob[row], prob)
                new.append(row)
        return cls.from_parents(tokens, parents, path_prob)


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of all sequences that share one pass.

    Attributes:
        trees: one tree per sequence; rows of the pass are the rows of the trees, one tree after the other.
        context_lengths: committed tokens of each sequence whose keys and values are in the cache; the root of tree s
            has position ``context_lengths[s]``.
    """

    trees: tuple[DraftTree, ...]
    context_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.trees or len(self.trees) != len(self.context_lengths):
            raise ValueError(
                "a forest needs one context length per tree and at least one tree, "
                f"got {len(self.trees)} trees and {len(self.context_lengths)} lengths"
            )
        if min(self.context_lengths) < 0:
            raise ValueError(f"context lengths must be >= 0, got {min(self.context_lengths)}")

    @property
    def rows(self) -> int:
        """Rows of the whole pass."""
        return sum(tree.rows for tree in self.trees)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each tree in the pass."""
        offsets, total = [], 0
        for tree in self.trees:
            offsets.append(total)
            total += tree.rows
        return tuple(offsets)

    @property
    def tokens(self) -> IntArray:
        """int64 [rows]: token ids of all trees."""
        return np.concatenate([tree.tokens for tree in self.trees])

    @property
    def positions(self) -> IntArray:
        """int64 [rows]: position of each row, which is its context length plus its depth."""
        return np.concatenate(
            [tree.depths + length for tree, length in zip(self.trees, self.context_lengths, strict=True)]
        )


def _frozen(values: ArrayLike, dtype: Any, name: str) -> NDArray[Any]:
    raw = np.asarray(values)
    if np.issubdtype(dtype, np.integer) and raw.size and not np.issubdtype(raw.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {raw.dtype}")
    array = np.array(raw, dtype=dtype)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    array.flags.writeable = False
    return array


def _check_first(bad: BoolArray, message: str, values: NDArray[Any]) -> None:
    if bad.any():
        node = int(np.argmax(bad))
        raise ValueError(f"node {node}: {message}, got {values[node]}")


def _check_parents(parents: IntArray) -> None:
    if parents[0] != -1:
        raise ValueError(f"node 0: the root's parent must be -1, got {parents[0]}")
    rest = parents[1:]
    bad = np.concatenate(([False], (rest < 0) | (rest >= np.arange(1, len(parents)))))
    _check_first(bad, "its parent must be an earlier row", parents)


def _check_path_prob(path_prob: FloatArray, parents: IntArray) -> None:
    _check_first(~np.isfinite(path_prob), "path probability must be finite", path_prob)
    _check_first((path_prob < 0) | (path_prob > 1), "path probability must lie in [0, 1]", path_prob)
    if path_prob[0] != 1:
        raise ValueError(f"node 0: the root's path probability must be 1, got {path_prob[0]}")
    rises = np.concatenate(([False], path_prob[1:] > path_prob[parents[1:]]))
    _check_first(rises, "path probability must not exceed its parent's", path_prob)


def _children_by_token(tokens: IntArray, parents: IntArray) -> tuple[dict[int, int], ...]:
    children: tuple[dict[int, int], ...] = tuple({} for _ in range(len(tokens)))
    for row, (parent, token) in enumerate(zip(parents[1:].tolist(), tokens[1:].tolist(), strict=True), start=1):
        if token in children[parent]:
            raise ValueError(f"node {row}: sibling of node {children[parent][token]} with the same token {token}")
        children[parent][token] = row
    return children


def _depths(parents: IntArray, chain: bool) -> IntArray:
    if chain:
        return np.arange(len(parents), dtype=np.int64)
    depths = [0] * len(parents)
    for row, parent in enumerate(parents[1:].tolist(), start=1):
        depths[row] = depths[parent] + 1
    return np.asarray(depths, dtype=np.int64)
