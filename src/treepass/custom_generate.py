"""``tree_decoding``: trees inside transformers' own ``model.generate``.

    model.generate(**inputs, max_new_tokens=256, custom_generate=treepass.tree_decoding())

transformers prepares the request as for its own sampling (processors, stopping criteria, padding, copies of the prompt
for ``num_return_sequences``) and hands it over. It keeps ``streamer``, ``tokenizer`` and ``stop_strings`` from decoding
methods of others, so that these are given to ``tree_decoding`` instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from treepass.drafters import Drafter
from treepass.errors import PromptError
from treepass.generate import DEFAULT_NODES, Kept, Request, TreeDecoder, TreeOutput
from treepass.settings import Settings, from_lists

_IGNORED = frozenset(
    {"attention_mask", "use_cache", "logits_to_keep", "synced_gpus", "position_ids", "cache", "past_key_values"}
)


class tree_decoding:  # noqa: N801 - it reads as a function where it is used
    """A decoding method for ``model.generate(custom_generate=...)``.

    Attributes:
        output: the ``TreeOutput`` of the last request: report, records, log-probabilities, finish reasons.
    """

    def __init__(
        self,
        drafter: str | Drafter | None = "auto",
        *,
        nodes: int = DEFAULT_NODES,
        memory: bool = True,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
        stop_strings: str | Sequence[str] | None = None,
    ) -> None:
        """A decoding method.

        Args:
            drafter: see ``TreeDecoder``; so are ``nodes`` and ``memory``. The object may be used again, for one model.
            seed: key of the noise; drawn from torch's generator if None, so that ``torch.manual_seed`` decides.
            streamer: gets the prompt and then every token; ``generate``'s own argument does not reach us.
            tokenizer: for ``stop_strings``.
            stop_strings: texts that end the generation; ``generate``'s own argument does not reach us.

        Raises:
            ValueError: if an argument is unknown, or stop strings are given without a tokenizer.
        """
        if stop_strings is not None and tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer; give tokenizer=")
        self._options: dict[str, Any] = {"drafter": drafter, "nodes": nodes, "memory": memory}
        self._seed = seed
        self._streamer = streamer
        self._stop = StopStringCriteria(tokenizer, stop_strings) if stop_strings is not None else None
        self._decoder: TreeDecoder | None = None
        self.output: TreeOutput | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` calls.

        Args:
            model: the model.
            input_ids: int64 [batch, tokens], padded on the left, every prompt ``num_return_sequences`` times.
            logits_processor: prepared by transformers.
            stopping_criteria: prepared by transformers.
            generation_config: prepared by transformers.
            **arguments: inputs of the model: ``attention_mask``, [batch, tokens], 0 at padding; others are refused. (By
                name transformers would take it for a setting of this method.)

        Returns:
            int64 [batch, longest], or transformers' output object if ``return_dict_in_generate`` is set.

        Raises:
            ValueError: for inputs of the model other than ids, and a cache that is not empty.
        """
        self._check(arguments, input_ids, generation_config)
        if self._decoder is None or self._decoder.target.model is not model:
            self._decoder = TreeDecoder(model, **self._options)
        criteria = [*stopping_criteria, *([self._stop] if self._stop else [])]
        settings = from_lists(logits_processor, criteria, generation_config, input_ids.shape[1])
        samples = max(1, generation_config.num_return_sequences or 1)
        kept = Kept(rows=bool(generation_config.output_scores or generation_config.output_logits))
        seed = self._seed if self._seed is not None else int(torch.randint(2**31, ()))
        requests = _requests(input_ids, arguments.get("attention_mask"), settings, samples)
        self.output = self._decoder.decode(requests, seed, self._streamer, kept)
        return _output(self.output, input_ids, generation_config)

    def _check(self, arguments: dict[str, Any], input_ids: torch.Tensor, config: GenerationConfig) -> None:
        given = arguments.get("cache", arguments.get("past_key_values"))
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(
                "a cache from elsewhere is not supported: give the whole text; TreeDecoder.session keeps rows"
            )
        others = [name for name, value in arguments.items() if value is not None and name not in _IGNORED]
        if others:
            raise ValueError(f"tree decoding takes input_ids and attention_mask, got {', '.join(others)}")
        if self._streamer is not None and len(input_ids) > 1:
            raise ValueError("a streamer takes one prompt and one sample")
        guidance = config.guidance_scale
        if guidance is not None and guidance != 1 and len(input_ids) > 1:
            raise ValueError("guidance_scale takes one prompt and one sample")


def _requests(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, settings: Settings, samples: int
) -> list[Request]:
    """One request per prompt: its rows stand together, and share one prefill."""
    rows = input_ids.tolist()
    masks = [[1] * len(row) for row in rows] if attention_mask is None else attention_mask.tolist()
    requests = []
    for first in range(0, len(rows), samples):
        row, mask = rows[first], masks[first]
        start = mask.index(1) if 1 in mask else len(row)
        if 0 in mask[start:] or start == len(row):
            raise PromptError(f"prompt {first} must be padded on the left only, and hold at least one token")
        forks = [(sample, settings.fork(first // samples, first + sample)) for sample in range(samples)]
        requests.append(Request(row[start:], forks, padding=row[:start]))
    return requests


def _output(
    output: TreeOutput, input_ids: torch.Tensor, config: GenerationConfig
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    longest = max(len(ids) for ids in output.ids)
    pad = config._pad_token_tensor
    grown = torch.full((len(output.ids), longest), 0 if pad is None else int(pad), dtype=input_ids.dtype)
    for row, ids in enumerate(output.ids):
        grown[row, : len(ids)] = torch.tensor(ids, dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, grown.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_rows(output, longest, "processed") if config.output_scores else None,
        logits=_rows(output, longest, "logits") if config.output_logits else None,
    )


def _rows(output: TreeOutput, longest: int, name: str) -> tuple[torch.Tensor, ...]:
    """Rows of every step, [batch, vocabulary] each; zero where a text has ended before."""
    nothing = torch.zeros_like(getattr(output.choices[0][0], name))
    return tuple(
        torch.stack([getattr(sample[step], name) if step < len(sample) else nothing for sample in output.choices])
        for step in range(longest)
    )
