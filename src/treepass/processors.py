"""Logits processors along the walk: each node of the walk once, with its own prefix, in the order of the text.

The walk never goes back, so a processor that keeps state sees what it would see in plain decoding. State belongs to one
sequence: a processor with the attribute ``stateful`` is copied for every sequence, by its own ``fork()`` if it has one.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from treepass.errors import LogitsError

_SAMPLING = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class ProcessorChain:
    """The processors of one sequence."""

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        """Args: processors in the order in which they apply."""
        self.processors = list(processors)

    def fork(self, prompt: int = 0, row: int = 0) -> "ProcessorChain":
        """The processors for one sequence.

        Args:
            prompt: index of its prompt, which ``prefix_allowed_tokens_fn`` is told.
            row: its row in the batch that the processors were made for.
        """
        return ProcessorChain(_forked(processor, prompt, row) for processor in self.processors)

    def __call__(self, prefix: torch.Tensor, row: torch.Tensor, node: int, position: int) -> torch.Tensor:
        """The processed scores of one node.

        Args:
            prefix: int64 [1, tokens], the text up to and including the node.
            row: [vocabulary], raw logits.
            node: row of the node in its tree, for messages.
            position: of the node, for messages.

        Raises:
            LogitsError: if a processor raises, returns another shape, or leaves no token; it names processor and node.
        """
        scores = row[None].clone()  # processors may write into what they are given
        culprit = "the model"
        for processor in self.processors:
            where = f"logits processor {type(processor).__name__} at node {node} (position {position})"
            try:
                processed = processor(prefix, scores)
            except Exception as error:
                raise LogitsError(f"{where} failed: {type(error).__name__}: {error}") from error
            shape = getattr(processed, "shape", None)
            if shape != scores.shape:
                got = type(processed).__name__ if shape is None else list(shape)
                raise LogitsError(f"{where} must return scores of shape {list(scores.shape)}, got {got}")
            highest = float(processed.max())
            if highest == -float("inf"):
                raise LogitsError(f"{where} leaves no token to choose")
            if math.isfinite(float(scores.max())) and not math.isfinite(highest):
                culprit = where
            scores = processed
        # A later processor may have removed what an earlier one, or the model, has left.
        if not math.isfinite(float(scores.max())):
            raise LogitsError(f"{culprit} returns NaN or infinite scores; remove_invalid_values=True removes them")
        return scores[0]

    def forced(self, prefix: torch.Tensor) -> int | None:
        """The only token that can follow, where a processor knows it beforehand; None otherwise.

        ``prefix_allowed_tokens_fn`` knows it where it allows one token; a processor of one's own says it by a method
        ``forced_token(input_ids)``, which must not change its state.

        Args:
            prefix: int64 [1, tokens].

        Raises:
            LogitsError: if a processor raises.
        """
        for processor in self.processors:
            try:
                token = _only_token(processor, prefix)
            except Exception as error:
                name, position = type(processor).__name__, prefix.shape[1] - 1
                raise LogitsError(
                    f"logits processor {name} failed to say what must follow position {position}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if token is not None:
                return token
        return None

    @property
    def removes_invalid(self) -> bool:
        """Whether NaN and infinite logits of the model are dealt with here."""
        return any(isinstance(processor, InfNanRemoveLogitsProcessor) for processor in self.processors)


def split_sampling(processors: Iterable[LogitsProcessor]) -> tuple[list[LogitsProcessor], dict[str, Any]]:
    """Takes the sampling parameters off the end of a list that transformers has prepared.

    Returns:
        The processors before them, and fields of ``SamplingParams``; temperature 1 where there is none.
    """
    rest = list(processors)
    found: dict[str, Any] = {"temperature": 1.0}
    for kind in reversed(_SAMPLING):
        if rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            warper: Any = rest.pop()
            name = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k"}.get(kind.__name__)
            name = name or {"TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}[kind.__name__]
            found[name] = getattr(warper, name)
    return rest, found


class _AskedOnce:
    """``prefix_allowed_tokens_fn`` of one sequence, asked once for every prefix, though forced tokens look ahead."""

    def __init__(self, allowed: Callable[[int, torch.Tensor], Any], prompt: int) -> None:
        self._allowed = allowed
        self._prompt = prompt
        self._answers: dict[int, list[int]] = {}

    def __call__(self, _: int, text: torch.Tensor) -> list[int]:
        length = len(text)
        if length not in self._answers:
            self._answers[length] = list(self._allowed(self._prompt, text))
        # The walk never goes back.
        self._answers = {asked: answer for asked, answer in self._answers.items() if asked >= length}
        return self._answers[length]


def _only_token(processor: Any, prefix: torch.Tensor) -> int | None:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = list(processor._prefix_allowed_tokens_fn(0, prefix[0]))
        return int(allowed[0]) if len(allowed) == 1 else None
    asked = getattr(processor, "forced_token", None)
    return asked(prefix) if asked else None


def _is_plain(warper: Any) -> bool:
    """Whether a warper does what ``SamplingParams`` does: cuts off whatever it cuts off, and may leave one token."""
    fields = vars(warper)
    return fields.get("min_tokens_to_keep", 1) == 1 and fields.get("filter_value", -float("inf")) == -float("inf")


def _forked(processor: Any, prompt: int, row: int) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return PrefixConstrainedLogitsProcessor(_AskedOnce(processor._prefix_allowed_tokens_fn, prompt), num_beams=1)
    for name in ("prompt_ignore_length", "encoder_input_ids"):  # what the prompts' own processors hold of every row
        rows = getattr(processor, name, None)
        if isinstance(rows, torch.Tensor) and len(rows) > 1:
            fork = copy.copy(processor)
            setattr(fork, name, rows[row : row + 1])
            return fork
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        fork = copy.copy(processor)
        fork.generated_ngrams, fork.batch_size = processor.generated_ngrams[row : row + 1], 1
        return fork
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        fork = copy.copy(processor)  # it holds the model, which is not to be copied
        fork.unconditional_context = dict(processor.unconditional_context)
        return fork
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor) or getattr(processor, "stateful", False):
        fork_itself = getattr(processor, "fork", None)
        return fork_itself() if callable(fork_itself) else copy.deepcopy(processor)
    return processor
