"""One completion from the name of a model to the last line of the summary."""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from treepass import models
from treepass.cli.comparison import Comparer, Comparison
from treepass.cli.interrupt import Interrupts
from treepass.cli.output import ExitCode, note, print_json
from treepass.cli.progress import CaughtWarnings, LiveLine, Speedometer
from treepass.cli.summary import Completion, contents, describe, print_summary
from treepass.cli.text import TextWriter
from treepass.cli.trace import Trace
from treepass.embedded import quiet_transformers
from treepass.errors import PromptError, TreepassError
from treepass.generate import TreeDecoder, TreeOutput
from treepass.record import PassRecord, Report

if TYPE_CHECKING:
    from treepass.cli.generate import Request


def complete(
    request: "Request", live: LiveLine, interrupts: Interrupts, caught: CaughtWarnings, trace: Trace
) -> ExitCode:
    """Loads the model, writes the text, runs the comparison, reports.

    Args:
        request: what is wanted.
        live: where progress is shown.
        interrupts: whether the user wants no more of it.
        caught: warnings on their way.
        trace: where pass records go.

    Raises:
        TreepassError: if that is impossible.
    """
    try:
        loaded, decoder = _load(request, live)
        prompt = encode(loaded.tokenizer, request.prompt, request.raw)
        live.clear()
        caught.show()
        with interrupts.deferred():
            writer = None if request.as_json else TextWriter(loaded.tokenizer)
            run = _Run(request, decoder, prompt, live, interrupts, trace, writer)
            output, comparison = run.all()
    except torch.OutOfMemoryError as error:
        raise TreepassError(f"{error}; give a smaller --max-new-tokens, --nodes or model, or --device cpu") from error
    live.clear()
    caught.add(output.report.warnings)
    caught.show()
    done = Completion(
        loaded=loaded,
        decoder=decoder,
        params=request.params,
        max_new_tokens=request.max_new_tokens,
        prompt_tokens=len(prompt),
        text=loaded.tokenizer.decode(output.ids[0], skip_special_tokens=True),
        output=output,
        warnings=caught.messages,
        compared=request.compare,
        comparison=comparison,
    )
    if writer is None:
        print_json(contents(done))
    else:
        print_summary(done, writer.seen)
    return _exit_code(done)


def _load(request: "Request", live: LiveLine) -> tuple[models.LoadedModel, TreeDecoder]:
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    live.show(f"loading {request.model}")
    # Without a network the hub's client reports every attempt in lines of its own; its last error is shown anyway.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    loaded = models.load(request.model, dtype=request.dtype, device=request.device, on_progress=live.show)
    decoder = TreeDecoder(
        loaded.model, request.drafter, nodes=request.nodes, attention=request.attention, kernel=request.kernel
    )
    return loaded, decoder


def encode(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    """The ids of a prompt, in the model's chat template if it has one and ``raw`` does not forbid it.

    Raises:
        PromptError: if the template cannot be applied.
    """
    with quiet_transformers():  # a prompt that is too long gets a message of our own
        if raw or not getattr(tokenizer, "chat_template", None):
            return tokenizer(prompt)["input_ids"]
        try:
            messages = [{"role": "user", "content": prompt}]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # the template is a program of the model's author
            raise PromptError(
                f"the model's chat template cannot be applied ({type(error).__name__}: {error}); use --raw"
            ) from error


class _Run:
    """Everything that Ctrl-C ends between two passes."""

    def __init__(
        self,
        request: "Request",
        decoder: TreeDecoder,
        prompt: list[int],
        live: LiveLine,
        interrupts: Interrupts,
        trace: Trace,
        writer: TextWriter | None,
    ) -> None:
        self._request = request
        self._decoder = decoder
        self._prompt = prompt
        self._live = live
        self._interrupts = interrupts
        self._trace = trace
        self._writer = writer
        self._speed = Speedometer(live, "writing")
        self._so_far = Report()

    def all(self) -> tuple[TreeOutput, Comparison | None]:
        """The text, and what was asked for beside it."""
        comparer = None
        if self._request.compare:
            comparer = Comparer(self._decoder, self._prompt, self._request.params, self._live, self._should_stop)
            comparer.warm_up()
        self._trace.start()
        output = self._write()
        if comparer is None or self._should_stop():
            return output, None
        return output, comparer.compare(output, self._request.max_new_tokens)

    def _write(self) -> TreeOutput:
        self._live.show(f"reading {len(self._prompt)} prompt tokens")
        try:
            return self._decoder.generate(
                self._prompt,
                max_new_tokens=self._request.max_new_tokens,
                callback=self._on_pass,
                should_stop=self._should_stop,
                keep_records=False,
                **asdict(self._request.params),
            )
        finally:
            self._live.clear()
            if self._writer:
                self._writer.finish()

    def _on_pass(self, record: PassRecord) -> None:
        if not self._so_far.passes:
            self._live.clear()
        self._so_far.add(record)
        self._trace.write(record)
        if self._writer:
            self._writer.write(record)
        if self._writer is None or not self._writer.on_terminal:
            self._speed.update(self._so_far.emitted, self._so_far.passes)

    def _should_stop(self) -> bool:
        return self._interrupts.requested


def _exit_code(done: Completion) -> ExitCode:
    if done.finish_reason == "interrupted" or (done.compared and done.comparison is None):
        return ExitCode.INTERRUPTED
    if done.comparison and done.comparison.failed and done.comparison.difference:
        note(f"error: the ids differ from those of transformers' generate: {describe(done.comparison.difference)}")
        return ExitCode.PARITY
    return ExitCode.OK
