"""A zoo: one tiny random model of every causal language model type that the installed transformers has.

Whatever depends on positions or on which keys a row sees is switched on and happens within 40 tokens (windows, chunks,
selections of keys, position scaling, sinks, caps), and every kind of layer occurs, so that a wrong mask or position
shows in the logits. A configuration is the type's default one with `SIZES` instead of its sizes, one layer of each kind
(`PER_LAYER`), and what `SPECIAL` says about its type.
"""

import dataclasses
import typing
from collections.abc import Collection
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treepass.support import SOFT_CAPPED

# What a configuration field becomes wherever it occurs, in the vision and audio parts of composite models too: one
# table for all types, because transformers names its fields alike.
SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (64, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (32, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width"),
        (32, "input_embedding_size output_embedding_size hidden_size_global"),
        (48, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff n_inner ffn_hidden_size"),
        (48, "feed_forward_size d_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size"),
        (16, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
        (16, "shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
        (2, "num_hidden_layers n_layer n_layers num_layers num_blocks encoder_layers decoder_layers"),
        (2, "num_encoder_layers num_decoder_layers"),
        (4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
        (4, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
        (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads"),
        (8, "head_dim dim_head d_head swa_head_dim kv_channels attention_head_size"),
        (512, "max_position_embeddings n_positions max_seq_len n_ctx model_max_length context_length"),
        (512, "max_target_positions max_source_positions"),
        # Rotary dimensions counted in numbers, not as a part of the head.
        (4, "rotary_dim"),
        # Windows, chunks, blocks and selections: smaller than the 40 tokens of a test.
        (8, "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size"),
        (8, "index_topk rel_extent"),
        (16, "local_attention"),  # twice the window
        (True, "use_sliding_window"),
        (1, "max_window_layers"),
        (8, "index_head_dim"),
        (16, "index_n_heads"),  # many: keys without a positive score are tied, and ties are broken at random
        # Caps that bite, and scaling by position that begins within a test.
        (2.0, "attn_logit_softcapping final_logit_softcapping logits_soft_cap clip_qkv"),
        (1.0, "swiglu_limit rel_l2_clip_threshold mlp_gate_softcap mlp_up_softcap"),
        (2.0, "qk_l2_clip_threshold"),
        (4, "floor_scale log_scaling_n_floor"),
        (8, "query_pre_attn_scalar"),
        # Multi-head latent attention: keys and values of unequal width.
        (16, "kv_lora_rank q_lora_rank"),
        (8, "qk_nope_head_dim"),
        (4, "qk_rope_head_dim"),
        (12, "qk_head_dim"),
        (10, "v_head_dim"),
        # Experts.
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
        (1, "n_group topk_group num_expert_group"),
        (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
        # Linear attention and state spaces.
        (4, "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads"),
        (2, "linear_num_key_heads mamba_n_groups mamba_ngroups n_groups n_mamba_heads"),
        (8, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
        (16, "mamba_d_head mamba_head_dim"),
        (64, "mamba_d_ssm"),
        (8, "mamba_d_state ssm_state_size state_size"),
        (8, "chunk_size mamba_chunk_size block_size"),
        # Residual streams, per-layer embeddings and the like at their smallest.
        (2, "hc_mult hc_count altup_num_inputs"),
        (8, "hidden_size_per_layer_input hc_lowrank laurel_rank gated_norm_rank d_rel"),
        (8, "loop_gate_rank router_hidden_size"),
        # Generation is greedy and nothing else.
        (None, "begin_suppress_tokens suppress_tokens"),
        (0, "encoder_no_repeat_ngram_size"),
        # Vision and audio.
        (16, "image_size crop_size"),
        (8, "patch_size"),
        (32, "mlp_dim output_channels nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"),
        # What makes a decoder of an encoder's configuration.
        (True, "is_decoder"),
        (False, "is_encoder_decoder add_cross_attention"),
    )
    for name in names.split()
}

# Fields with one entry per layer: layers are taken until every entry that occurs by default has been seen.
PER_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "block_types"),
    *("no_rope_layers", "indexer_types", "layer_rope_theta"),
)

# What `SIZES` and `PER_LAYER` cannot know, by the model type of a configuration or of a part of it.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 32,
        "encoder_hash_byte_group_size": [2, 3],
        "local_attention_window_len": 8,
        "patching_threshold": 3.0,
    },
    "big_bird": {"attention_type": "original_full"},  # a decoder cannot have the sparse one
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
            "full_attention": None,
        },
    },
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0}},  # required, and has no default
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 1,
    },
    "dots3_note_text": {
        "head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 10,
    },
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "enable_moe_block": True,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    },
    "got_ocr2_vision": {"global_attn_indexes": [1], "window_size": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 2]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"moe_layers": [1]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 16},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    # A linear layer hardly decays where it is the last, and spoils the length of the cache where it is the first.
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,  # one to each key
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "musicgen_decoder": {"num_codebooks": 1, "pad_token_id": 64},  # its table of embeddings has a row for padding
    "musicgen_melody_decoder": {"num_codebooks": 1, "pad_token_id": 64},
    "nemotron_h": {"sliding_window": None},  # only its cache would have a window
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 32,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "eos_token_id": 63,  # n-grams end there
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 16),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 8,
        "shape_vocab_size": 64,
    },
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},  # its cache rounds up to 64
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1},  # it refuses more
}

# Types that count positions from the padding token: a text that held it would have other positions.
FROM_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xlm", "xmod"),
    "prophetnet",
)

# Types that need a padding token: those, and the ones that embed padding where an image was.
PADDED = (*FROM_PADDING, "gemma4_text", "gemma4_unified_text", "reformer")

