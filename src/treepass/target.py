"""Target: one pass of the model over a forest. Prefill, plain decoding and tree verification are this one primitive."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from treepass.attention import (
    ATTENTIONS,
    DENSE_KERNELS,
    attention_kernel,
    default_kernel,
    dense_mask,
    register_kernels,
)
from treepass.cache import PassCache, TreeCache
from treepass.errors import UnsupportedModelError, unknown
from treepass.tree import DraftTree, Forest

PREFILL_ROWS = 512
"""Most rows of one prefill pass: bounds the memory of the mask and of the activations."""

VERIFIED_TYPES = frozenset({"llama"})
"""Model types whose tree logits were compared with path-by-path logits, here and in the tests."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary variants that rescale with the longest position of the pass, so that one node's rows depend on another's."""


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
    """The model whose output counts."""

    name: str
    vocab_size: int
    max_length: int

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

    def __init__(self, model: PreTrainedModel, attention: str = "dense", kernel: str | None = None) -> None:
        """Wraps a model; the model itself is not changed.

        Args:
            model: a causal language model of a verified type, in evaluation mode.
            attention: name of the tree attention.
            kernel: ``grouped``, ``sdpa`` or ``eager``, for ``dense``; None takes the fastest for the device.

        Raises:
            UnsupportedModelError: if the model cannot decode trees exactly.
            ValueError: if ``attention`` or ``kernel`` is unknown.
        """
        if attention not in ATTENTIONS:
            raise ValueError(unknown("attention", attention, ATTENTIONS))
        if kernel is not None and kernel not in DENSE_KERNELS:
            raise ValueError(unknown("kernel", kernel, DENSE_KERNELS))
        check_supported(model)
        self.model = model
        self.attention = attention
        self.kernel = kernel or default_kernel(self.device)
        self.config = model.config.get_text_config()
        self.vocab_size = int(self.config.vocab_size)
        self.max_length = int(self.config.max_position_embeddings)
        self._cache_argument = _cache_argument(model)
        register_kernels()

    @property
    def device(self) -> torch.device:
        """Device that takes the input ids."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of mask, keys and values."""
        return self.model.dtype

    def new_cache(self, capacity: int = 0) -> TreeCache:
        """An empty cache for one sequence, with room for ``capacity`` rows."""
        return TreeCache(self.config.num_hidden_layers, capacity)

    @torch.inference_mode()
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
        """
        self._check(forest, caches)
        positions = torch.from_numpy(forest.positions)[None].to(self.device)
        arguments = {
            "input_ids": torch.from_numpy(forest.tokens)[None].to(self.device),
            "position_ids": positions,
            "attention_mask": dense_mask(forest, self.dtype, self.device),
            self._cache_argument: PassCache(caches, [tree.rows for tree in forest.trees]),
            "use_cache": True,
            "logits_to_keep": 0 if rows is None else torch.as_tensor(rows, dtype=torch.long, device=self.device),
            "output_hidden_states": bool(hidden_layers),
        }
        with attention_kernel(self.config, self.kernel):
            output = self.model(**arguments)
        hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
        return PassOutput(output.logits[0], hidden)

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


def check_supported(model: Any) -> None:
    """Refuses what cannot decode trees exactly.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    reason = _unsupported_reason(model, config)
    if reason:
        raise UnsupportedModelError(f"cannot decode trees with model type '{kind}': {reason}")


def _unsupported_reason(model: Any, config: Any) -> str | None:
    if not isinstance(model, PreTrainedModel) or config is None:
        return "not a transformers model; load it with AutoModelForCausalLM.from_pretrained"
    if config.is_encoder_decoder:
        return "an encoder-decoder has no single causal cache"
    if model._is_stateful:
        return "its recurrent state cannot be rolled back to an earlier token"
    if model.get_output_embeddings() is None:
        return "it has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
    if config.model_type not in VERIFIED_TYPES:
        return f"its tree logits are not verified yet (verified types: {', '.join(sorted(VERIFIED_TYPES))})"
    rope = (getattr(config.get_text_config(), "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in LENGTH_DEPENDENT_ROPE:
        return f"'{rope}' rotary embeddings depend on the longest position of a pass, so nodes would change each other"
    if model.training:
        return "it is in training mode; call model.eval() first"
    return None


def _cache_argument(model: PreTrainedModel) -> str:
    """The name under which ``forward`` takes a cache; transformers renamed it in 5.x."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"cannot decode trees with model type '{model.config.model_type}': its forward takes no cache"
    )
