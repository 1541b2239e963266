"""Tree attention: the mask of a forest, read off the parents, and the names of the implementations.

Row v of sequence s sees the committed context of s, the ancestors of v and v itself; nothing else. Keys stand in the
order in which ``TreeCache`` hands them out: for each sequence its context, then the rows of its tree.

Implementations are chosen by name and never replaced silently:

    dense   the model's own attention with a 4-D mask; kernel ``sdpa`` or ``eager`` (``benchmarks/attention_kernels.py``
            measures both). SDPA is the default: it was level or ahead at every size measured, and unlike
            transformers' eager attention it does not round its softmax to float32 in a float64 model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from treepass.tree import BoolArray, DraftTree, Forest

ATTENTIONS = ("dense",)
DENSE_KERNELS = ("sdpa", "eager")
DEFAULT_DENSE_KERNEL = "sdpa"


def tree_visibility(tree: DraftTree) -> BoolArray:
    """bool [rows, rows]: which rows of its own tree each row sees: its ancestors and itself."""
    if tree.is_chain:
        return np.tri(tree.rows, dtype=np.bool_)
    return tree.ancestors()


def forest_visibility(forest: Forest) -> torch.Tensor:
    """bool [rows, keys], on the CPU: True where a row sees a key; the reference for every implementation."""
    keys = sum(forest.context_lengths) + forest.rows
    visible = torch.zeros(forest.rows, keys, dtype=torch.bool)
    row = key = 0
    for tree, context in zip(forest.trees, forest.context_lengths, strict=True):
        rows = slice(row, row + tree.rows)
        visible[rows, key : key + context] = True
        visible[rows, key + context : key + context + tree.rows] = torch.from_numpy(tree_visibility(tree))
        row += tree.rows
        key += context + tree.rows
    return visible


def dense_mask(forest: Forest, kernel: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 4-D mask [1, 1, rows, keys] in the form that ``kernel`` takes.

    SDPA takes booleans, True where a row sees a key; eager attention takes numbers to add to the scores, 0 and -inf.
    No row is masked whole, since every row sees itself.
    """
    visible = forest_visibility(forest)[None, None]
    if kernel == "sdpa":
        return visible.to(device)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).to(device)


@contextmanager
def attention_kernel(config: Any, kernel: str) -> Iterator[None]:
    """Runs the model of ``config`` with another attention kernel, and leaves its own in place afterwards."""
    before = config._attn_implementation
    config._attn_implementation = kernel
    try:
        yield
    finally:
        config._attn_implementation = before
