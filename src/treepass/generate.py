"""``TreeDecoder``: text from a model, several tokens per pass, token for token what the model alone would write."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from treepass import support
from treepass.cache import TreeCache
from treepass.drafters import Drafter, build_drafter
from treepass.engine import Engine, Session
from treepass.errors import PromptError
from treepass.models import load
from treepass.record import PassRecord, Report
from treepass.sampling import Choice, Sampler, SamplingParams, draw_seed
from treepass.settings import Settings, merged, prepare, sampling_fields
from treepass.target import HFTarget

DEFAULT_NEW_TOKENS = 256
"""Tokens to emit at most, where nothing else is said."""

NEGATIVE_PROMPT = ("negative_prompt_ids", "negative_prompt_attention_mask")
"""Arguments of transformers' ``generate`` for classifier-free guidance."""

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
        finish_reasons: ``stop``, ``length``, ``time`` or ``interrupted`` for every sample.
        report: counts over all samples.
        reports: counts of every sample.
        records: the passes of all samples in the order in which they ran; empty if not kept.
        seed: the key of the noise, drawn if none was given.
        drafter: name of the drafter.
        rule: name of the verification rule.
        lossless: whether the rule keeps the target's law.
        logprobs: log-probability of every emitted token of every sample under the raw model.
        scores: score of every emitted token of every sample after processors, temperature and truncation.
        choices: every emitted token of every sample with the likeliest others, or its rows; empty unless these were
            asked for.
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
    logprobs: list[list[float]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    choices: list[list[Choice]] = field(default_factory=list)


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
            drafter: ``auto`` (suffix and recycling together), ``suffix``, ``recycling``, ``random``, ``none``, another
                causal language model with the same vocabulary, which drafts a chain, or a drafter object. An object
                given to several decoders shares its memory among them.
            nodes: most drafted nodes per sequence and pass; 0 is plain decoding.
            memory: whether a drafter built from a name remembers earlier requests. It is bounded, it belongs to this
                decoder alone, and it never changes the text.
            attention: ``dense`` or ``per_sequence``; if None the latter where it is verified for the type of model.
            kernel: kernel of the attention, ``grouped``, ``sdpa`` or ``eager``; the fastest for the device if None.

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
        if isinstance(model, HFTarget) and not (attention is None and kernel is None):
            raise ValueError("a target has its attention and kernel already; give them where it is made")
        self.target = model if isinstance(model, HFTarget) else HFTarget(model, attention, kernel)
        self.nodes = nodes
        self.drafter = build_drafter(drafter, vocab_size=self.target.vocab_size, memory=memory)

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        num_return_sequences: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        tokenizer: Any = None,
        streamer: BaseStreamer | None = None,
        top_logprobs: int = 0,
        keep_rows: bool = False,
        callback: Callable[[PassRecord], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_records: bool = True,
        cache: TreeCache | None = None,
        **settings: Any,
    ) -> TreeOutput:
        """Continues prompts.

        Args:
            input_ids: one prompt as a list of ids or int tensor [tokens], or several as a list of lists or int
                tensor [batch, tokens].
            attention_mask: for a padded tensor, [batch, tokens], 0 at padding. Without it every id counts as text: it
                is not guessed from a padding id.
            max_new_tokens: tokens to emit at most, per sample; ``DEFAULT_NEW_TOKENS`` unless ``max_length`` or
                ``generation_config`` say otherwise. The text also ends where the model's maximum length is reached.
            temperature: 0, the default, for greedy decoding. Where ``do_sample`` is set, here or in
                ``generation_config``, what is not given here is taken from there.
            top_k: see ``SamplingParams``; so are ``top_p`` and ``min_p``.
            seed: key of the noise; the same seed gives the same text with every drafter and with none. Drawn and
                reported if None.
            num_return_sequences: samples per prompt, each with noise of its own; 1 unless ``generation_config`` says
                otherwise.
            eos_token_id: token or tokens that end the text; by default those of the model's generation config. An
                empty sequence for none.
            generation_config: settings of transformers in place of the model's own. Where it sets ``do_sample``, its
                temperature, top-k, top-p and min-p apply.
            logits_processor: processors of transformers, called along the walk only: once for every node of it, with
                that node's prefix, one sequence at a time. A processor that keeps state is declared by the attribute
                ``stateful = True`` and copied for every sequence. One that knows beforehand which token must follow
                says so by a method ``forced_token(input_ids)``, without changing its state: such tokens cost a row each
                and no pass.
            stopping_criteria: criteria of transformers, asked after every token.
            prefix_allowed_tokens_fn: as in ``generate``; called with the index of the prompt and its text.
            tokenizer: for ``stop_strings``; by default that of a model loaded by name.
            streamer: a streamer of transformers; it gets the prompt, then every token by itself. For one prompt and
                one sample.
            top_logprobs: how many of the likeliest tokens of the raw model to report beside every token.
            keep_rows: whether to keep the raw and the processed row of every token, [vocabulary] each.
            callback: called with the record of every pass of every sample as soon as it is done.
            should_stop: asked before every pass; if it answers True, what is there is returned with the finish
                reason ``interrupted``.
            keep_records: whether to keep the records in the output.
            cache: rows of the beginning of the one prompt, of this decoder's target; see ``session``.
            **settings: any other field of ``GenerationConfig``: ``repetition_penalty``, ``no_repeat_ngram_size``,
                ``bad_words_ids``, ``min_new_tokens``, ``stop_strings``, ``max_time``, ...; those of the model's own
                generation config apply unless they are set here.

        Returns:
            Samples in the order of the prompts, samples of one prompt together.

        Raises:
            PromptError: if a prompt is empty, malformed or leaves no room below the model's maximum length.
            LogitsError: if the model's logits at a node of the walk are NaN, infinite or all masked, or a processor
                raises, returns another shape or masks everything there.
            ValueError: if an argument is outside its range, a setting unknown, or one that means another way of
                decoding; conflicting settings get transformers' own errors.
        """
        # A model may have been put back into training mode since the decoder was made.
        support.require_structure(self.target.model)
        prompts = _prompts(input_ids, attention_mask)
        for number, prompt in enumerate(prompts):
            self._check_prompt(prompt, "the prompt" if len(prompts) == 1 else f"prompt {number}")
        own = {name: settings.pop(name) for name in NEGATIVE_PROMPT if name in settings}
        signature = inspect.signature(self.generate).parameters
        config = merged(self.target.model.generation_config, generation_config, settings, signature)
        lengths = _lengths_asked(max_new_tokens, generation_config, settings)
        samples = num_return_sequences
        if samples is None:
            samples = (generation_config and generation_config.num_return_sequences) or 1
        for name, value in (("max_new_tokens", lengths.new_tokens), ("num_return_sequences", samples)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if streamer is not None and len(prompts) * samples > 1:
            raise ValueError("a streamer takes one prompt and one sample")
        if own and len(prompts) > 1:
            raise ValueError(f"{', '.join(own)} take one prompt")
        if cache is not None and len(prompts) > 1:
            raise ValueError("a session takes one prompt")
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        samples_by_setting = settings.get("do_sample") or (
            generation_config is not None and generation_config.do_sample
        )
        params = _sampling(config if samples_by_setting else None, asked, draw_seed() if seed is None else seed)
        config.update(**sampling_fields(params), num_return_sequences=1, max_length=None)
        if eos_token_id is not None:
            config.eos_token_id = _token_ids("eos_token_id", eos_token_id) or None
        requests = []
        for number, prompt in enumerate(prompts):
            wanted = lengths.of(len(prompt))
            room = min(wanted, self.target.max_length - len(prompt))
            config.max_new_tokens = room
            prepared = prepare(
                self.target.model,
                prompt,
                config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                tokenizer=tokenizer or self.tokenizer,
                **own,
            )
            forks = [(sample, prepared.fork(number)) for sample in range(samples)]
            requests.append(Request(prompt, forks, cache=cache, cut_from=wanted if room < wanted else None))
        kept = Kept(top_logprobs, keep_rows, keep_records)
        return self.decode(requests, params.seed, streamer, kept, callback, should_stop)

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

    @torch.no_grad()
    def decode(
        self,
        requests: Sequence["Request"],
        seed: int,
        streamer: BaseStreamer | None,
        kept: "Kept",
        callback: Callable[[PassRecord], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> TreeOutput:
        """Decodes all samples of all prompts as one forest; ``generate`` makes the requests.

        Args:
            requests: the prompts with what their samples obey.
            seed: key of the noise.
            streamer: see ``generate``.
            kept: what to keep beside the text.
            callback: see ``generate``.
            should_stop: see ``generate``.
        """
        engine = Engine(self.target, self.drafter, self.nodes)
        sessions: list[Session] = []
        records: list[PassRecord] = []
        if streamer is not None:
            streamer.put(torch.tensor([[*requests[0].padding, *requests[0].prompt]]))
        try:
            for request in requests:
                self._admit(engine, sessions, request, seed, kept)
            live = [session for session in sessions if session.finish_reason is None]
            while live and not (should_stop and should_stop()):
                for record in engine.step(live):
                    if kept.records:
                        records.append(record)
                    if streamer is not None:
                        for token in record.emitted:
                            streamer.put(torch.tensor([token]))
                    if callback:
                        callback(record)
                live = [session for session in live if session.finish_reason is None]
        finally:
            for session in sessions:
                engine.release(session)
            if streamer is not None:
                streamer.end()
        return self._output(sessions, records, seed, engine.take_warnings())

    def _admit(self, engine: Engine, sessions: list[Session], request: "Request", seed: int, kept: "Kept") -> None:
        """Adds one session per sample; samples of a prompt copy the rows that the first one computed."""
        first: Session | None = None
        for sample, settings in request.samples:
            room = settings.max_new_tokens
            session = Session(
                ids=list(request.prompt),
                max_new_tokens=room,
                eos_ids=settings.eos_ids,
                sampler=Sampler(
                    SamplingParams(**settings.sampling, seed=seed),
                    sample,
                    process=settings.process if settings.process.processors else None,
                    top=kept.top_logprobs,
                    keep_rows=kept.rows,
                ),
                cache=first.cache.copy() if first else request.cache or self._new_cache(request, room),
                sequence=len(sessions),
                criteria=settings.criteria,
                padding=request.padding,
                device=self.target.device,
            )
            sessions.append(session)
            engine.admit(session)
            if request.cut_from:
                session.report.warnings.append(
                    f"max_new_tokens was cut from {request.cut_from} to {room} by {self.target.length_reason}"
                )
            first = first or session

    def _new_cache(self, request: "Request", room: int) -> TreeCache:
        return self.target.new_cache(len(request.prompt) + room + self.nodes)

    def stream(self, input_ids: Any, **arguments: Any) -> Iterator[Choice]:
        """The tokens of one text, one by one, each as soon as its pass is done.

        A pass runs only while the next token is waited for, so that the model is free in between. Closing the iterator,
        or leaving its loop, ends the generation.

        Args:
            input_ids: one prompt.
            **arguments: of ``generate``; one sample.

        Yields:
            Every emitted token with its log-probability and score.

        Raises:
            What ``generate`` raises, at the token where it happens.
        """
        prompts = _prompts(input_ids, arguments.get("attention_mask"))
        if arguments.get("num_return_sequences", 1) != 1 or len(prompts) > 1:
            raise ValueError("a stream takes one prompt and one sample")
        left = Event()
        asked, told = arguments.pop("should_stop", None), arguments.pop("callback", None)
        passes: SimpleQueue[PassRecord | BaseException | None] = SimpleQueue()
        wanted: SimpleQueue[None] = SimpleQueue()

        def ends() -> bool:
            wanted.get()
            return left.is_set() or bool(asked and asked())

        def tell(record: PassRecord) -> None:
            if told:
                told(record)
            passes.put(record)

        def run() -> None:
            try:
                self.generate(input_ids, callback=tell, should_stop=ends, **arguments)
                passes.put(None)
            except BaseException as error:  # it is raised where the tokens are read
                passes.put(error)

        worker = Thread(target=run, name="treepass stream", daemon=True)
        worker.start()
        try:
            while True:
                wanted.put(None)
                record = passes.get()
                if record is None:
                    return
                if isinstance(record, BaseException):
                    raise record
                yield from map(Choice, record.emitted, record.logprobs, record.scores)
        finally:
            left.set()
            wanted.put(None)
            worker.join()

    def session(self) -> "TreeSession":
        """A text that goes on: every turn reuses the rows of what it has in common with the turn before."""
        return TreeSession(self)

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
            logprobs=[session.logprobs.tolist() for session in sessions],
            scores=[session.scores.tolist() for session in sessions],
            choices=[session.choices for session in sessions],
        )


class TreeSession:
    """A text that goes on over several turns.

    Attributes:
        ids: the whole text so far.
    """

    def __init__(self, decoder: TreeDecoder) -> None:
        """Args: the decoder whose target and drafter write the text."""
        self.decoder = decoder
        self.ids: list[int] = []
        self._cache = decoder.target.new_cache()

    def generate(self, input_ids: Any, **settings: Any) -> TreeOutput:
        """One turn.

        Args:
            input_ids: the whole text up to here, as ``TreeDecoder.generate`` takes it; where it departs from what was
                written before, the rows from there on are computed anew.
            **settings: of ``TreeDecoder.generate``; one sample.

        Returns:
            The output of this turn.

        Raises:
            PromptError, LogitsError, ValueError: see ``TreeDecoder.generate``; the session can go on afterwards.
        """
        if settings.get("num_return_sequences", 1) != 1:
            raise ValueError("a session has one text; num_return_sequences must be 1")
        prompts = _prompts(input_ids, settings.pop("attention_mask", None))
        if len(prompts) != 1:
            raise ValueError("a session takes one prompt")
        prompt = prompts[0]
        common = next((i for i, (a, b) in enumerate(zip(prompt, self.ids, strict=False)) if a != b), None)
        common = min(len(prompt), len(self.ids)) if common is None else common
        # The last token of the prompt is the root of the first tree, whose row is computed with it.
        self._cache.truncate(max(0, min(common, len(prompt) - 1, self._cache.length)))
        self.ids = prompt
        try:
            output = self.decoder.generate([prompt], cache=self._cache, **settings)
        except BaseException:
            self._cache.truncate(max(0, min(len(prompt) - 1, self._cache.length)))
            raise
        self.ids = [*prompt, *output.ids[0]]
        return output


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and what its samples obey.

    Attributes:
        prompt: token ids.
        samples: for each sample its index, which keys its noise, and its settings.
        padding: tokens that processors and criteria see before the prompt.
        cache: rows of the beginning of the prompt that are there already, for its first sample.
        cut_from: the number of new tokens asked for, where the model's maximum length allows fewer.
    """

    prompt: Sequence[int]
    samples: Sequence[tuple[int, Settings]]
    padding: Sequence[int] = ()
    cache: TreeCache | None = None
    cut_from: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What to keep of a request beside its text.

    Attributes:
        top_logprobs: likeliest tokens beside every emitted one.
        rows: whether raw and processed rows are kept.
        records: whether pass records are kept.
    """

    top_logprobs: int = 0
    rows: bool = False
    records: bool = True


@dataclass(frozen=True, slots=True)
class _Lengths:
    """How long a text may become: by new tokens, else by all of them."""

    new_tokens: int | None
    total: int | None

    def of(self, prompt_length: int) -> int:
        """New tokens of a text whose prompt has this length; at least one."""
        if self.new_tokens is not None:
            return self.new_tokens
        return DEFAULT_NEW_TOKENS if self.total is None else max(1, self.total - prompt_length)


def _lengths_asked(
    max_new_tokens: int | None, config: GenerationConfig | None, settings: Mapping[str, Any]
) -> _Lengths:
    """The first that is set of: the argument, the setting ``max_length``, the configuration's two."""
    if max_new_tokens is not None:
        return _Lengths(max_new_tokens, None)
    if settings.get("max_length") is not None:
        return _Lengths(None, settings["max_length"])
    return _Lengths(None, None) if config is None else _Lengths(config.max_new_tokens, config.max_length)


def _sampling(config: GenerationConfig | None, asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """What is asked for, over what a configuration says that samples, over greedy decoding."""
    fields: dict[str, Any] = {}
    if config is not None:
        fields = {"temperature": 1.0, "top_k": 50}  # what transformers takes where a configuration says nothing
        fields |= {name: value for name in asked if (value := getattr(config, name)) is not None}
    fields |= {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(**fields, seed=seed)


def _token_ids(name: str, value: Any) -> list[int]:
    ids = _plain(value)
    ids = ids if isinstance(ids, list) else [ids]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{name} must be a token id or several, got {value!r}")
    return ids


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
