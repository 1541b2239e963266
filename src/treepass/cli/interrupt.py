"""Ctrl-C: the first one ends the command in good order, the second one at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from treepass.cli.output import ExitCode


class Interrupts:
    """Handles SIGINT as long as the context is open.

    The first signal raises ``KeyboardInterrupt``, or within ``deferred`` is only noted in ``requested``, to be read
    between two passes. The second one leaves without another word.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)
        # Raised in the middle of an import, the interrupt can surface as any other error.
        if kind is not None and self.requested and not self._deferred:
            raise KeyboardInterrupt from None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, the first signal sets ``requested`` and nothing else."""
        self._deferred = True
        # Code that catches everything may have swallowed the interrupt.
        if self.requested:
            raise KeyboardInterrupt
        yield

    @contextmanager
    def one_of_many(self) -> Iterator[None]:
        """``deferred`` for a part of the command: what was requested within is forgotten at its end."""
        try:
            with self.deferred():
                yield
        finally:
            # In this order: a signal in between counts as one after the end.
            self._deferred = False
            self.requested = False

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        if not self._deferred:
            raise KeyboardInterrupt
