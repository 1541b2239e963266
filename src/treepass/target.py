"""Target: one pass of the model over a forest. Prefill, plain decoding and tree verification are this one primitive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from treepass import support
from treepass.attention import ATTENTIONS, KERNELS, ForestPass, default_kernel, register, running
from treepass.cache import PassCache, TreeCache
from treepass.errors import UnsupportedModelError, unknown
from treepass.tree import DraftTree, Forest

PREFILL_ROWS = 512
"""Most rows of one prefill pass: bounds the memory of the mask and of the activations."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass computed.

    Attributes:
        logits: [kept rows, vocabulary], in the model's dtype, in the order in which the rows were asked for.
        hidden: by layer, [rows, width]: the input of that decoder layer; the layer after the last is the final,
            normed hidden state (the indexing of transformers' ``hidden_states``).
    """

    logits: torch.Tensor
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Target(Protocol):
    """The model whose output counts.

    Attributes:
        name: of the implementation.
        vocab_size: tokens that can be fed and emitted.
        max_length: the most tokens of a text.
        length_reason: what sets that bound.
    """

    name: str
    vocab_size: int
    max_length: int
    length_reason: str

    @property
    def device(self) -> torch.device:
        """Device that takes the input ids."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        ...

    def new_cache(self, capacity: int = 0) -> TreeCache:
        """An empty cache for one sequence."""
        ...

    def forward(
        self,
        forest: Forest,
        caches: Sequence[TreeCache],
        rows: Sequence[int] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> PassOutput:
        """Runs one pass and writes the rows of every tree into its sequence's cache; see ``HFTarget.forward``."""
        ...


class HFTarget:
    """An unmodified ``transformers`` causal language model: the reference."""

    name = "hf"

    def __init__(
        self, model: Any, attention: str | None = None, kernel: str | None = None, *, verify: bool = True
    ) -> None:
        """Wraps a model; the model itself is not changed.

        Args:
            model: a causal language model in evaluation mode; one that torch.compile or peft has wrapped is unwrapped.
            attention: ``dense`` or ``per_sequence``; None takes ``per_sequence`` where the model's type allows it.
            kernel: ``grouped``, ``sdpa`` or ``eager``; None takes the fastest for the device.
            verify: whether a model of a type that is not in the table of verified ones is tried with one tree first,
                see ``support.require_exact``. Off only for what does that comparison itself.

        Raises:
            UnsupportedModelError: if the model cannot decode trees exactly.
            ValueError: if ``attention`` or ``kernel`` is unknown.
        """
        if attention is not None and attention not in ATTENTIONS:
            raise ValueError(unknown("attention", str(attention), ATTENTIONS))
        if kernel is not None and kernel not in KERNELS:
            raise ValueError(unknown("kernel", str(kernel), KERNELS))
        model = support.unwrapped(model)
        support.require_structure(model)
        self.model: PreTrainedModel = model
        self.config = model.config.get_text_config()
        self.attention = attention or support.default_attention(model)
        if verify:
            support.require_attention(model, self.attention)
        self.kernel = kernel or default_kernel(self.device)
        self.vocab_size = int(self.config.vocab_size)
        self.max_length, self.length_reason = support.longest_text(self.config)
        self._parameters = support.forward_parameters(model)
        self._configs = support.part_configs(model)
        self._cache_layers = support.cache_layers(self.config)
        self._counts_from_cache = support.counts_positions_from_cache(model)
        register()
        if verify:
            support.require_exact(self)

    @property
    def device(self) -> torch.device:
        """Device that takes the input ids."""
        return support.input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.dtype

    def new_cache(self, capacity: int = 0) -> TreeCache:
        """An empty cache for one sequence, with room for ``capacity`` rows."""
        return TreeCache(self._cache_layers, capacity)

    @torch.no_grad()  # not inference mode: some kinds of quantised weights count their versions
    def forward(
        self,
        forest: Forest,
        caches: Sequence[TreeCache],
        rows: Sequence[int] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> PassOutput:
        """Runs one pass over a forest and writes the rows of every tree into its sequence's cache.

        Args:
            forest: one tree per sequence.
            caches: one per tree; their lengths must be the forest's context lengths. Nothing is committed.
            rows: rows of the pass whose logits are wanted, all if None.
            hidden_layers: layers whose hidden states are wanted, see ``PassOutput``.

        Raises:
            ValueError: if caches and forest do not match, a token lies outside the vocabulary, or a position lies
                beyond the model's maximum length.
            UnsupportedModelError: if the model turns out to attend in a way that cannot be given a tree.
        """
        self._check(forest, caches)
        joined = self.attention == "dense"
        positions = torch.from_numpy(forest.positions).to(self.device)
        offsets = positions - torch.arange(forest.rows, device=self.device) if self._counts_from_cache else None
        keys = PassCache(caches, [tree.rows for tree in forest.trees], joined, offsets)
        current = ForestPass(forest, self.attention, self.kernel, keys)
        kept = None if rows is None else torch.as_tensor(rows, dtype=torch.long, device=self.device)
        arguments: dict[str, Any] = {
            "input_ids": torch.from_numpy(forest.tokens)[None].to(self.device),
            "position_ids": positions[None],
            self._parameters.cache: keys,
            "use_cache": True,
            "return_dict": True,
            "output_hidden_states": bool(hidden_layers),
        }
        if self._parameters.logits_to_keep:
            arguments["logits_to_keep"] = 0 if kept is None else kept
        try:
            with running(self.model, self._configs, current):
                output = self.model(**arguments)
        except NotImplementedError as error:
            raise UnsupportedModelError(support.refusal(self.model, str(error))) from error
        if not current.masks or (len(caches) > 1 and not joined and not current.attended):
            raise UnsupportedModelError(support.refusal(self.model, "it does not ask for the mask of the tree"))
        logits = output.logits[0] if kept is None or self._parameters.logits_to_keep else output.logits[0, kept]
        hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
        return PassOutput(logits, hidden)

    def _check(self, forest: Forest, caches: Sequence[TreeCache]) -> None:
        lengths = tuple(cache.length for cache in caches)
        if lengths != forest.context_lengths:
            raise ValueError(f"context lengths {forest.context_lengths} must equal the cache lengths, got {lengths}")
        for tree, length in zip(forest.trees, lengths, strict=True):
            tree.check_vocabulary(self.vocab_size)
            if length + tree.max_depth >= self.max_length:
                raise ValueError(
                    f"positions must be below the model's maximum {self.max_length}, got {length + tree.max_depth}"
                )


def prefill(target: Target, cache: TreeCache, tokens: Sequence[int], last: int = 0) -> torch.Tensor | None:
    """Computes and commits the rows of known tokens behind those already cached, in chunks; the first one is short.

    Args:
        target: the model.
        cache: the sequence's rows so far.
        tokens: the tokens that follow.
        last: how many of the last rows' logits are wanted, at most ``PREFILL_ROWS``.

    Returns:
        Logits of the last rows, [min(last, len(tokens)), vocabulary]; None if none were wanted or there are no tokens.
    """
    logits = None
    start, end = 0, len(tokens) % PREFILL_ROWS or PREFILL_ROWS
    while start < len(tokens):
        chain = DraftTree.chain(tokens[start:end])
        rows = range(max(0, chain.rows - last), chain.rows) if end == len(tokens) else ()
        output = target.forward(Forest((chain,), (cache.length,)), [cache], rows=rows)
        logits = output.logits if len(rows) else None
        cache.commit(range(chain.rows))
        start, end = end, end + PREFILL_ROWS
    return logits
