"""``--compare``: the same prompt with transformers' own ``generate`` and with plain decoding, after a warm-up."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from treepass.cli.progress import LiveLine, Speedometer
from treepass.compare import Difference, TimedText, first_difference, timed_generate
from treepass.embedded import quiet_transformers
from treepass.generate import TreeDecoder, TreeOutput
from treepass.record import PassRecord, Report
from treepass.sampling import SamplingParams

WARM_UP_TOKENS = 8
WARM_UP_PROMPT = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the two others needed.

    Attributes:
        generate: the text of transformers' ``generate`` and its seconds.
        plain: counts of our engine with 0 nodes.
        identical: whether ``generate`` wrote the same ids; None above temperature 0, where its noise is another.
        difference: where the ids part, if they do.
    """

    generate: TimedText
    plain: Report
    identical: bool | None
    difference: Difference | None

    @property
    def failed(self) -> bool:
        """Whether the ids differ by more than rounding explains."""
        return self.difference is not None and not self.difference.near_tie


class Comparer:
    """The runs beside the one whose text is shown; each can be stopped between two tokens."""

    def __init__(
        self,
        decoder: TreeDecoder,
        prompt: Sequence[int],
        params: SamplingParams,
        live: LiveLine,
        should_stop: Callable[[], bool],
    ) -> None:
        """Args: the decoder whose text is compared, its prompt and sampling, and where progress is shown."""
        self._decoder = decoder
        self._model: PreTrainedModel = decoder.target.model
        target = decoder.target
        self._plain = TreeDecoder(self._model, None, nodes=0, attention=target.attention, kernel=target.kernel)
        self._prompt = list(prompt)
        self._params = params
        self._live = live
        self._should_stop = should_stop

    def warm_up(self) -> None:
        """A few tokens of each, so that none pays for first calls. Drafters forget what they saw."""
        self._live.show("warming up")
        prompt = self._prompt[-WARM_UP_PROMPT:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for decoder in (self._decoder, self._plain):
                decoder.generate(
                    prompt,
                    max_new_tokens=WARM_UP_TOKENS,
                    eos_token_id=(),
                    should_stop=self._should_stop,
                    **asdict(self._params),
                )
                decoder.drafter.reset()
        self._generate(prompt, WARM_UP_TOKENS, (), lambda tokens: None)

    def compare(self, output: TreeOutput, max_new_tokens: int) -> Comparison | None:
        """Runs both; None if that was stopped.

        Args:
            output: the text to compare with.
            max_new_tokens: its limit.
        """
        limit = min(max_new_tokens, self._decoder.target.max_length - len(self._prompt))
        self._live.show("running transformers' generate")
        speed = Speedometer(self._live, "transformers' generate")
        generated = self._generate(self._prompt, limit, self._eos_ids(), speed.update)
        self._live.show("running plain decoding")
        plain = self._run_plain(limit)
        if self._should_stop():
            return None
        if not self._params.greedy:
            return Comparison(generated, plain, None, None)
        difference = first_difference(self._model, self._prompt, output.ids[0], generated.ids)
        return Comparison(generated, plain, difference is None, difference)

    def _run_plain(self, limit: int) -> Report:
        speed = Speedometer(self._live, "plain decoding")
        report = Report()

        def watch(record: PassRecord) -> None:
            report.add(record)
            speed.update(report.emitted)

        return self._plain.generate(
            self._prompt,
            max_new_tokens=limit,
            callback=watch,
            should_stop=self._should_stop,
            keep_records=False,
            **asdict(self._params),
        ).report

    def _generate(
        self, prompt: Sequence[int], limit: int, eos_ids: Sequence[int], watch: Callable[[int], None]
    ) -> TimedText:
        stop = StoppingCriteriaList([_Stop(len(prompt), watch, self._should_stop)])
        with quiet_transformers():
            return timed_generate(self._model, prompt, limit, self._params, eos_ids, stopping_criteria=stop)

    def _eos_ids(self) -> list[int]:
        ids = self._model.generation_config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


class _Stop(StoppingCriteria):
    """Asks between two tokens of ``generate`` whether to stop, and reports how many there are."""

    def __init__(self, prompt_length: int, watch: Callable[[int], None], should_stop: Callable[[], bool]) -> None:
        self._prompt_length = prompt_length
        self._watch = watch
        self._should_stop = should_stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._watch(input_ids.shape[1] - self._prompt_length)
        return torch.full((input_ids.shape[0],), self._should_stop(), dtype=torch.bool, device=input_ids.device)
