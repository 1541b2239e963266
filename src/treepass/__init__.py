"""Several tokens per forward pass from any Hugging Face causal language model, and the text it would write alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treepass.drafters import RecyclingDrafter, SuffixDrafter, UnionDrafter
    from treepass.errors import (
        LogitsError,
        ModelLoadError,
        PromptError,
        TreepassError,
        TreepassWarning,
        UnsupportedModelError,
    )
    from treepass.generate import TreeDecoder, TreeOutput
    from treepass.models import load
    from treepass.record import PassRecord, Report
    from treepass.tree import DraftTree

__all__ = [
    "DraftTree",
    "LogitsError",
    "ModelLoadError",
    "PassRecord",
    "PromptError",
    "RecyclingDrafter",
    "Report",
    "SuffixDrafter",
    "TreeDecoder",
    "TreeOutput",
    "TreepassError",
    "TreepassWarning",
    "UnionDrafter",
    "UnsupportedModelError",
    "load",
]

_HOMES = {
    "DraftTree": "tree",
    "PassRecord": "record",
    "RecyclingDrafter": "drafters",
    "Report": "record",
    "SuffixDrafter": "drafters",
    "TreeDecoder": "generate",
    "TreeOutput": "generate",
    "UnionDrafter": "drafters",
    "load": "models",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that ``treepass --help`` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'treepass' has no attribute {name!r}")
    return getattr(import_module(f"treepass.{_HOMES.get(name, 'errors')}"), name)
