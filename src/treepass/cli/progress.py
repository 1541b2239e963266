"""What stderr shows beside results: one line that is overwritten while something runs, and warnings."""

import os
import sys
import time
import warnings
from types import TracebackType
from typing import Any, Self

from treepass.cli.output import escape_controls, note
from treepass.errors import TreepassWarning

PATIENCE_SECONDS = 2.0
REFRESH_SECONDS = 0.1


class LiveLine:
    """One line on stderr, overwritten in place and gone at the end; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, line: str) -> None:
        """Replaces the line."""
        if not self._terminal:
            return
        from rich.cells import cell_len, set_cell_size

        line = escape_controls(" ".join(line.split()))
        cells = min(cell_len(line), _columns() - 1)
        padding = " " * (self._shown - cells)
        self._shown = max(self._shown, cells)  # before it is: Ctrl-C may come in between
        sys.stderr.write(f"\r{set_cell_size(line, cells)}{padding}")
        sys.stderr.flush()
        self._shown = cells

    def clear(self) -> None:
        """Removes the line."""
        if self._shown:
            sys.stderr.write(f"\r{' ' * self._shown}\r")
            sys.stderr.flush()
            self._shown = 0


class Speedometer:
    """Shows the speed of something that runs for longer than two seconds."""

    def __init__(self, live: LiveLine, label: str) -> None:
        """Args: where it is shown, and the words before the numbers."""
        self._live = live
        self._label = label
        self._start: tuple[float, int] | None = None
        self._last = 0.0

    def update(self, tokens: int, passes: int | None = None) -> None:
        """Shows the state.

        Args:
            tokens: tokens so far. Those of the first call came with the prefill, and count in no speed.
            passes: passes so far, where several tokens come per pass.
        """
        now = time.perf_counter()
        if self._start is None:
            self._start = (now, tokens)
        seconds = now - self._start[0]
        if seconds < PATIENCE_SECONDS or now - self._last < REFRESH_SECONDS:
            return
        self._last = now
        per_pass = f"{tokens / passes:.2f} tokens per pass, " if passes else ""
        speed = (tokens - self._start[1]) / seconds
        self._live.show(f"{self._label}: {tokens} tokens, {per_pass}{speed:.1f} tokens/s")


class CaughtWarnings:
    """Keeps the warnings of Python and of treepass, to be shown where they do not tear a text apart."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._shown = 0
        self._catch = warnings.catch_warnings()

    def __enter__(self) -> Self:
        self._catch.__enter__()
        warnings.simplefilter("always", TreepassWarning)
        warnings.showwarning = self._keep
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._catch.__exit__(kind, error, trace)
        if not isinstance(error, BrokenPipeError):
            self.show()

    def add(self, messages: list[str]) -> None:
        """Adds those that are not there yet."""
        for message in messages:
            line = " ".join(message.split())
            if line not in self.messages:
                self.messages.append(line)

    def show(self) -> None:
        """Prints those that have not been shown, one line each."""
        for message in self.messages[self._shown :]:
            note(f"warning: {message}")
        self._shown = len(self.messages)

    def _keep(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self.add([str(message)])


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
