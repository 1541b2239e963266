"""Tree attention: which key each row of a pass may see, and the attention functions that respect it.

Row v of sequence s sees the committed context of s, the ancestors of v and v itself; nothing else. Whatever a layer
adds to that (a sliding window, chunks) is a test on positions, and position is context length plus depth. So the masks
are not written here: transformers composes each layer's own test as a function of two positions, and we evaluate it at
the positions of the tree instead of at row numbers.

A model reaches us under one name in transformers' registries of attention and of mask functions; what it finds there
reads the ``ForestPass`` of the running pass from a context variable. Implementations are chosen by name:

    dense         every row against every key of the pass
    per_sequence  every sequence against its own keys, which stay where they lie in its cache

and so are the kernels for the products of one such block (measured by ``benchmarks/attention.py``):

    grouped  torch's SDPA over grouped heads as they are; the default on the CPU
    sdpa     torch's SDPA with keys and values copied once per query head; the default elsewhere
    eager    plain products and a softmax. SDPA has neither soft caps nor sinks, so that layers with them are always
             computed this way
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from treepass.tree import BoolArray, DraftTree, Forest, IntArray

ATTENTIONS = ("dense", "per_sequence")
KERNELS = ("grouped", "sdpa", "eager")
REGISTERED_NAME = "treepass"
"""What transformers' registries know our functions by."""

PositionTest = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' mask functions: (batch, head, query position, key position) -> bool, by broadcasting."""

# What an attention function may be handed that changes nothing here: windows are in the mask, the rest steers outputs.
_WITHOUT_EFFECT = frozenset(
    {"sliding_window", "is_causal", "position_ids", "return_dict", "use_cache", "logits_to_keep"}
)


