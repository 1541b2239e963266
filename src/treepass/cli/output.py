"""What every verb of the command line shares: where output goes, exit codes, JSON documents, escaping.

Results go to stdout, everything else to stderr. ``--json`` prints one document on one line, the last line of stdout.
"""

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import sys
import unicodedata
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from treepass.errors import TreepassError

LIBRARIES = ("torch", "transformers", "numpy", "tokenizers", "safetensors")

# Characters that reorder or break lines although their category is not a control one.
REORDERING = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class ExitCode(IntEnum):
    """Exit codes of every verb."""

    OK = 0
    RUNTIME = 1
    USAGE = 2
    PARITY = 3
    INTERRUPTED = 130


class Verbs(TyperGroup):
    """The group of all verbs: an expected error ends in one line on stderr and its exit code, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TreepassError as error:
            fail(str(error), ExitCode.RUNTIME)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        except KeyboardInterrupt:
            fail("interrupted", ExitCode.INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # a closed pipe, which ends a command without a word, among them
                raise
            _drop_output()
            fail(f"cannot write the output: {error.strerror}; free some space or write elsewhere", ExitCode.RUNTIME)


def _drop_output() -> None:
    """Makes what stdout still holds go nowhere, or the interpreter would fail on it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, code: ExitCode) -> NoReturn:
    """End the command with one line on stderr.

    Raises:
        typer.Exit: Always, with ``code``.
    """
    note(f"error: {' '.join(message.split())}")
    raise typer.Exit(code)


def note(line: str) -> None:
    """Print a line that is no result: progress, warnings, errors. Goes to stderr."""
    typer.echo(escape_controls(line), err=True)


def escape_controls(text: str) -> str:
    """``text`` with everything shown that a terminal would act upon, newlines and tabs apart.

    Escape sequences could move the cursor, set the title or hide text, and bidirectional marks reorder it: text of
    a model must not. Lone surrogates, which no encoding has, are shown too.
    """
    return "".join(_shown(character) if _acts(character) else character for character in text)


def _acts(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in REORDERING or unicodedata.category(character) in ("Cc", "Cs")


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def document(
    verb: str,
    *,
    model: str | None,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    seed: int | None = None,
    **content: Any,
) -> dict[str, Any]:
    """The JSON document of a verb: the keys that every one has, then its own.

    Args:
        verb: The command as typed, ``"generate"`` or ``"audit law"``; names the schema.
        model: Name of the model, None for verbs without one.
        dtype: Type of its weights, such as ``"bfloat16"``.
        device: Where it ran, such as ``"cpu"``.
        threads: Threads that torch computes with.
        seed: Of the sampler; None where nothing is drawn.
        **content: The keys of this verb.
    """
    common = {"model": model, "dtype": dtype, "device": device, "threads": threads, "seed": seed}
    return {"schema": f"treepass.{verb.replace(' ', '.')}/1", "versions": versions(), **common, **content}


def print_json(contents: dict[str, Any]) -> None:
    """Print one JSON document on one line of stdout, in ASCII: no terminal, pipe or encoding can change it."""
    typer.echo(json.dumps(contents, allow_nan=False))


def versions() -> dict[str, str | None]:
    """Versions of treepass, Python and the libraries that decide the numbers; None for one that is not installed."""
    return {name: version(name) for name in ("treepass", *LIBRARIES)} | {"python": platform.python_version()}


def version(package: str) -> str | None:
    """The installed version, read without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examples(*commands: str) -> str:
    """The end of a help page: commands that can be pasted."""
    # \b keeps the line breaks of the paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def progress_on_terminal() -> Callable[[str], None] | None:
    """A reporter for ``on_progress`` that prints to stderr; None where stderr is no terminal."""
    return note if sys.stderr.isatty() else None
