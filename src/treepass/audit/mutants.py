"""Errors put in on purpose: a check that one of them passes proves nothing.

Each mutant is one wrong line in how a pass is laid out, in force while its context lasts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from treepass import attention
from treepass.tree import BoolArray, DraftTree, Forest, IntArray


@dataclass(slots=True)
class Bite:
    """Whether a mutant has changed anything: one that changes nothing cannot be noticed.

    Attributes:
        count: places at which its result was another than the right one.
    """

    count: int = 0


@dataclass(frozen=True, slots=True)
class Mutant:
    """A named error.

    Attributes:
        name: what is wrong, in words.
        inject: a context in which it is wrong.
    """

    name: str
    inject: Callable[[], AbstractContextManager[Bite]]


@contextmanager
def _row_index_for_depth() -> Iterator[Bite]:
    bite = Bite()

    def positions(forest: Forest) -> IntArray:
        by_row = [
            np.arange(tree.rows) + length for tree, length in zip(forest.trees, forest.context_lengths, strict=True)
        ]
        bite.count += sum(int((tree.depths != np.arange(tree.rows)).sum()) for tree in forest.trees)
        return np.concatenate(by_row)

    with patch.object(Forest, "positions", property(positions)):
        yield bite


@contextmanager
def _sibling_visible() -> Iterator[Bite]:
    right, bite = attention.tree_visibility, Bite()

    def visibility(tree: DraftTree) -> BoolArray:
        visible = right(tree).copy()
        for row in range(1, tree.rows):
            siblings = [other for other in range(1, row) if tree.parents[other] == tree.parents[row]]
            visible[row, siblings] = True
            bite.count += len(siblings)
        return visible

    with patch.object(attention, "tree_visibility", visibility):
        yield bite


@contextmanager
def _window_off() -> Iterator[Bite]:
    right, bite = attention.narrowed, Bite()

    def narrowed(seen: torch.Tensor, test: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        bite.count += int((seen & ~right(seen, test, queries, keys)).sum())
        return seen

    with patch.object(attention, "narrowed", narrowed):
        yield bite


@contextmanager
def _window_by_row() -> Iterator[Bite]:
    right, bite = attention.narrowed, Bite()

    def narrowed(seen: torch.Tensor, test: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows, columns = seen.shape[2:]
        row_numbers = torch.arange(columns - rows, columns, device=seen.device)[None, None, :, None]
        wrong = right(seen, test, row_numbers, torch.arange(columns, device=seen.device)[None, None, None])
        bite.count += int((wrong != right(seen, test, queries, keys)).sum())
        return wrong

    with patch.object(attention, "narrowed", narrowed):
        yield bite


MUTANTS = (
    Mutant("row index for depth", _row_index_for_depth),
    Mutant("sibling visible", _sibling_visible),
    Mutant("window off", _window_off),
    Mutant("window by row index", _window_by_row),
)
"""The errors that every audit must notice, where they change anything at all."""
