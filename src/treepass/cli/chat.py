"""``treepass chat``: a conversation, turn by turn; every turn computes only the rows that the ones before lack."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treepass import models
from treepass.cli import options
from treepass.cli.interrupt import Interrupts
from treepass.cli.options import Setup, require_positive, sampling_params
from treepass.cli.output import ExitCode, document, escape_controls, examples, note, print_json
from treepass.cli.progress import CaughtWarnings, LiveLine
from treepass.cli.text import TextWriter, terminal_console
from treepass.errors import PromptError, unknown

if TYPE_CHECKING:
    from treepass.generate import TreeOutput
    from treepass.models import LoadedModel

EPILOG = examples(
    "treepass chat",
    'treepass chat --system "Answer in one sentence." --temperature 0.7',
    "treepass chat --json < questions.txt",
)

PROMPT = "> "
COMMANDS = {
    "/clear": "forget the conversation, but not the system message",
    "/exit": "end, as Ctrl-D and Ctrl-C do; during an answer Ctrl-C ends the answer only",
    "/help": "show these lines",
}
ENDINGS = {"length": " (the limit was reached)", "interrupted": " (interrupted)"}


def chat(
    model: options.Model = models.DEFAULT_MODEL,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the first turn.", show_default="the model's own")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    drafter: options.Drafter = "auto",
    nodes: options.Nodes = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document per answer in place of the text.")
    ] = False,
) -> None:
    """Talk to a model that has a chat template.

    Every line of standard input is a message, on a terminal or from a pipe. Answers go to stdout, the rest to stderr.
    /clear forgets the conversation, /exit ends it, /help lists the commands. Ctrl-C ends an answer, and at the prompt
    the conversation. A message that cannot be answered is an error line, and the conversation goes on.

    Exit codes: 0 ended, 1 error, also where a message from a pipe could not be answered, 2 usage, 130 interrupted
    while the model was loaded.
    """
    require_positive(max_new_tokens, threads)
    if system is not None:
        try:
            system.encode()
        except UnicodeError as error:
            raise ValueError(f"the system message is not valid text: {error}") from error
    with CaughtWarnings() as caught, LiveLine() as live, Interrupts() as interrupts:
        live.show("loading")
        setup = Setup(
            model=model,
            max_new_tokens=max_new_tokens,
            params=sampling_params(temperature, top_k, top_p, min_p, seed),
            drafter=drafter,
            nodes=nodes,
            dtype=dtype,
            device=device,
            threads=threads,
            as_json=as_json,
        )
        from treepass.cli.completion import memory_explained

        with memory_explained():
            conversation = Conversation(setup, system, live, interrupts, caught)
            conversation.run()
    if conversation.refused and not sys.stdin.isatty():
        raise typer.Exit(ExitCode.RUNTIME)


class Conversation:
    """A model, what was said so far, and the rows that were computed for it.

    Attributes:
        messages: what the chat template is given.
        refused: how many lines could not be answered.
    """

    def __init__(
        self, setup: Setup, system: str | None, live: LiveLine, interrupts: Interrupts, caught: CaughtWarnings
    ) -> None:
        """Loads the model.

        Args:
            setup: the model, and how it answers.
            system: the system message; None leaves it to the template.
            live: where progress is shown.
            interrupts: Ctrl-C.
            caught: warnings on their way.

        Raises:
            TreepassError: if the model cannot be loaded, cannot decode trees or has no chat template.
        """
        from treepass.cli.completion import load

        self._loaded, decoder = load(setup, live)
        _require_template(self._loaded)
        self._setup = setup
        self._live = live
        self._interrupts = interrupts
        self._caught = caught
        self._session = decoder.session()
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._turn = 0
        self.messages: list[dict[str, str]] = list(self._start)
        self.refused = 0
        live.clear()
        caught.show()

    def run(self) -> None:
        """Answers line after line, until they end, ``/exit`` or Ctrl-C at the prompt."""
        on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        if on_terminal:
            _print_dim(
                f"{self._loaded.name}, {_dtype(self._loaded)} on {self._loaded.device}; /help lists the commands"
            )
        try:
            while line := _read_line(PROMPT if on_terminal else ""):
                try:
                    message = _decoded(line)
                    if message.strip() == "/exit":
                        return
                    self._obey_or_answer(message)
                except _RefusedError as error:
                    self.refused += 1
                    note(f"error: {error}")
        except KeyboardInterrupt:
            pass
        if on_terminal:
            sys.stderr.write("\n")  # behind the prompt

    def _obey_or_answer(self, message: str) -> None:
        command = message.strip()
        if command == "/clear":
            self.messages = list(self._start)
        elif command == "/help":
            for name, meaning in COMMANDS.items():
                note(f"{name:<8}{meaning}")
        elif command.startswith("/") and command[1:].isalpha():
            raise _RefusedError(unknown("command", command, COMMANDS))
        elif command:
            with self._interrupts.one_of_many():
                self._answer(message)

    def _answer(self, message: str) -> None:
        """One turn: it enters the conversation as far as it was written.

        Raises:
            _RefusedError: if there is no room for it; the conversation is as it was before.
            TreepassError: if the conversation cannot go on.
        """
        from treepass.cli.completion import Writing, encode_chat

        messages = [*self.messages, {"role": "user", "content": message}]
        tokenizer: Any = self._loaded.tokenizer
        prompt = encode_chat(tokenizer, messages, instead="use treepass generate --raw")
        limit = self._session.decoder.target.max_length
        if len(prompt) >= limit:
            what = "conversation has" if self.messages != self._start else "message makes"
            hint = "/clear forgets it" if self.messages != self._start else "shorten it"
            raise _RefusedError(
                f"the {what} {len(prompt)} tokens, but the model's maximum is {limit} with at least one new token; "
                f"{hint}"
            )
        writer = None if self._setup.as_json else TextWriter(tokenizer)
        output = Writing(self._setup, self._live, self._interrupts, writer).run(self._session, prompt)
        # As it was shown: the end token and other special ones are not text.
        text = tokenizer.decode(output.ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self._turn += 1
        if self._setup.as_json:
            print_json(self._contents(prompt, text, output))
        self._caught.add(output.report.warnings)
        self._caught.show()
        if sys.stderr.isatty():
            _print_dim(self._summary(prompt, output))

    def _contents(self, prompt: list[int], text: str, output: "TreeOutput") -> dict[str, Any]:
        """The document of one turn."""
        import torch

        report = output.report
        return document(
            "chat",
            model=self._loaded.name,
            dtype=_dtype(self._loaded),
            device=str(self._loaded.device),
            threads=torch.get_num_threads(),
            seed=output.seed,
            turn=self._turn,
            text=text,
            ids=output.ids[0],
            prompt_tokens=len(prompt),
            prompt_rows=report.prompt_rows,
            new_tokens=len(output.ids[0]),
            passes=report.passes,
            tokens_per_pass=report.tokens_per_pass,
            finish_reason=output.finish_reasons[0],
            seconds=report.seconds,
        )

    def _summary(self, prompt: list[int], output: "TreeOutput") -> str:
        report = output.report
        reused = len(prompt) - 1 - report.prompt_rows  # the last token's row is that of the first tree's root
        parts = [
            f"{report.emitted} tokens{ENDINGS.get(output.finish_reasons[0], '')}",
            f"{report.tokens_per_pass:.2f} per pass",
            f"{report.tokens_per_second:.1f} tokens/s",
            f"{reused} of {len(prompt)} prompt rows reused",
        ]
        if not self._setup.params.greedy:
            parts.append(f"seed {output.seed}")
        return ", ".join(parts)


class _RefusedError(Exception):
    """A line cannot be answered, and the conversation can go on."""


def _require_template(loaded: "LoadedModel") -> None:
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise PromptError(
            f"model '{loaded.name}' has no chat template, so that it cannot tell turns apart; "
            "continue a text with treepass generate"
        )


def _read_line(prompt: str) -> bytes:
    """The next line with its end; nothing where there is none.

    Bytes, so that a line which is no text costs none of the others.
    """
    if prompt:
        sys.stderr.write(prompt)
        sys.stderr.flush()
    return sys.stdin.buffer.readline()


def _decoded(line: bytes) -> str:
    try:
        return line.decode(sys.stdin.encoding).rstrip("\r\n")
    except UnicodeError as error:
        raise _RefusedError(f"the message is not valid {sys.stdin.encoding} text: {error}") from error


def _dtype(loaded: "LoadedModel") -> str:
    return str(loaded.dtype).removeprefix("torch.")


def _print_dim(line: str) -> None:
    from rich.text import Text

    terminal_console(stderr=True).print(Text(escape_controls(line), style="dim"))
