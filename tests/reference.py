"""The separate, simpler computation that tests compare with: transformers alone, one plain forward per path."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel


@dataclass
class RowValues:
    """What a model computes for the last token of a text: logits, hidden states and keys and values of all layers."""

    logits: torch.Tensor
    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def difference(self, other: "RowValues") -> float:
        """The largest absolute difference of any number; infinite where one is NaN."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("logits", "hidden", "keys", "values"))
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        return float("inf") if np.isnan(largest) else largest


@torch.no_grad()
def row_values(model: PreTrainedModel, texts: list[list[int]]) -> list[RowValues]:
    """``RowValues`` of every text, from plain forwards of the whole text; texts of one length share a batch."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        by_length[len(text)].append(place)
    values: list[RowValues | None] = [None] * len(texts)
    for places in by_length.values():
        output = model(torch.tensor([texts[place] for place in places]), use_cache=True, output_hidden_states=True)
        layers = output.past_key_values.layers
        for row, place in enumerate(places):
            values[place] = RowValues(
                output.logits[row, -1],
                torch.stack([hidden[row, -1] for hidden in output.hidden_states]),
                torch.stack([layer.keys[row, :, -1] for layer in layers]),
                torch.stack([layer.values[row, :, -1] for layer in layers]),
            )
    return values  # type: ignore[return-value]


@torch.no_grad()
def cache_values(model: PreTrainedModel, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, [heads, tokens, width], after one plain forward over ``ids``."""
    output = model(torch.tensor([ids]), use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]


def path_tokens(tokens: list[int], parents: list[int], row: int) -> list[int]:
    """Tokens from below the root down to ``row``, found by walking up the parents."""
    path: list[int] = []
    while parents[row] >= 0:
        path.insert(0, tokens[row])
        row = parents[row]
    return path


def greedy_text(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos: list[int] | None = None) -> list:
    """The new tokens of transformers' own ``generate`` without sampling."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def random_prompts(count: int, vocab_size: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab_size, size=int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]
