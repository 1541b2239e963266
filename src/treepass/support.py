"""Which models can decode trees exactly: by their structure, by the table of verified types, and by trying.

Structure comes first: what cannot be rolled back or takes no position ids is refused with the reason. Types in the
table ``verified.json``, which the tests write, are known to be exact. Any other model is tried on one tree when it is
wrapped, and its logits are compared with plain forwards along every path.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel

from treepass.errors import UnsupportedModelError
from treepass.paths import allowed_share, input_device, one_tree_difference, replaced_linears, rounding_dtype

if TYPE_CHECKING:
    from treepass.target import HFTarget

LENGTH = "the model's maximum length"
"""What bounds a text where nothing else does."""

RECURRENT = "its recurrent state cannot be rolled back to an earlier token"

CACHE_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"})
"""transformers' cache layers that hold one row per token, so that rows can be moved and forgotten."""

REFUSED_TYPES: Mapping[str, str] = {
    "bloom": "its ALiBi bias is computed from row numbers, not from positions",
    "mpt": "its ALiBi bias is computed from row numbers, not from positions",
    "gpt_neo": "its local attention is computed from row numbers, not from positions",
    "dory": "its loops read and copy layers of the cache past the cache's own interface",
    "xlm": "it makes its attention mask itself, from row numbers",
}
"""Types whose numbers on a tree are known to be wrong, and why."""


LAYERWISE_ADAPTERS = frozenset(
    {
        *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "LN_TUNING"),
        "TRAINABLE_TOKENS",
    }
)
"""Adapters of peft that change layers row by row, within the model's own forward."""

POSITIONAL_FIELDS = ("alibi", "position_embedding_type", "attention_type", "is_causal", "use_bidirectional_attention")
"""Settings by which some models of a type are exact and others may not be."""

CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Types that have a field ``is_decoder`` and pay no heed to it."""

SOFT_CAPPED = frozenset({"gemma2", "vaultgemma"})
"""Types with a soft cap on their scores, which older versions of transformers leave out of their SDPA."""

COUNTS_FROM_CACHE = frozenset({"llama4", "llama4_text"})
"""Types that take positions not only from the position ids but also from row numbers and the length of the cache."""


@dataclass(frozen=True, slots=True)
class ForwardParameters:
    """What a model's ``forward`` takes.

    Attributes:
        cache: the name of the cache argument; transformers renamed it in 5.24.
        logits_to_keep: whether rows can be chosen before the output head.
    """

    cache: str
    logits_to_keep: bool


def unwrapped(model: Any) -> Any:
    """The transformers model within what torch.compile or peft made of it; anything else as it is.

    Raises:
        UnsupportedModelError: for an adapter that does more than change layers row by row, such as a learned prompt.
    """
    model = getattr(model, "_orig_mod", model)
    adapters = getattr(model, "peft_config", None)
    if not adapters or isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for adapter in adapters.values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if kind not in LAYERWISE_ADAPTERS or getattr(adapter, "alora_invocation_tokens", None):
            raise UnsupportedModelError(refusal(model, f"its '{kind}' adapter does more than change layers row by row"))
    return model.get_base_model()


def refusal(model: Any, reason: str) -> str:
    """The message of every refusal: the model type and the reason."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None) or type(model).__name__
    return f"cannot decode trees with model type '{kind}': {reason}"


