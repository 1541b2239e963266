"""``TreeDecoder``: text from a model, several tokens per pass, token for token what the model alone would write."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treepass import support
from treepass.drafters import Drafter, build_drafter
from treepass.engine import Engine, Session
from treepass.errors import PromptError, TreepassWarning
from treepass.models import load
from treepass.record import PassRecord, Report
from treepass.sampling import Sampler, SamplingParams, draw_seed
from treepass.target import HFTarget

NOT_APPLIED = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "token_healing": False,
    "force_words_ids": None,
    "max_time": None,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "stop_strings": None,
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Fields of a model's generation config that would change the text but are not applied, and what leaves them idle."""

DEFAULT_NODES = 32
"""Most drafted nodes per sequence and pass, until a budget is measured."""

MAX_NODES = 512
"""Most drafted nodes per sequence and pass."""


@dataclass(frozen=True, slots=True)
class TreeOutput:
    """What ``TreeDecoder.generate`` returns.

    Attributes:
        sequences: int64 [samples, longest], prompt and emitted tokens, padded on the right.
        ids: the emitted tokens of every sample, without prompt and padding.
        finish_reasons: ``stop``, ``length`` or ``interrupted`` for every sample.
        report: counts over all samples.
        reports: counts of every sample.
        records: the passes of all samples in the order in which they ran; empty if not kept.
        seed: the key of the noise, drawn if none was given.
        drafter: name of the drafter.
        rule: name of the verification rule.
        lossless: whether the rule keeps the target's law.
    """

    sequences: torch.Tensor
    ids: list[list[int]]
    finish_reasons: list[str]
    report: Report
    reports: list[Report]
    records: list[PassRecord]
    seed: int
    drafter: str
    rule: str = "follow"
    lossless: bool = True