# Buffers that are learnt: they shift which experts are chosen.
CORRECTIONS = ("e_score_correction_bias", "expert_bias", "moe_statics", "correction_bias", "balancing_biases")

# Types whose forward is in float32 where transformers keeps the weights in float32, whatever the type of the others.
FLOAT32_PARTS = ("inkling2_text", "inkling2_loop_text")

REFUSED = {
    "gemma3n": "its vision tower is a model of timm, full-sized; its language model is the type gemma3n_text",
    "gemma4_assistant": "it drafts for another model, whose keys and values its forward needs",
    "gemma4_unified_assistant": "it drafts for another model, whose keys and values its forward needs",
}

REFUSED_IN_FLOAT64 = {"xglm": "its attention writes the smallest float64 into a float32; other types of number work"}


class NotBuildable(Exception):  # noqa: N818 - a finding about a model type, not a failure of the zoo
    """The type has no tiny model that maps token ids to logits; the message says why."""


def model_types() -> list[str]:
    """The model types whose causal language model the installed transformers knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def zoo_model(model_type: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A random model of the class that ``AutoModelForCausalLM`` has for a type, with a vocabulary of 64.

    No text ends early: there is no end of generation. Where the configuration has a padding token, positions may be
    counted from it (`FROM_PADDING`): prompts should not hold it, and the model never chooses it.

    Args:
        model_type: One of `model_types`.
        seed: Weights are a function of it and of the sizes; torch's own generator is left as it was.
        dtype: Type of the weights, which are drawn in float32 whatever it is.
        overrides: Fields of the configuration; of its text part if the model has several.

    Returns:
        The model in eval mode on the CPU.

    Raises:
        NotBuildable: The type has no such model, or none in this dtype.
    """
    reason = REFUSED.get(model_type) or (REFUSED_IN_FLOAT64.get(model_type) if dtype == torch.float64 else None)
    if reason:
        raise NotBuildable(f"{model_type}: {reason}")
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config_class = CONFIG_MAPPING[model_type]
    if kind.config_class in config_class.sub_configs.values():
        config_class = kind.config_class  # the class is the text part of a composite model
    config = _shrunk(config_class, overrides)
    if model_type in SOFT_CAPPED:
        config._attn_implementation = "eager"  # what older versions take by default leaves the cap out
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    # Some configurations bring an end of generation of their own when they are given none.
    for holder in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        holder.eos_token_id = None
    _redraw(model, seed)
    model = model.to(dtype).eval()
    if model_type in FLOAT32_PARTS:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in model._keep_in_fp32_modules_strict):
                tensor.data = tensor.data.float()
    return model


def _shrunk(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a class, or of a part of one, at the sizes of the zoo."""
    default = config_class()
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    special = dict(SPECIAL.get(config_class.model_type, {}))
    if "text_config" not in fields:
        special |= overrides
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:
        # Latent attention has no groups, and what other types call the width of a head is its rotary part.
        values |= {"num_key_value_heads": 4, "head_dim": 4}
    values |= {name: _token(field) for name, field in fields.items() if name.endswith(("_token_id", "_token_index"))}
    if config_class.model_type in PADDED:
        values["pad_token_id"] = 0
    values |= _layers(default, fields.keys(), special)
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            asked = overrides if name == "text_config" else {}
            values[name] = _shrunk(type(part), asked | special.pop(name, {}))
    config = config_class(**(values | special))
    config._experts_implementation = "eager"  # the others multiply no float64
    return config


def _token(field: dataclasses.Field[Any]) -> int | None:
    """A special token: none if the field allows that and does not mark a place in the text, else the first one."""
    is_place = not field.name.endswith(("eos_token_id", "bos_token_id", "pad_token_id"))
    return 0 if is_place or type(None) not in typing.get_args(field.type) else None


def _layers(default: PretrainedConfig, names: Collection[str], special: dict[str, Any]) -> dict[str, Any]:
    """The number of layers and the fields with one entry per layer, so that every entry of the default occurs."""
    lists = {name: list(getattr(default, name)) for name in PER_LAYER if name in names and getattr(default, name)}
    # A list of one kind is left to the class, which may know others once it hears of a window.
    lists = {name: entries for name, entries in lists.items() if len(set(entries)) > 1 and name not in special}
    seen: set[tuple[str, Any]] = set()
    taken = []
    for layer, entries in enumerate(zip(*lists.values(), strict=False)):
        if not seen.issuperset(zip(lists, entries, strict=True)):
            taken.append(layer)
            seen.update(zip(lists, entries, strict=True))
    count = next((len(special[name]) for name in PER_LAYER if special.get(name)), len(taken) or None)
    values: dict[str, Any] = {"num_hidden_layers": count} if count and "num_hidden_layers" in names else {}
    if len(taken) == count:
        values |= {name: [entries[layer] for layer in taken] for name, entries in lists.items()}
    return values


def _redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight anew: matrices keep activations alive, vectors lie about where the type starts them."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Linear) and head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and not name.endswith("A_log"):
                fan_in = tensor[0].numel() if "conv" in name else tensor.shape[-1]
                gain = 2.26  # a standard deviation of 0.4 at 32 inputs
                if tied and tensor is head.weight:
                    gain *= 0.35  # or the likeliest successor of most tokens is the token itself
                tensor.copy_(noise * gain / fan_in**0.5)
            elif isinstance(tensor, nn.Parameter) or name.endswith(CORRECTIONS):
                tensor += 0.2 * noise
            elif name.endswith("tid2eid"):  # the experts of each token, all zero until a checkpoint is loaded
                tensor.copy_(torch.rand(len(tensor), 4, generator=generator).argsort()[:, : tensor.shape[1]])
        if model.config.model_type in FROM_PADDING and getattr(head, "bias", None) is not None:
            head.bias[model.config.pad_token_id] = -20.0  # never chosen