def require_structure(model: Any) -> None:
    """Refuses what its structure shows to be impossible.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    reason = _structural_reason(model)
    if reason:
        raise UnsupportedModelError(refusal(model, reason))


def require_exact(target: "HFTarget") -> None:
    """Refuses a model of a type that the table refuses, or of an unknown type that fails on one tree.

    The comparison with plain forwards runs once per configuration, dtype and process.

    Raises:
        UnsupportedModelError: naming the model type and what was found.
    """
    require_independent_rows(target.model)
    refused = verified_table()["refused"].get(target.model.config.model_type)
    if refused:
        raise UnsupportedModelError(refusal(target.model, refused["reason"]))
    if is_verified(target.model):
        return
    key = type(target.model), _configuration_hash(target)
    if key not in _TRIED:
        _TRIED[key] = _try_one_tree(target)
    if _TRIED[key]:
        raise UnsupportedModelError(refusal(target.model, _TRIED[key]))


@torch.no_grad()
def require_independent_rows(model: PreTrainedModel) -> None:
    """Refuses layers in which a row of a pass depends on its neighbours, such as activations quantised per tensor.

    Every linear layer that is not torch's own is given the same row beside small and beside large ones.

    Raises:
        UnsupportedModelError: naming the layer.
    """
    for name, module in replaced_linears(model):
        if isinstance(getattr(module, "base_layer", None), torch.nn.Embedding):
            continue  # an adapter of an embedding, whose input are token ids
        width = getattr(module, "in_features")  # noqa: B009 - torch knows only tensors and modules as attributes
        rows = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0))
        rows = rows.to(_device_of(module, model), model.dtype)
        others = torch.cat([rows[:, :1], 50 * rows[:, 1:]], dim=1)
        if not torch.equal(module(rows)[0, 0], module(others)[0, 0]):
            reason = f"rows of a pass change each other: the activations of layer '{name}' are scaled over all rows"
            raise UnsupportedModelError(refusal(model, reason))


def _device_of(module: torch.nn.Module, model: PreTrainedModel) -> torch.device:
    hook = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if hook is not None:
        return torch.device(hook)
    return next((weight.device for weight in module.parameters()), input_device(model))


_TRIED: dict[tuple[type, str], str] = {}
"""What came of the comparisons made in this process: a reason to refuse, or nothing."""


def _try_one_tree(target: "HFTarget") -> str:
    try:
        difference = one_tree_difference(target, target.model)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        return f"a pass over a tree fails in it ({type(error).__name__}: {_first_line(error)})"
    if difference.share <= allowed_share(rounding_dtype(target.model)):
        return ""
    return (
        f"its logits on a tree are not those of plain forwards: they differ by {difference.error:.1e} where the "
        f"largest logit is {difference.scale:.1e}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def is_verified(model: PreTrainedModel) -> bool:
    """Whether the model is of a type that is exact in the table, for a version of transformers that the table covers.

    Its class must be the one that was measured: code from elsewhere may use the name of a type.
    """
    table = verified_table()
    oldest, newest = (Version(version) for version in table["transformers"])
    entry = table["exact"].get(model.config.model_type)
    own = type(model).__module__.startswith("transformers.models.") and entry and type(model).__name__ == entry["class"]
    known = bool(own) and entry["positions"] == positional_features(model.config.get_text_config())
    return known and oldest <= Version(transformers.__version__) <= newest


def positional_features(config: Any) -> dict[str, Any]:
    """The settings by which models of one type differ in how they see positions: another value, another case."""
    return {name: value for name in POSITIONAL_FIELDS if (value := getattr(config, name, None)) is not None}


@cache
def verified_table() -> dict[str, Any]:
    """The table of model types that the tests write: ``exact`` and ``refused``; see ``docs/models.md``."""
    return json.loads(resources.files("treepass").joinpath("verified.json").read_text(encoding="utf-8"))


def default_attention(model: PreTrainedModel) -> str:
    """``per_sequence`` where it is verified for the model's type, else ``dense``."""
    entry = verified_table()["exact"].get(model.config.model_type, {})
    return "per_sequence" if is_verified(model) and "per_sequence" in entry["attention"] else "dense"


def require_attention(model: PreTrainedModel, attention: str) -> None:
    """Refuses an attention that is not exact for a verified type.

    Raises:
        UnsupportedModelError: naming the model type and the attention.
    """
    if is_verified(model) and attention not in verified_table()["exact"][model.config.model_type]["attention"]:
        raise UnsupportedModelError(refusal(model, f"not exact with attention '{attention}'; take 'dense'"))


def counts_positions_from_cache(model: PreTrainedModel) -> bool:
    """Whether the cache has to give each row's offset as its length; see ``cache.PassCache``."""
    return model.config.model_type in COUNTS_FROM_CACHE


