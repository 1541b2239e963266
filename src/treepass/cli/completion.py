"""One completion from the name of a model to the last line of the summary; its parts, which a conversation shares."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from treepass import models
from treepass.cli.comparison import Comparer, Comparison
from treepass.cli.interrupt import Interrupts
from treepass.cli.options import Setup
from treepass.cli.output import ExitCode, note, print_json
from treepass.cli.progress import CaughtWarnings, LiveLine, Speedometer
from treepass.cli.summary import Completion, contents, describe, print_summary
from treepass.cli.text import TextWriter
from treepass.cli.trace import Trace
from treepass.embedded import quiet_transformers
from treepass.errors import PromptError, TreepassError
from treepass.generate import TreeDecoder, TreeOutput, TreeSession
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
    with memory_explained():
        loaded, decoder = load(request, live)
        prompt = encode(loaded.tokenizer, request.prompt, request.raw)
        live.clear()
        caught.show()
        with interrupts.deferred():
            writer = None if request.as_json else TextWriter(loaded.tokenizer)
            run = Writing(request, live, interrupts, writer, trace)
            output, comparison = _write_and_compare(request, decoder, prompt, run)
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


@contextmanager
def memory_explained() -> Iterator[None]:
    """Within, a device without enough memory is an error that says what to do.

    Raises:
        TreepassError: in place of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TreepassError(f"{error}; give a smaller --max-new-tokens, --nodes or model, or --device cpu") from error


def load(setup: Setup, live: LiveLine) -> tuple[models.LoadedModel, TreeDecoder]:
    """The model with its drafter.

    Raises:
        TreepassError: if it cannot be loaded or cannot decode trees.
    """
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    live.show(f"loading {setup.model}")
    # Without a network the hub's client reports every attempt in lines of its own; its last error is shown anyway.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    loaded = models.load(setup.model, dtype=setup.dtype, device=setup.device, on_progress=live.show)
    decoder = TreeDecoder(
        loaded.model, setup.drafter, nodes=setup.nodes, attention=setup.attention, kernel=setup.kernel
    )
    return loaded, decoder


def encode(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    """The ids of a prompt, in the model's chat template if it has one and ``raw`` does not forbid it.

    Raises:
        PromptError: if the template cannot be applied.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        with quiet_transformers():  # a prompt that is too long gets a message of our own
            return tokenizer(prompt)["input_ids"]
    return encode_chat(tokenizer, [{"role": "user", "content": prompt}], instead="use --raw")


def encode_chat(tokenizer: Any, messages: list[dict[str, str]], instead: str) -> list[int]:
    """The ids of a conversation in the model's chat template, up to where the answer begins.

    Args:
        tokenizer: that of the model.
        messages: each with its ``role`` and its ``content``.
        instead: what to do where that fails, for the message.

    Raises:
        PromptError: if the template cannot be applied.
    """
    with quiet_transformers():
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # the template is a program of the model's author
            raise PromptError(
                f"the model's chat template cannot be applied ({type(error).__name__}: {error}); {instead}"
            ) from error


class Writing:
    """One text, shown as it comes; Ctrl-C ends it between two passes."""

    def __init__(
        self,
        setup: Setup,
        live: LiveLine,
        interrupts: Interrupts,
        writer: TextWriter | None,
        trace: Trace | None = None,
    ) -> None:
        """Says how to write.

        Args:
            setup: the limit, and how to sample.
            live: where progress is shown.
            interrupts: whether the user wants no more of it.
            writer: where the text goes; None to write none.
            trace: where pass records go.
        """
        self.live = live
        self._setup = setup
        self._interrupts = interrupts
        self._writer = writer
        self.trace = trace or Trace(None)
        self._speed = Speedometer(live, "writing")
        self._so_far = Report()

    def run(self, decoder: TreeDecoder | TreeSession, prompt: list[int]) -> TreeOutput:
        """Continues the prompt."""
        self.live.show(f"reading {len(prompt)} prompt tokens")
        try:
            return decoder.generate(
                prompt,
                max_new_tokens=self._setup.max_new_tokens,
                callback=self._on_pass,
                should_stop=self.should_stop,
                keep_records=False,
                **asdict(self._setup.params),
            )
        finally:
            self.live.clear()
            if self._writer:
                self._writer.finish()

    def _on_pass(self, record: PassRecord) -> None:
        if not self._so_far.passes:
            self.live.clear()
        self._so_far.add(record)
        self.trace.write(record)
        if self._writer:
            self._writer.write(record)
        if self._writer is None or not self._writer.on_terminal:
            self._speed.update(self._so_far.emitted, self._so_far.passes)

    def should_stop(self) -> bool:
        """Whether Ctrl-C came."""
        return self._interrupts.requested


def _write_and_compare(
    request: "Request", decoder: TreeDecoder, prompt: list[int], writing: Writing
) -> tuple[TreeOutput, Comparison | None]:
    """The text, and what was asked for beside it."""
    comparer = None
    if request.compare:
        comparer = Comparer(decoder, prompt, request.params, writing.live, writing.should_stop)
        comparer.warm_up()
    writing.trace.start()
    output = writing.run(decoder, prompt)
    if comparer is None or writing.should_stop():
        return output, None
    return output, comparer.compare(output, request.max_new_tokens)


def _exit_code(done: Completion) -> ExitCode:
    if done.finish_reason == "interrupted" or (done.compared and done.comparison is None):
        return ExitCode.INTERRUPTED
    if done.comparison and done.comparison.failed and done.comparison.difference:
        note(f"error: the ids differ from those of transformers' generate: {describe(done.comparison.difference)}")
        return ExitCode.PARITY
    return ExitCode.OK
