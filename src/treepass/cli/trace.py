"""``--trace FILE``: pass records as JSON lines, each on disk as a whole before the next pass begins."""

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from treepass.errors import TreepassError

if TYPE_CHECKING:
    from treepass.record import PassRecord


class Trace:
    """A file that takes pass records.

    It is opened before a model is loaded, so that a wrong path is refused at once, and emptied when the first pass is
    about to run: until then a file that was there before is left as it was, and one that was not is removed again.
    """

    def __init__(self, path: Path | None) -> None:
        """Args: ``path`` of the file; None writes nothing.

        Raises:
            TreepassError: if the file cannot be written.
        """
        self._path = path
        self._file: int | None = None
        self._size = 0
        if path is None:
            return
        self._leftover = not path.exists()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TreepassError(
                f"cannot write the trace {str(path)!r}: {reason}; give --trace a writable path"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None or self._path is None:
            return
        os.close(self._file)
        if self._leftover:
            self._path.unlink(missing_ok=True)

    def start(self) -> None:
        """Empties the file: records follow."""
        if self._file is not None:
            self._leftover = False
            self._cut()

    def write(self, record: "PassRecord") -> None:
        """Adds one line.

        Raises:
            TreepassError: if it cannot be written whole; what is there of it is removed.
        """
        if self._file is None:
            return
        line = (record.to_json() + "\n").encode("ascii")
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except BrokenPipeError:
            raise
        except OSError as error:
            self._cut()
            raise TreepassError(
                f"cannot write the trace {str(self._path)!r}: {error.strerror}; it holds the passes up to here"
            ) from error
        self._size += len(line)

    def _cut(self) -> None:
        """Ends the file after the last whole line; a pipe or a device cannot be cut and need not be."""
        if self._file is not None and stat.S_ISREG(os.fstat(self._file).st_mode):
            os.ftruncate(self._file, self._size)
