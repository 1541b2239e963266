"""From transformers' generation settings to what one sequence needs: processors, stopping criteria, sampling.

transformers prepares them itself: its ``generate`` is called with a decoding method of ours that decodes nothing and
hands back what it was given. So every setting means what it means there, and conflicts get transformers' own errors.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from treepass.errors import unknown
from treepass.paths import input_device
from treepass.processors import ProcessorChain, split_sampling
from treepass.sampling import SamplingParams

SAMPLING_FIELDS = ("do_sample", "temperature", "top_k", "top_p", "min_p")
"""What a ``GenerationConfig`` says about sampling; our own arguments of these names say it otherwise."""

REFUSED = {
    "num_beams": (1, "beam search follows several texts at once"),
    "penalty_alpha": (None, "contrastive search looks one token ahead"),
    "dola_layers": (None, "DoLa reads the logits of other layers"),
    "token_healing": (False, "token healing changes the prompt"),
    "force_words_ids": (None, "forced words need beam search"),
    "constraints": (None, "constraints need beam search"),
    "prompt_lookup_num_tokens": (None, "it is a drafter of transformers; take drafter 'suffix' or 'auto'"),
    "use_mtp": (False, "it is a drafter of transformers; give a drafter"),
    "is_assistant": (False, "the model is decoded as it is, not as a draft of another"),
    "assistant_early_exit": (None, "it is a drafter of transformers; give a drafter"),
}
"""Settings that mean another way of decoding: the value that leaves them idle, and why they are refused."""


DRAFTERS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit")
"""Those of them that only choose a drafter: in a model's own settings they are passed over."""


@dataclass(slots=True)
class Settings:
    """What the text of one sequence obeys.

    Attributes:
        process: processors before temperature and truncation.
        sampling: fields of ``SamplingParams`` other than the seed; empty for greedy decoding.
        criteria: stopping criteria other than end-of-text tokens and length, which the engine looks at itself.
        eos_ids: tokens that end the text.
        max_new_tokens: the most tokens that it may grow by.
    """

    process: ProcessorChain
    sampling: dict[str, Any]
    criteria: list[StoppingCriteria]
    eos_ids: frozenset[int]
    max_new_tokens: int

    def fork(self, prompt: int, row: int = 0) -> "Settings":
        """The same for one sequence, with state of its own; see ``ProcessorChain.fork``."""
        criteria = [copy.deepcopy(one) if getattr(one, "stateful", False) else one for one in self.criteria]
        return Settings(self.process.fork(prompt, row), self.sampling, criteria, self.eos_ids, self.max_new_tokens)


def refuse_other_modes(config: GenerationConfig) -> None:
    """Refuses settings that mean another way of decoding.

    Raises:
        ValueError: naming the setting, its value and the reason.
    """
    for name, (idle, reason) in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value != idle:
            raise ValueError(f"{name}={value!r} is not supported: {reason}")
    if config.cache_implementation == "quantized":
        raise ValueError("cache_implementation='quantized' is not supported: rows are kept as the model computed them")


def from_lists(
    processors: Sequence[Any], criteria: Sequence[Any], config: GenerationConfig, prompt_length: int
) -> Settings:
    """Takes apart what transformers has prepared.

    Args:
        processors: its logits processors.
        criteria: its stopping criteria.
        config: its generation config.
        prompt_length: tokens of the prompt, padding included.
    """
    refuse_other_modes(config)
    rest, sampling = split_sampling(processors) if config.do_sample else (list(processors), {})
    others: list[StoppingCriteria] = []
    eos_ids: set[int] = set()
    lengths = []
    for one in criteria:
        if type(one) is EosTokenCriteria:
            eos_ids |= set(one.eos_token_id.flatten().tolist())
        elif type(one) is MaxLengthCriteria:
            lengths.append(int(one.max_length) - prompt_length)
        else:
            others.append(one)
    longest = min(lengths) if lengths else int(config.max_length) - prompt_length
    return Settings(ProcessorChain(rest), sampling, others, frozenset(eos_ids), longest)


def prepare(
    model: PreTrainedModel,
    prompt: Sequence[int],
    config: GenerationConfig,
    *,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Settings:
    """What transformers makes of settings for one prompt.

    Args:
        model: the model.
        prompt: token ids.
        config: all settings; nothing is taken from the model's own.
        logits_processor: more processors.
        stopping_criteria: more criteria.
        prefix_allowed_tokens_fn: as in ``generate``.
        tokenizer: for stop strings.
        **arguments: of ``generate``: ``negative_prompt_ids`` and its mask.

    Raises:
        ValueError: transformers' own for conflicting settings, ours for other ways of decoding.
    """
    refuse_other_modes(config)
    stop_strings, config = config.stop_strings, copy.deepcopy(config)
    config.stop_strings = None  # transformers refuses them for decoding methods of others
    config.cache_implementation = None  # the cache is ours
    more = list(stopping_criteria)
    if stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer; give tokenizer=")
        more.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    found: list[Settings] = []

    def capture(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> torch.Tensor:
        found.append(from_lists(logits_processor, stopping_criteria, generation_config, input_ids.shape[1]))
        return input_ids

    stand_in = with_settings(model, config)
    ids = torch.tensor([list(prompt)], device=input_device(model))
    stand_in.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=capture,
        logits_processor=LogitsProcessorList(logits_processor),
        stopping_criteria=StoppingCriteriaList(more),
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        **arguments,
    )
    return found[0]


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The parameters as fields of a ``GenerationConfig``."""
    if params.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    fields = {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p}
    return {"do_sample": True, **fields, "min_p": params.min_p or None}


def with_settings(model: PreTrainedModel, config: GenerationConfig) -> PreTrainedModel:
    """The model with settings of its own: a shallow copy, so that those it has neither fill gaps nor change."""
    other = copy.copy(model)
    other.generation_config = config
    return other


def merged(
    own: GenerationConfig, given: GenerationConfig | None, fields: Mapping[str, Any], arguments: Iterable[str] = ()
) -> GenerationConfig:
    """Settings in the order of precedence: single fields, a given configuration, the model's own.

    Args:
        own: the model's.
        given: in its place.
        fields: single ones.
        arguments: other names that a mistyped one may have meant.

    Raises:
        ValueError: for an unknown field, with the nearest known one.
    """
    config = copy.deepcopy(own if given is None else given)
    if given is None:
        for name in DRAFTERS:  # how the model is drafted elsewhere changes no text
            setattr(config, name, REFUSED[name][0])
    else:
        for name, value in own.to_diff_dict().items():
            if getattr(config, name, None) is None:
                setattr(config, name, value)
    known = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    for name, value in fields.items():
        if name not in known:
            raise ValueError(unknown("generation setting", name, [*known, *arguments]))
        setattr(config, name, value)
    return config


def finish_reason(criterion: StoppingCriteria) -> str:
    """``time`` for a limit of time, ``stop`` for whatever else a criterion may look at."""
    return "time" if isinstance(criterion, MaxTimeCriteria) else "stop"
