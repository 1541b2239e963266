"""The exception tree: what a caller may want to treat differently, and nothing finer.

    TreepassError
    ├── ModelLoadError            a model, tokenizer or cache folder cannot be read or prepared
    ├── UnsupportedModelError     the model cannot decode trees exactly; names the type and the reason
    ├── PromptError               the prompt is empty, malformed or longer than the model's maximum
    └── LogitsError               the target's logits at a judged node are NaN, infinite or all masked

Arguments outside their range raise ``ValueError``, as in the standard library.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TreepassError(Exception):
    """Base of every error that treepass raises on purpose."""


class ModelLoadError(TreepassError):
    """A model, tokenizer or cache folder cannot be read or prepared."""


class UnsupportedModelError(TreepassError):
    """The model cannot decode trees exactly. The message names the model type and the reason."""


class PromptError(TreepassError):
    """The prompt is empty, malformed or longer than the model's maximum."""


class LogitsError(TreepassError):
    """The target's logits at a node of the walk are NaN, infinite or all masked."""


class TreepassWarning(UserWarning):
    """Something the user should know that does not change the text."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not known, with the nearest one that is."""
    names = list(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown {kind} '{name}', known are: {', '.join(names)}{hint}"
