"""TreeCache: keys and values of one sequence, where a path can be kept and the rest forgotten.

Every layer has one preallocated buffer for keys and one for values, [heads, capacity, width], which grows in blocks. A
pass writes its rows behind the committed ones; ``commit`` moves the rows of the accepted path up to close the gaps and
sets the length; what lies behind the length is forgotten without being touched. Rows never move along the context, so
a commit costs O(depth).

``PassCache`` is what a transformers model sees during one pass over a forest: an ordinary ``Cache`` whose layers write
into the buffers of every sequence and hand out the keys that ``attention.forest_visibility`` speaks of, or, for
attention per sequence, remember which layer wrote which rows.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK_ROWS = 256


class TreeCache:
    """Keys and values of one sequence over all layers.

    Attributes:
        length: committed rows; equal in all layers.
    """

    def __init__(self, num_layers: int, capacity: int = 0) -> None:
        """An empty cache.

        Args:
            num_layers: layers of the model.
            capacity: rows to make room for at the first write, so that a known length needs no growing.
        """
        self.length = 0
        self._pending = 0
        self._capacity = _blocks(capacity)
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._index: list[torch.Tensor | None] = [None] * num_layers

    @property
    def _streams(self) -> tuple[list[torch.Tensor | None], ...]:
        return self._keys, self._values, self._index

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes held by the buffers."""
        return sum(t.numel() * t.element_size() for buffers in self._streams for t in buffers if t is not None)

    def reserve(self, rows: int) -> None:
        """Makes room for ``rows`` rows in all."""
        if rows <= self._capacity:
            return
        # Half as much again: a sequence of unknown length is copied O(log length) times.
        self._capacity = _blocks(max(rows, self._capacity + self._capacity // 2))
        for buffers in self._streams:
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = new = _buffer(old, self._capacity)
                    new[:, : self.length] = old[:, : self.length]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the rows of a pass behind the committed ones.

        Args:
            layer: index of the layer.
            keys: [heads, rows, key width], positions already applied.
            values: [heads, rows, value width].

        Returns:
            Views of keys and values over committed and new rows, [heads, length + rows, width].
        """
        return self._write(self._keys, layer, keys), self._write(self._values, layer, values)

    def append_index(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Writes the rows of a layer's indexer, for attention that first chooses which keys to look at.

        Args:
            layer: index of the layer.
            keys: [1, rows, index width].

        Returns:
            A view over committed and new rows, [1, length + rows, index width].
        """
        return self._write(self._index, layer, keys)

    def _write(self, buffers: list[torch.Tensor | None], layer: int, new: torch.Tensor) -> torch.Tensor:
        end = self.length + new.shape[1]
        if end > self._capacity:
            self.reserve(end)
        buffer = buffers[layer]
        if buffer is None:
            buffer = buffers[layer] = _buffer(new, self._capacity)
        buffer[:, self.length : end] = new
        self._pending = end - self.length
        return buffer[:, :end]

    def rows(self, layer: int, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values of one layer up to row ``end``, [heads, end, width]; the committed rows if None."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise ValueError(f"layer {layer} holds no rows yet")
        stop = self.length if end is None else end
        return keys[:, :stop], values[:, :stop]

    def committed(self) -> Iterator[torch.Tensor]:
        """The committed rows of every buffer, [heads, length, width]: keys, values and indices of all layers."""
        for buffers in self._streams:
            for buffer in buffers:
                if buffer is not None:
                    yield buffer[:, : self.length]

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the given rows of the last pass, in this order, and forgets its other rows.

        Args:
            rows: row numbers within the tree of this sequence, ascending: root first, then the accepted path.

        Raises:
            ValueError: if the rows do not ascend or were not written by the last pass.
        """
        if any(b <= a for a, b in pairwise(rows)) or (rows and not 0 <= rows[0] <= rows[-1] < self._pending):
            raise ValueError(f"rows to commit must ascend below {self._pending}, got {list(rows)}")
        moved = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if moved < len(rows):
            self._move(self.length + moved, [self.length + row for row in rows[moved:]])
        self.length += len(rows)
        self._pending = 0

    def truncate(self, length: int) -> None:
        """Forgets the committed rows from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must lie in [0, {self.length}], got {length}")
        self.length = length
        self._pending = 0

    def copy(self) -> "TreeCache":
        """An independent cache with the same committed rows."""
        other = TreeCache(self.num_layers, self._capacity)
        other.length = self.length
        for mine, theirs in zip(self._streams, other._streams, strict=True):
            for layer, old in enumerate(mine):
                if old is not None:
                    theirs[layer] = new = _buffer(old, self._capacity)
                    new[:, : self.length] = old[:, : self.length]
        return other

    def _move(self, start: int, sources: list[int]) -> None:
        end = start + len(sources)
        index: torch.Tensor | None = None
        for buffers in self._streams:
            for buffer in buffers:
                if buffer is None:
                    continue
                if index is None or index.device != buffer.device:
                    index = torch.tensor(sources, device=buffer.device)
                # index_select makes a copy, so source and destination may overlap.
                buffer[:, start:end] = buffer.index_select(1, index)


class PassCache(Cache):
    """The caches of a forest as one transformers cache, for the time of one pass."""

    def __init__(
        self,
        caches: Sequence[TreeCache],
        row_counts: Sequence[int],
        joined: bool = True,
        offsets: torch.Tensor | None = None,
    ) -> None:
        """Binds the caches of all sequences of a pass.

        Args:
            caches: one per sequence.
            row_counts: rows of each sequence in the pass, in the order of the rows.
            joined: whether a layer's attention is handed the keys and values of all sequences, one after the other.
                If not, it is handed back the new rows as they are and finds the rest with ``sequences``.
            offsets: int64 [rows], what the cache gives as its length to a model that counts its positions from there:
                the position of each row less its number. None to give the number of rows.
        """
        self._rows = _PassRows(caches, row_counts, joined or len(caches) == 1, offsets)
        layers: list[Any] = [_PassLayer(layer, self._rows) for layer in range(caches[0].num_layers)]
        super().__init__(layers=layers)

    def sequences(self, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every sequence, [heads, keys of the sequence, width], of the layer that wrote these.

        Raises:
            NotImplementedError: if these are not the keys and values that a layer was handed back.
        """
        return self._rows.sequences(keys, values)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Writes the rows of an indexer, [1, rows, width], and returns those of the whole forest.

        Raises:
            NotImplementedError: if keys are not joined.
        """
        return self._rows.write_index(layer_idx, keys)


class _PassRows:
    """What the layers of a ``PassCache`` share."""

    def __init__(
        self, caches: Sequence[TreeCache], row_counts: Sequence[int], joined: bool, offsets: torch.Tensor | None
    ) -> None:
        self.caches = caches
        self.row_counts = list(row_counts)
        self.joined = joined
        self.offsets = offsets
        # What was handed back, by address, with the layer that wrote it. The tensors are kept, so that no other one can
        # have the same address during the pass.
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the rows of the pass, [1, heads, rows, width], and returns what the layer attends to."""
        if len(self.caches) == 1:
            keys, values = self.caches[0].append(layer, keys[0], values[0])
            return keys[None], values[None]
        parts = [
            cache.append(layer, new_keys, new_values)
            for cache, new_keys, new_values in zip(
                self.caches, keys[0].split(self.row_counts, dim=1), values[0].split(self.row_counts, dim=1), strict=True
            )
        ]
        if self.joined:
            return torch.cat([k for k, _ in parts], dim=1)[None], torch.cat([v for _, v in parts], dim=1)[None]
        self._written[keys.data_ptr()] = keys, values, layer
        return keys, values

    def write_index(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """See ``PassCache.update_indexer``."""
        if not self.joined:
            raise NotImplementedError("it chooses among the keys of the pass; take attention 'dense'")
        parts = keys.split(self.row_counts, dim=1)
        return torch.cat([cache.append_index(layer, part) for cache, part in zip(self.caches, parts, strict=True)], 1)

    def sequences(self, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See ``PassCache.sequences``."""
        found = self._written.get(keys.data_ptr())
        if found is None or not (_same(found[0], keys) and _same(found[1], values)):
            raise NotImplementedError("it changes keys or values after they were cached; take attention 'dense'")
        layer = found[2]
        ends = [cache.length + rows for cache, rows in zip(self.caches, self.row_counts, strict=True)]
        return [cache.rows(layer, end) for cache, end in zip(self.caches, ends, strict=True)]


class _PassLayer(CacheLayerMixin):
    """One layer of ``PassCache``."""

    is_sliding = False

    def __init__(self, layer: int, rows: _PassRows) -> None:
        super().__init__()
        self.layer = layer
        self.rows = rows

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``_PassRows.write``."""
        return self.rows.write(self.layer, key_states, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers belong to ``TreeCache``."""

    def get_seq_length(self) -> Any:
        """Committed keys over the whole forest, or the offset of each row's position."""
        return self._committed if self.rows.offsets is None else self.rows.offsets

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the pass, and their offset."""
        return self._committed + query_length, 0

    @property
    def _committed(self) -> int:
        return sum(cache.length for cache in self.rows.caches)

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1

    get_max_cache_shape = get_max_length


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _blocks(rows: int) -> int:
    return -(-max(rows, 1) // BLOCK_ROWS) * BLOCK_ROWS


def _buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    # Passes run in inference mode; the buffers must not, since commits write to them outside it.
    with torch.inference_mode(False):
        return torch.empty(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)
