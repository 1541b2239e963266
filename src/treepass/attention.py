"""Tree attention: the mask of a forest, read off the parents, and the names of the implementations.

Row v of sequence s sees the committed context of s, the ancestors of v and v itself; nothing else. Keys stand in the
order in which ``TreeCache`` hands them out: for each sequence its context, then the rows of its tree.

Implementations are chosen by name and never replaced silently. There is one so far, ``dense``: every row against every
key of the pass under a 4-D mask. Its kernels, measured by ``benchmarks/attention_kernels.py``:

    grouped  torch's SDPA over grouped heads as they are; the default on the CPU
    sdpa     transformers' SDPA, which under a mask copies keys and values once per query head; the default elsewhere
    eager    transformers' plain products; rounds its softmax to float32 even in a float64 model
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from treepass.tree import BoolArray, DraftTree, Forest

ATTENTIONS = ("dense",)
DENSE_KERNELS = {"grouped": "treepass_grouped", "sdpa": "sdpa", "eager": "eager"}
"""Kernels of the dense attention, and the names that transformers knows them by."""


def default_kernel(device: torch.device) -> str:
    """The kernel that was fastest on this kind of device.

    Off the CPU SDPA's fused kernels take a mask or grouped heads, but not everywhere both.
    """
    return "grouped" if device.type == "cpu" else "sdpa"


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


def dense_mask(forest: Forest, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 4-D mask [1, 1, rows, keys] that is added to the scores: 0 where a row sees a key, -inf elsewhere.

    No row is masked whole, since every row sees itself.
    """
    visible = forest_visibility(forest)[None, None]
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).to(device)


@contextmanager
def attention_kernel(config: Any, kernel: str) -> Iterator[None]:
    """Runs the model of ``config`` with another attention kernel, and leaves its own in place afterwards."""
    before = config._attn_implementation
    config._attn_implementation = DENSE_KERNELS[kernel]
    try:
        yield
    finally:
        config._attn_implementation = before


def register_kernels() -> None:
    """Makes our kernels known to transformers, by names of our own; doing it again changes nothing."""
    AttentionInterface.register(DENSE_KERNELS["grouped"], _grouped)


def _grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [1, heads, rows, width] to [1, key heads, keys, width]; returns [1, rows, heads, width]."""
    for feature in ("softcap", "s_aux", "position_bias"):
        if features.get(feature) is not None:
            raise ValueError(f"the 'grouped' attention kernel has no {feature}; choose kernel 'eager'")
    if query.shape[2] == 1:
        # One row's mask serves all heads, so that the heads of a group can stand as the rows of their key head.
        folded = query.reshape(*key.shape[:2], -1, query.shape[3])
        output = scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        return output.reshape(query.shape[0], 1, query.shape[1], -1), None
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