def longest_text(config: Any) -> tuple[int, str]:
    """The most tokens of a text for which every pass is exact, and what sets this bound."""
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    bounds = [(limit, LENGTH)]
    for rope in _rope_parameters(config):
        # Rescaled by the longest position of the pass, so that rows would depend on their neighbours; below the
        # original length they are the plain rotary embeddings.
        if rope.get("rope_type") == "dynamic":
            bounds.append((limit - 1, "where its dynamic rotary embeddings begin to rescale"))
        elif rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or limit
            bounds.append((original, "where its longrope rotary embeddings change their factors"))
    return min(bounds)


def forward_parameters(model: PreTrainedModel) -> ForwardParameters:
    """What the model's ``forward`` takes.

    Raises:
        UnsupportedModelError: if it takes no cache or no position ids.
    """
    names = inspect.signature(model.forward).parameters
    cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
    for name, found in (("cache", cache_name), ("position ids", "position_ids" in names)):
        if not found:
            raise UnsupportedModelError(refusal(model, f"its forward takes no {name}"))
    assert cache_name
    return ForwardParameters(cache_name, "logits_to_keep" in names)


def part_configs(model: PreTrainedModel) -> list[Any]:
    """The configuration objects of all parts of the model, each once: what their attention reads its name from."""
    found = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def cache_layers(config: Any) -> int:
    """How many layers a cache of the model has."""
    return max(len(DynamicCache(config=config).layers), config.num_hidden_layers)


def _structural_reason(model: Any) -> str | None:
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return "not a transformers model; load it with AutoModelForCausalLM.from_pretrained"
    if config.is_encoder_decoder:
        return "an encoder-decoder has no single causal cache"
    if model._is_stateful:
        return RECURRENT
    if config.model_type in REFUSED_TYPES:
        return REFUSED_TYPES[config.model_type]
    if model.get_output_embeddings() is None:
        return "it has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
    if any(_is_missing(part) for part in model.modules()):
        return "its weights are on the meta device; load them first"
    if any(part.training for part in model.modules()):
        return "it is in training mode, in whole or in part; call model.eval() first"
    if not config.return_dict:
        return "its configuration sets return_dict=False, with which its own parts do not run; set it to True"
    encoder = "is_decoder" in type(config).__dataclass_fields__ and not config.is_decoder
    if encoder and config.model_type not in CAUSAL_ANYWAY:
        return "it is an encoder, which sees what comes later; load it with is_decoder=True"
    if config.model_type in SOFT_CAPPED and config._attn_implementation == "sdpa":
        return "its own attention, 'sdpa', leaves out the soft cap; load it with attn_implementation='eager'"
    forward_parameters(model)
    return _cache_reason(config.get_text_config())


def _is_missing(module: torch.nn.Module) -> bool:
    """Whether weights of the module itself are nowhere: not even where accelerate's hooks fetch them from."""
    hook = getattr(module, "_hf_hook", None)
    offloaded = any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))
    return not offloaded and any(weight.is_meta for weight in module.parameters(recurse=False))


def _cache_reason(config: Any) -> str | None:
    try:
        layers = DynamicCache(config=config).layers
        config.num_hidden_layers  # noqa: B018 - asked for before it is needed
    except (AttributeError, KeyError) as error:
        return f"transformers has no standard cache for it ({type(error).__name__}: {error})"
    kinds = {type(layer).__name__ for layer in layers} - CACHE_LAYERS
    if any("Linear" in kind for kind in kinds):
        return RECURRENT
    return f"its cache has layers of an unknown kind ({', '.join(sorted(kinds))})" if kinds else None


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """The rotary settings of the model, one per kind of layer where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _configuration_hash(target: "HFTarget") -> str:
    facts = [target.config.to_json_string(), str(target.dtype), target.attention, target.kernel]
    return hashlib.sha256("\n".join([*facts, transformers.__version__]).encode()).hexdigest()
