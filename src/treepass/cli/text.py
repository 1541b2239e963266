"""Text as it is written: whole characters out of tokens, accepted and corrected tokens told apart on a terminal.

Text of a model is untrusted: it is escaped, and it is never markup.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from treepass.cli.output import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from treepass.record import PassRecord

Role = Literal["accepted", "correction", "bonus", "plain"]

# Okabe and Ito's palette, which colour-blind readers tell apart; without any colour the underlines remain.
STYLES: dict[Role, str] = {
    "accepted": "#009E73 underline",
    "correction": "#D55E00",
    "bonus": "#56B4E9 bold underline2",
    "plain": "",
}

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, so that this many tokens complete one at the latest."""


def roles(record: "PassRecord") -> Iterator[tuple[int, Role]]:
    """The emitted tokens of a pass and what each was; ``plain`` if nothing had been drafted."""
    for index, token in enumerate(record.emitted):
        if not record.nodes:
            yield token, "plain"
        else:
            yield token, "accepted" if index < len(record.path) else record.ended


class TextStream:
    """Decodes tokens one by one: a token that ends within a character gives nothing until the character is whole.

    Only the last few tokens are decoded again with every new one. They begin before the new text, since spaces and
    characters can depend on the tokens around.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Args: the tokenizer of the model; special tokens give no text."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._whole = 0  # how many of self._ids had been read when the text last ended in a whole character
        self._given = 0  # characters of the text of self._ids that have been given out
        self._waiting_tokens = 0

    def push(self, token: int) -> str:
        """The text that one more token completes; often a word, sometimes nothing."""
        self._ids.append(token)
        self._waiting_tokens += 1
        text = self._decode(self._ids)
        waiting = len(text) - len(text.rstrip(INCOMPLETE))
        if self._waiting_tokens > LONGEST_CHARACTER:
            waiting = min(waiting, LONGEST_CHARACTER - 1)  # the others will not become characters any more
        piece = self._give(text[: len(text) - waiting])
        if not waiting:
            self._waiting_tokens = 0
            self._shift()
        return piece

    def finish(self) -> str:
        """What is left at the end: the bytes of an unfinished character, as a replacement character."""
        return self._give(self._decode(self._ids))

    def _shift(self) -> None:
        """Forgets all but the newest tokens with text: what comes next needs no more of a context."""
        newest = self._ids[self._whole :]
        text = self._decode(newest)
        if text:
            self._ids = newest
            self._whole = len(newest)
            self._given = len(text)

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Tidying spaces would take back characters that were shown.
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextWriter:
    """Writes a completion to stdout, pass by pass: styled on a terminal, plain in a pipe."""

    def __init__(self, tokenizer: Any) -> None:
        """Args: the tokenizer of the model."""
        self._stream = TextStream(tokenizer)
        self._console = terminal_console() if sys.stdout.isatty() else None
        self._column_zero = True
        self.seen: Counter[Role] = Counter()

    @property
    def on_terminal(self) -> bool:
        """Whether the text can be watched as it grows."""
        return self._console is not None

    def write(self, record: "PassRecord") -> None:
        """Adds the text of one pass."""
        for token, role in roles(record):
            self._put(self._stream.push(token), role)
            self.seen[role] += 1

    def finish(self) -> None:
        """Ends the text and its line."""
        self._put(self._stream.finish(), "plain")
        if not self._column_zero:
            self._put("\n", "plain")

    def _put(self, text: str, role: Role) -> None:
        if not text:
            return
        self._column_zero = text.endswith("\n")
        shown = escape_controls(text)
        if self._console is None:
            sys.stdout.write(shown)
            sys.stdout.flush()
        else:
            self._console.out(shown, style=STYLES[role], end="", highlight=False)


def terminal_console(stderr: bool = False) -> "Console":
    """A console that prints text as it is: no markup, no emoji codes, no highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
