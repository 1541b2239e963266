"""The attention functions that transformers finds under our name: features, kernels, scope."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from treepass.attention import ATTENTIONS, KERNELS, REGISTERED_NAME, ForestPass, register, running
from treepass.cache import PassCache, TreeCache
from treepass.errors import UnsupportedModelError
from treepass.target import HFTarget
from treepass.testing import random_tree, tiny_llama
from treepass.tree import DraftTree, Forest

unit = pytest.mark.unit
arch = pytest.mark.arch
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6


def by_hand(query, key, value, mask, scaling, softcap=None, sinks=None, bias=None):
    """One head, one row at a time, over the visible keys only."""
    output = torch.zeros(1, query.shape[2], HEADS, VALUE_WIDTH, dtype=query.dtype)
    for head in range(HEADS):
        k, v = key[0, head * KEY_HEADS // HEADS], value[0, head * KEY_HEADS // HEADS]
        for row in range(query.shape[2]):
            seen = (mask[0, 0, row] == 0).nonzero()[:, 0]
            scores = torch.stack([query[0, head, row] @ k[i] for i in seen]) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[0, head, row, seen]
            weights = torch.exp(scores)
            total = weights.sum() + (torch.exp(sinks[head]) if sinks is not None else 0)
            output[0, row, head] = (weights[:, None] * v[seen]).sum(0) / total
    return output


@pytest.fixture
def layer():
    """Two sequences, their caches with committed rows, and the projections of one layer for a pass over both trees."""
    rng = np.random.default_rng(3)
    generator = torch.Generator().manual_seed(3)

    def draw(heads, rows, width):
        return torch.randn(1, heads, rows, width, generator=generator, dtype=torch.float64)

    trees = tuple(random_tree(rng, 1, nodes=nodes, max_depth=4, vocab_size=20) for nodes in (7, 4))
    caches = [TreeCache(1), TreeCache(1)]
    for cache, length in zip(caches, (5, 9), strict=True):
        cache.append(0, draw(KEY_HEADS, length, WIDTH)[0], draw(KEY_HEADS, length, VALUE_WIDTH)[0])
        cache.commit(range(length))
    forest = Forest(trees, (5, 9))
    query, key = draw(HEADS, forest.rows, WIDTH), draw(KEY_HEADS, forest.rows, WIDTH)
    return forest, caches, query, key, draw(KEY_HEADS, forest.rows, VALUE_WIDTH)


def attend(layer, attention, kernel, **features):
    """Our output and the one by hand, both [1, rows, heads, value width]."""
    register()
    forest, caches, query, key, value = layer
    rows = [tree.rows for tree in forest.trees]
    cache = PassCache(caches, rows, joined=attention == "dense")
    config = type("Config", (), {"_attn_implementation_internal": "sdpa"})()
    current = ForestPass(forest, attention, kernel, cache)
    with running(torch.nn.Linear(1, 1), [config], current):
        mask = AttentionMaskInterface()[REGISTERED_NAME](mask_function=causal_mask_function, dtype=torch.float64)
        keys, values = cache.update(key, value, 0)
        got, _ = AttentionInterface()[REGISTERED_NAME](None, query, keys, values, mask, scaling=0.3, **features)
        joined = PassCache(caches, rows).update(key, value, 0)
        dense = ForestPass(forest, "dense", kernel, cache)
        dense_mask = dense.mask(causal_mask_function, torch.float64, torch.device("cpu"))
    sinks = features.get("s_aux", features.get("sinks"))
    expected = by_hand(query, *joined, dense_mask, 0.3, features.get("softcap"), sinks, features.get("position_bias"))
    return got, expected


@unit
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"softcap": 2.0},
        {"s_aux": SINKS},
        {"sinks": SINKS, "softcap": 1.5},
        {"sliding_window": 4, "is_causal": True, "output_attentions": False, "position_ids": torch.zeros(1)},
    ],
    ids=lambda features: "+".join(features) or "plain",
)
def test_every_kernel_computes_every_feature(layer, attention, kernel, features):
    got, expected = attend(layer, attention, kernel, **features)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@unit
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_position_bias_is_added_to_the_scores(layer, kernel):
    keys = sum(layer[0].context_lengths) + layer[0].rows
    bias = torch.randn(1, HEADS, layer[0].rows, keys, dtype=torch.float64)
    got, expected = attend(layer, "dense", kernel, position_bias=bias)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    with pytest.raises(NotImplementedError, match="take attention 'dense'"):
        attend(layer, "per_sequence", kernel, position_bias=bias)


@unit
@pytest.mark.parametrize("feature", [{"block_table": torch.zeros(1)}, {"dropout": 0.1}, {"frobnication": 3}])
def test_what_is_not_known_is_refused_by_name(layer, feature):
    with pytest.raises(NotImplementedError, match=next(iter(feature))):
        attend(layer, "dense", "grouped", **feature)


@unit
def test_keys_that_were_changed_after_they_were_cached_are_noticed(layer):
    forest, caches, _, key, value = layer
    cache = PassCache(caches, [tree.rows for tree in forest.trees], joined=False)
    keys, values = cache.update(key, value, 0)
    assert [k.shape[1] for k, _ in cache.sequences(keys, values)] == [5 + 8, 9 + 5]
    for changed in ((keys.clone(), values), (keys, values * 2), (keys[:, :, :3], values), (values, keys)):
        with pytest.raises(NotImplementedError, match="take attention 'dense'"):
            cache.sequences(*changed)


@unit
def test_outside_a_pass_the_functions_say_so():
    register()
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="within a pass"):
        AttentionInterface()[REGISTERED_NAME](None, x, x, x, x)
    with pytest.raises(RuntimeError, match="within a pass"):
        AttentionMaskInterface()[REGISTERED_NAME](mask_function=causal_mask_function)


@arch
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_models_own_attention_is_in_place_after_a_pass_even_if_it_fails(attn, monkeypatch):
    model = tiny_llama(0, attn=attn)
    target = HFTarget(model)
    forest = Forest((DraftTree.chain([1, 2]),), (0,))
    target.forward(forest, [target.new_cache()])
    assert model.config._attn_implementation == attn
    with pytest.raises(RuntimeError, match="within a pass"):
        AttentionInterface()[REGISTERED_NAME](None, *[torch.zeros(1, 2, 3, 4)] * 4)

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(model.model.layers[1], "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        target.forward(forest, [target.new_cache()])
    assert model.config._attn_implementation == attn


@arch
def test_a_model_that_asks_for_no_mask_is_refused(monkeypatch):
    import transformers.models.llama.modeling_llama as llama

    target = HFTarget(tiny_llama(0))
    monkeypatch.setattr(llama, "create_causal_mask", lambda *args, **kwargs: torch.zeros(1, 1, 1, 1))
    with pytest.raises(UnsupportedModelError, match="model type 'llama': it does not ask for the mask"):
        target.forward(Forest((DraftTree.chain([1, 2]),), (0,)), [target.new_cache()])
