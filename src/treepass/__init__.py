"""Several tokens per forward pass from any Hugging Face causal language model, and the text it would write alone."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treepass.custom_generate import tree_decoding
    from treepass.drafters import RecyclingDrafter, SuffixDrafter, UnionDrafter
    from treepass.errors import (
        LogitsError,
        ModelLoadError,
        PromptError,
        TreepassError,
        TreepassWarning,
        UnsupportedModelError,
    )
    from treepass.generate import TreeDecoder, TreeOutput, TreeSession
    from treepass.models import load
    from treepass.record import PassRecord, Report
    from treepass.tree import DraftTree

RECIPE = str(Path(__file__).parent / "recipe")
"""Folder for the string form of ``custom_generate``; needs ``trust_remote_code=True``, as every folder does."""

__all__ = [
    "RECIPE",
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
    "TreeSession",
    "TreepassError",
    "TreepassWarning",
    "UnionDrafter",
    "UnsupportedModelError",
    "load",
    "tree_decoding",
]

_HOMES = {
    "DraftTree": "tree",
    "PassRecord": "record",
    "RecyclingDrafter": "drafters",
    "Report": "record",
    "SuffixDrafter": "drafters",
    "TreeDecoder": "generate",
    "TreeOutput": "generate",
    "TreeSession": "generate",
    "UnionDrafter": "drafters",
    "load": "models",
    "tree_decoding": "custom_generate",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that ``treepass --help`` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'treepass' has no attribute {name!r}")
    return getattr(import_module(f"treepass.{_HOMES.get(name, 'errors')}"), name)
