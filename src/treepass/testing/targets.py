"""Targets that watch or disturb another target."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treepass.cache import TreeCache
from treepass.target import PassOutput, Target
from treepass.tree import Forest


class WatchedTarget:
    """Passes everything on to another target and keeps the forest of every pass.

    Set it in place of a decoder's own: ``decoder.target = WatchedTarget(decoder.target)``.

    Attributes:
        forests: The forests of all passes, prefill included, in order.
    """

    def __init__(self, target: Target, change: Callable[[Forest, torch.Tensor], torch.Tensor] | None = None) -> None:
        """Args: ``change`` maps the forest and the logits [kept rows, vocabulary] of a pass to other logits."""
        self._target = target
        self._change = change
        self.forests: list[Forest] = []

    def forward(
        self,
        forest: Forest,
        caches: Sequence[TreeCache],
        rows: Sequence[int] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> PassOutput:
        """One pass of the other target."""
        self.forests.append(forest)
        output = self._target.forward(forest, caches, rows=rows, hidden_layers=hidden_layers)
        if self._change is None:
            return output
        return PassOutput(self._change(forest, output.logits.clone()), output.hidden)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the other target has."""
        return getattr(self._target, name)