class PassKeys(Protocol):
    """Where ``per_sequence`` finds the keys and values that a layer has just written; see ``cache.PassCache``."""

    def sequences(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every sequence, [heads, keys of the sequence, width], of the layer that wrote these."""
        ...


@dataclass(slots=True, eq=False)
class ForestPass:
    """What the attention of one pass reads.

    Attributes:
        forest: the trees and their contexts.
        attention: a name of ``ATTENTIONS``.
        kernel: a name of ``KERNELS``.
        keys: the keys and values of the pass.
        masks: how many masks the model has asked for; a model that asks for none ignores the tree.
        attended: how often the model has called our attention function.
    """

    forest: Forest
    attention: str
    kernel: str
    keys: PassKeys
    masks: int = 0
    attended: int = 0
    _rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    @property
    def is_split(self) -> bool:
        """Whether sequences attend one by one: with a single one there is nothing to split."""
        return self.attention == "per_sequence" and len(self.forest.trees) > 1

    def mask(self, test: PositionTest, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 4-D mask [1, 1, rows, columns] that is added to the scores: 0 where a row sees a key, -inf elsewhere.

        Columns are the keys of the pass; if it is split those of the row's own sequence, padded to the longest.
        No row is masked whole, since every row sees itself.
        """
        self.masks += 1
        if self._rows is None or self._rows[0].device != device:
            visible, positions = forest_visibility(self.forest, own_keys=self.is_split)
            self._rows = (
                torch.from_numpy(visible)[None, None].to(device),
                torch.from_numpy(self.forest.positions)[None, None, :, None].to(device),
                torch.from_numpy(positions)[None, None].to(device),
            )
        seen, query_positions, key_positions = self._rows
        if test is not causal_mask_function:  # what a tree shows is never later than the row itself
            seen = narrowed(seen, test, query_positions, key_positions)
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()
_RUNNING: ContextVar[ForestPass | None] = ContextVar("treepass_forest_pass", default=None)


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


def forest_visibility(forest: Forest, own_keys: bool = False) -> tuple[BoolArray, IntArray]:
    """Which columns each row sees; the reference for every implementation.

    Args:
        forest: the trees and their contexts.
        own_keys: whether a row's columns are the keys of its own sequence, padded to the longest, or those of all
            sequences, one after the other. The keys of a sequence are its context, then the rows of its tree.

    Returns:
        bool [rows, columns], True where a row sees the key of a column, and int64 [rows, columns], the position of that
        key in its sequence ([1, columns] where it is the same for all rows).
    """
    lengths = [tree.rows + context for tree, context in zip(forest.trees, forest.context_lengths, strict=True)]
    columns = max(lengths) if own_keys else sum(lengths)
    visible = np.zeros((forest.rows, columns), dtype=np.bool_)
    positions = np.zeros((forest.rows if own_keys else 1, columns), dtype=np.int64)
    row = key = 0
    for tree, context, length in zip(forest.trees, forest.context_lengths, lengths, strict=True):
        rows = slice(row, row + tree.rows)
        visible[rows, key : key + context] = True
        visible[rows, key + context : key + length] = tree_visibility(tree)
        positions[rows if own_keys else 0, key : key + length] = np.concatenate(
            [np.arange(context), context + tree.depths]
        )
        row += tree.rows
        key += 0 if own_keys else length
    return visible, positions


def narrowed(
    seen: torch.Tensor, test: PositionTest, query_positions: torch.Tensor, key_positions: torch.Tensor
) -> torch.Tensor:
    """What a row sees if the layer's own test (window, chunk) must hold too, at positions.

    Args:
        seen: bool [1, 1, rows, columns].
        test: of the layer.
        query_positions: int64 [1, 1, rows, 1].
        key_positions: int64 [1, 1, 1 or rows, columns].
    """
    first = query_positions.new_zeros(1, 1, 1, 1)
    return seen & test(first, first, query_positions, key_positions)


@contextmanager
def running(model: torch.nn.Module, configs: Sequence[Any], forest_pass: ForestPass) -> Iterator[None]:
    """Runs a model under our attention, for one pass; the implementations that it had are in place again afterwards.

    Passes of one model in several threads wait for each other. The model's own ``forward`` must not run in another
    thread meanwhile: it would find our attention in place.

    Args:
        model: what the pass runs.
        configs: the configuration objects of all parts of the model.
        forest_pass: what the attention functions will read.
    """
    with _lock_of(model):
        # The plain attribute: the property of that name would also reach into configurations that parts have of their
        # own.
        before = [config._attn_implementation_internal for config in configs]
        token = _RUNNING.set(forest_pass)
        try:
            for config in configs:
                config._attn_implementation_internal = REGISTERED_NAME
            yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation
            _RUNNING.reset(token)


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[Any]:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


def register() -> None:
    """Makes our functions known to transformers, by a name of our own; doing it again changes nothing."""
    AttentionInterface.register(REGISTERED_NAME, _attend)
    AttentionMaskInterface.register(REGISTERED_NAME, _mask)


def _current() -> ForestPass:
    forest_pass = _RUNNING.get()
    if forest_pass is None:
        raise RuntimeError(f"the attention '{REGISTERED_NAME}' works within a pass of HFTarget only")
    return forest_pass


@torch.compiler.disable
def _mask(
    *,
    mask_function: PositionTest,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """A mask function of transformers. A 2-D padding mask says nothing here: passes hold no padding."""
    if use_vmap:
        raise NotImplementedError("its mask depends on more than positions")
    return _current().mask(mask_function, dtype, torch.device(device))


def _has_effect(feature: str, value: Any) -> bool:
    return value is not None and value is not False and feature not in _WITHOUT_EFFECT and "output_" not in feature


@torch.compiler.disable
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: [1, heads, rows, width] to [1, key heads, keys, width].

    Returns:
        [1, rows, heads, value width].

    Raises:
        NotImplementedError: for a feature that is unknown here; nothing is left out silently.
    """
    s_aux = features.pop("sinks", s_aux)
    unknown = [name for name, value in features.items() if _has_effect(name, value)]
    if unknown or dropout:
        raise NotImplementedError(f"its attention has {', '.join(unknown) or 'dropout'}, which is not known here")
    if attention_mask is None:
        raise NotImplementedError("a layer of it attends without a mask")
    current = _current()
    current.attended += 1
    if position_bias is not None:
        if current.is_split:
            raise NotImplementedError("its position bias is computed over all keys; take attention 'dense'")
        attention_mask = attention_mask + position_bias
    if indices is not None:  # int [1, rows, chosen]: the keys that an indexer chose for each row
        ignored = torch.ones(attention_mask.shape, dtype=torch.bool, device=indices.device)
        ignored.scatter_(-1, indices[:, None].long(), False)
        attention_mask = attention_mask.masked_fill(ignored, float("-inf"))
    block = _Block(current.kernel, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if not current.is_split:
        return block.attend(query, key, value, attention_mask), None
    outputs, row = [], 0
    for tree, (keys, values) in zip(current.forest.trees, current.keys.sequences(key, value), strict=True):
        rows = slice(row, row + tree.rows)
        mask = attention_mask[:, :, rows, : keys.shape[1]]
        outputs.append(block.attend(query[:, :, rows], keys[None], values[None], mask))
        row += tree.rows
    return torch.cat(outputs, dim=1), None


@dataclass(frozen=True, slots=True)
class _Block:
    """Attention of some rows to some keys, by a kernel."""

    kernel: str
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[1, heads, rows, width] to [1, key heads, keys, width] under [1, 1 or heads, rows, keys]."""
        rows, groups = query.shape[2], query.shape[1] // key.shape[1]
        if self.kernel == "eager" or self.softcap is not None or self.sinks is not None:
            return self._products(query, key, value, mask)
        if rows == 1 and mask.shape[1] == 1:
            # One row's mask serves all heads, so that the heads of a group can stand as the rows of their key head.
            folded = query.reshape(*key.shape[:2], -1, query.shape[3])
            output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=self.scaling)
            return output.reshape(query.shape[0], 1, query.shape[1], -1)
        if self.kernel == "sdpa" and groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        return output.transpose(1, 2).contiguous()

    def _products(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, rows, width = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, width)  # the rows of all heads of a group
        scores = (grouped @ key.transpose(2, 3)).view(batch, heads, rows, -1) * self.scaling
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        # Half precision is too coarse for the sum of many exponentials.
        scores = (scores + mask).to(torch.promote_types(scores.dtype, torch.float32))
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
        output = weights.reshape(batch, key.shape[1], -1, key.shape[2]) @ value
        return output.view(batch, heads, rows, -1).transpose(1, 2).contiguous()
