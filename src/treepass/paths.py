"""The definition of exact: a row of a tree pass is the last row of a plain forward over its whole path.

The plain forwards are the model's own, with its own attention and no cache of ours; nothing but the model is shared
between the two computations.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from treepass.cache import TreeCache
from treepass.random_trees import random_tree
from treepass.tree import DraftTree, Forest

if TYPE_CHECKING:
    from treepass.target import Target

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference that rounding explains, as a share of the largest logit; models round to float32 inside."""

BATCH_ROWS = 4096
"""Most tokens of one plain forward of several texts."""


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that takes the input ids; offloaded embeddings name it in their hook."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)


def is_plain_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torch's own linear layer, or that of a model in transformers, with weights as they were."""
    weight = getattr(module, "weight", None)
    own = type(module) is torch.nn.Linear or type(module).__module__.startswith("transformers.models.")
    return own and "forward" not in vars(module) and type(weight) is torch.nn.Parameter and _is_plain(weight.data)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dtype in TOLERANCE


def replaced_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The linear layers that are quantised, adapted or otherwise not torch's own."""
    for name, module in model.named_modules():
        if hasattr(module, "in_features") and not is_plain_linear(module):
            yield name, module


def rounding_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype as coarse as which the model's passes are.

    Kernels of quantised weights round activations to 8 bits or to bfloat16 inside, whatever the dtype outside: the last
    bit of an input can become a whole step of that rounding.
    """
    return torch.bfloat16 if any(True for _ in replaced_linears(model)) else model.dtype


def allowed_share(dtype: torch.dtype) -> float:
    """See ``TOLERANCE``; the coarsest for a dtype that is not in it."""
    return TOLERANCE.get(dtype, max(TOLERANCE.values()))


@dataclass(slots=True)
class Difference:
    """How far tree passes were from plain forwards.

    Attributes:
        error: the largest absolute difference of a logit; infinite where one of the two is NaN.
        scale: the largest absolute logit of the plain forwards.
        rows: rows compared.
        choices: rows whose likeliest token differs.
    """

    error: float = 0.0
    scale: float = 0.0
    rows: int = 0
    choices: int = 0

    @property
    def share(self) -> float:
        """The error as a share of the largest logit, or as it is where no logit exceeds 1."""
        return self.error / max(self.scale, 1.0)

    def add(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares two [rows, vocabulary]."""
        # Some heads mask tokens of their own accord: two equal infinities are no difference.
        error = (got - expected).abs().masked_fill(got == expected, 0.0)
        self.error = max(self.error, float(error.nan_to_num(float("inf"), float("inf")).max()))
        finite = expected[torch.isfinite(expected)].abs()
        if len(finite):
            self.scale = max(self.scale, float(finite.max()))
        self.rows += len(got)
        self.choices += int((got.argmax(-1) != expected.argmax(-1)).sum())


@torch.no_grad()
def path_logits(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits behind each text from plain forwards, [texts, vocabulary]; texts of one length share a batch.

    The forwards are given position ids, as ``generate`` gives them: a few types would count otherwise without.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        by_length[len(text)].append(place)
    rows: list[torch.Tensor | None] = [None] * len(texts)
    device = input_device(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for length, places in by_length.items():
        size = max(1, BATCH_ROWS // length)
        for chunk in (places[start : start + size] for start in range(0, len(places), size)):
            ids = torch.tensor([texts[place] for place in chunk], device=device)
            positions = torch.arange(length, device=device).expand(len(chunk), -1)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **last).logits
            for place, row in zip(chunk, logits[:, -1], strict=True):
                rows[place] = row
    return torch.stack([row for row in rows if row is not None])


@dataclass(slots=True)
class PathComparison:
    """Sequences that grow by tree passes, every row of which is compared with a plain forward over its path.

    Attributes:
        target: makes the passes.
        rng: chooses trees and which path is kept.
        compare: whether rows are compared, or the sequences only grow.
        difference: the result so far.
    """

    target: "Target"
    model: PreTrainedModel
    rng: np.random.Generator
    compare: bool = True
    difference: Difference = field(default_factory=Difference)
    texts: list[list[int]] = field(default_factory=list)
    caches: list[TreeCache] = field(default_factory=list)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins anew with these prompts; all rows but the last token's are computed, as chains of one pass."""
        self.texts = [list(prompt) for prompt in prompts]
        self.caches = [self.target.new_cache() for _ in prompts]
        chains = [(text[:-1], cache) for text, cache in zip(self.texts, self.caches, strict=True) if len(text) > 1]
        if not chains:
            return
        caches = [cache for _, cache in chains]
        forest = Forest(tuple(DraftTree.chain(tokens) for tokens, _ in chains), (0,) * len(chains))
        self.target.forward(forest, caches, rows=())
        for tokens, cache in chains:
            cache.commit(range(len(tokens)))

    def step(self, trees: Sequence[DraftTree]) -> None:
        """One pass over a tree per text, compared row by row; then every text keeps a random path of its tree."""
        forest = Forest(tuple(trees), tuple(cache.length for cache in self.caches))
        got = self.target.forward(forest, self.caches).logits
        if self.compare:
            paths = [
                text + tree.tokens[tree.path(row)].tolist()
                for text, tree in zip(self.texts, trees, strict=True)
                for row in range(tree.rows)
            ]
            self.difference.add(got, path_logits(self.model, paths))
        for text, tree, cache in zip(self.texts, trees, self.caches, strict=True):
            path = tree.path(int(self.rng.integers(tree.rows)))
            cache.commit([0, *path])
            text += [*tree.tokens[path].tolist(), int(self.rng.integers(self.target.vocab_size))]

    def random_trees(self, nodes: int, max_depth: int) -> list[DraftTree]:
        """A random tree for every text, siblings out of the order of depth."""
        return [
            random_tree(self.rng, text[-1], nodes=nodes, max_depth=max_depth, vocab_size=self.target.vocab_size)
            for text in self.texts
        ]


def one_tree_difference(target: "Target", model: PreTrainedModel) -> Difference:
    """The difference over two passes with a path kept between them.

    Two sequences of 12 and 7 tokens, where the model's maximum length allows them, with a tree of 12 nodes each.
    """
    comparison = PathComparison(target, model, np.random.default_rng(0))
    depth = max(1, min(4, target.max_length // 4))
    room = max(1, target.max_length - 2 * (depth + 1))
    lengths = (min(12, room), min(7, room))
    comparison.start([comparison.rng.integers(target.vocab_size, size=length).tolist() for length in lengths])
    for _ in range(2):
        comparison.step(comparison.random_trees(12, depth))
    return comparison.difference