class TreeDecoder:
    """A model with a drafter."""

    def __init__(
        self,
        model: Any,
        drafter: str | Drafter | None = "auto",
        *,
        nodes: int = DEFAULT_NODES,
        memory: bool = True,
        attention: str | None = None,
        kernel: str | None = None,
    ) -> None:
        """Wraps a model; the model itself is left as it was.

        Args:
            model: a transformers causal language model in evaluation mode, an alias, folder or hub id to load, or a
                target made before, which has an attention and a kernel already.
            drafter: ``auto`` (suffix and recycling together), ``suffix``, ``recycling``, ``random``, ``none``, or a
                drafter object. An object given to several decoders shares its memory among them.
            nodes: most drafted nodes per sequence and pass; 0 is plain decoding.
            memory: whether a drafter built from a name remembers earlier requests. It is bounded, it belongs to this
                decoder alone, and it never changes the text.
            attention: ``dense`` or ``per_sequence``; if None the latter where it is verified for the type of model.
            kernel: kernel of the ``dense`` attention, ``grouped``, ``sdpa`` or ``eager``; the fastest for the device
                if None.

        Raises:
            UnsupportedModelError: if the model cannot decode trees exactly.
            ModelLoadError: if a model given by name cannot be loaded.
            ValueError: if an argument is unknown or outside its range.
        """
        if isinstance(nodes, bool) or not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes must be an integer from 0 to {MAX_NODES}, got {nodes!r}")
        self.tokenizer: Any = None
        if isinstance(model, str):
            loaded = load(model)
            model, self.tokenizer = loaded.model, loaded.tokenizer
        self.target = model if isinstance(model, HFTarget) else HFTarget(model, attention, kernel)
        self.nodes = nodes
        self.drafter = build_drafter(drafter, vocab_size=self.target.vocab_size, memory=memory)

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        num_return_sequences: int = 1,
        eos_token_id: int | Sequence[int] | None = None,
        callback: Callable[[PassRecord], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_records: bool = True,
    ) -> TreeOutput:
        """Continues prompts.

        Args:
            input_ids: one prompt as a list of ids or int tensor [tokens], or several as a list of lists or int
                tensor [batch, tokens].
            attention_mask: for a padded tensor, [batch, tokens], 0 at padding.
            max_new_tokens: tokens to emit at most, per sample. The text also ends where the model's maximum length
                is reached.
            temperature: 0 for greedy decoding.
            top_k: see ``SamplingParams``; so are ``top_p`` and ``min_p``.
            seed: key of the noise; the same seed gives the same text with every drafter and with none. Drawn and
                reported if None.
            num_return_sequences: samples per prompt, each with noise of its own.
            eos_token_id: token or tokens that end the text; by default those of the model's generation config. An
                empty sequence for none.
            callback: called with the record of every pass of every sample as soon as it is done.
            should_stop: asked before every pass; if it answers True, what is there is returned with the finish
                reason ``interrupted``.
            keep_records: whether to keep the records in the output.

        Returns:
            Samples in the order of the prompts, samples of one prompt together.

        Raises:
            PromptError: if a prompt is empty, malformed or leaves no room below the model's maximum length.
            LogitsError: if the model's logits at a node of the walk are NaN, infinite or all masked.
            ValueError: if an argument is outside its range.
        """
        for name, value in (("max_new_tokens", max_new_tokens), ("num_return_sequences", num_return_sequences)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        # A model may have been put back into training mode since the decoder was made.
        support.require_structure(self.target.model)
        seed = draw_seed() if seed is None else seed
        params = SamplingParams(temperature, top_k, top_p, min_p, seed)
        prompts = _prompts(input_ids, attention_mask)
        for number, prompt in enumerate(prompts):
            self._check_prompt(prompt, "the prompt" if len(prompts) == 1 else f"prompt {number}")
        engine = Engine(self.target, self.drafter, self.nodes)
        eos_ids = self._eos(eos_token_id)
        sessions: list[Session] = []
        records: list[PassRecord] = []
        ignored = self._ignored_settings()
        try:
            self._admit(engine, sessions, prompts, params, max_new_tokens, num_return_sequences, eos_ids)
            live = list(sessions)
            while live and not (should_stop and should_stop()):
                for record in engine.step(live):
                    if keep_records:
                        records.append(record)
                    if callback:
                        callback(record)
                live = [session for session in live if session.finish_reason is None]
        finally:
            for session in sessions:
                engine.release(session)
        return self._output(sessions, records, params.seed, ignored + engine.take_warnings())

    def _check_prompt(self, prompt: list[int], name: str) -> None:
        limit = self.target.max_length
        if not prompt:
            raise PromptError(f"{name} is empty; give at least one token")
        if len(prompt) >= limit:
            why = "" if self.target.length_reason == support.LENGTH else f", {self.target.length_reason},"
            raise PromptError(
                f"{name} has {len(prompt)} tokens, but the model's maximum is {limit}{why} with at least one new "
                "token; shorten the prompt"
            )
        outside = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if outside:
            raise PromptError(
                f"{name} holds token {outside[0]}, outside the model's vocabulary of {self.target.vocab_size}; "
                "was it made with another tokenizer?"
            )

    def _eos(self, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
        if eos_token_id is None:
            eos_token_id = self.target.model.generation_config.eos_token_id
        ids = _plain([] if eos_token_id is None else eos_token_id)
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(token) is not int for token in ids):
            raise ValueError(f"eos_token_id must be a token id or several, got {eos_token_id!r}")
        return frozenset(ids)

    def _ignored_settings(self) -> list[str]:
        config = self.target.model.generation_config
        found = [
            f"{name}={value!r}"
            for name, idle in NOT_APPLIED.items()
            if (value := getattr(config, name, None)) is not None and value != idle
        ]
        if config.cache_implementation == "quantized":
            found.append("cache_implementation='quantized'")
        if not found:
            return []
        message = f"the model's generation config sets {', '.join(found)}, which treepass does not apply"
        warnings.warn(message, TreepassWarning, stacklevel=3)
        return [message]

    def _admit(
        self,
        engine: Engine,
        sessions: list[Session],
        prompts: list[list[int]],
        params: SamplingParams,
        max_new_tokens: int,
        samples: int,
        eos_ids: frozenset[int],
    ) -> None:
        """Adds one session per sample; samples of a prompt copy the rows that the first one computed."""
        for prompt in prompts:
            room = min(max_new_tokens, self.target.max_length - len(prompt))
            first: Session | None = None
            for sample in range(samples):
                session = Session(
                    ids=list(prompt),
                    max_new_tokens=room,
                    eos_ids=eos_ids,
                    sampler=Sampler(params, sample),
                    cache=first.cache.copy() if first else self.target.new_cache(len(prompt) + room + self.nodes),
                    sequence=len(sessions),
                )
                sessions.append(session)
                engine.admit(session)
                if room < max_new_tokens:
                    session.report.warnings.append(
                        f"max_new_tokens was cut from {max_new_tokens} to {room} by {self.target.length_reason}"
                    )
                first = first or session

    def _output(self, sessions: list[Session], records: list[PassRecord], seed: int, late: list[str]) -> TreeOutput:
        report = Report(warnings=late)
        for session in sessions:
            report.merge(session.report)
        pad = self.target.model.generation_config.pad_token_id
        longest = max(len(session.ids) for session in sessions)
        sequences = torch.full((len(sessions), longest), 0 if pad is None else int(pad))
        for row, session in enumerate(sessions):
            sequences[row, : len(session.ids)] = torch.tensor(session.ids)
        return TreeOutput(
            sequences=sequences,
            ids=[session.ids[session.prompt_length :] for session in sessions],
            finish_reasons=[session.finish_reason or "interrupted" for session in sessions],
            report=report,
            reports=[session.report for session in sessions],
            records=records,
            seed=seed,
            drafter=self.drafter.name,
        )


def _prompts(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    """Prompts as lists of ids, padding removed.

    Raises:
        PromptError: if they are no ids.
    """
    if isinstance(input_ids, str):
        raise PromptError("input_ids must be token ids, got a string; encode it with the model's tokenizer")
    rows = _plain(input_ids)
    if not isinstance(rows, list):
        raise PromptError(f"input_ids must be a list or a tensor of token ids, got {type(input_ids).__name__}")
    if not rows:
        raise PromptError("the prompt is empty; give at least one token")
    several = isinstance(rows[0], list)
    rows = rows if several else [rows]
    for row in rows:
        wrong = [token for token in row if type(token) is not int] if isinstance(row, list) else [row]
        if wrong and isinstance(wrong[0], list) and several:
            raise PromptError("input_ids must have one or two dimensions, [tokens] or [batch, tokens], got more")
        if wrong:
            raise PromptError(f"input_ids must be integers, got {wrong[0]!r:.40}")
    if attention_mask is None:
        return rows
    masks = _plain(attention_mask)
    masks = masks if isinstance(masks, list) and masks and isinstance(masks[0], list) else [masks]
    if _lengths(masks) != _lengths(rows) or any(isinstance(seen, list) for mask in masks for seen in mask):
        got = _shape(_plain(attention_mask))
        raise PromptError(f"attention_mask must have the shape of input_ids, which is {_shape(rows)}, got {got}")
    return [_unpadded(f"prompt {i}", *pair) for i, pair in enumerate(zip(rows, masks, strict=True))]


def _unpadded(name: str, row: list[int], mask: list[Any]) -> list[int]:
    """The tokens that the mask shows, which must stand together: padding is what lies before or behind them."""
    wrong = [seen for seen in mask if seen not in (0, 1)]
    if wrong:
        raise PromptError(f"attention_mask must hold 0 and 1 only, got {wrong[0]!r:.40} for {name}")
    shown = [place for place, seen in enumerate(mask) if seen]
    if shown and shown[-1] - shown[0] + 1 != len(shown):
        raise PromptError(
            f"attention_mask of {name} has holes between its tokens; 0 may stand for padding at the ends only"
        )
    return [row[place] for place in shown]


def _lengths(rows: Any) -> list[int]:
    return [len(row) if isinstance(row, list) else -1 for row in rows]


def _shape(values: Any) -> str:
    """The shape of nested lists, in words; rows of unequal length are told apart."""
    if not isinstance(values, list):
        return "a single number"
    if not values or not isinstance(values[0], list):
        return f"[{len(values)}]"
    if any(isinstance(value, list) for row in values if isinstance(row, list) for value in row):
        return "more than two-dimensional"
    lengths = _lengths(values)
    return f"[{len(values)}, {lengths[0]}]" if len(set(lengths)) == 1 else f"{len(values)} rows of {lengths} tokens"


def _plain(values: Any) -> Any:
    """Tensors, arrays and sequences, nested or not, as lists of Python's own numbers."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_plain(value) for value in values] if isinstance(values, (list, tuple, set, frozenset, range)) else values
