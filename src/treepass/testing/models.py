"""Tiny random models of real architectures, whose forward takes about a millisecond."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PretrainedConfig, PreTrainedModel


def tiny_llama(
    seed: int = 0,
    *,
    vocab_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    hidden_size: int = 32,
    dtype: torch.dtype = torch.float64,
    tie: bool = False,
    max_position_embeddings: int = 512,
    attn: str = "sdpa",
    eos_token_id: int | list[int] | None = None,
    initializer_range: float = 0.4,
) -> LlamaForCausalLM:
    """A random Llama whose greedy text is varied and whose choices are far from ties in float64.

    Args:
        seed: Weights are a function of it and of the sizes; torch's own generator is left as it was.
        vocab_size: Number of tokens.
        layers: Number of decoder layers.
        heads: Number of query heads; divides ``hidden_size``.
        kv_heads: Number of key and value heads; divides ``heads``.
        hidden_size: Width of the hidden states.
        dtype: Type of the weights.
        tie: Whether input and output embeddings are one tensor.
        max_position_embeddings: The longest sequence.
        attn: The attention implementation of transformers: ``"sdpa"``, ``"eager"`` or a registered name.
        eos_token_id: The end of generation; None lets it run to its length.
        initializer_range: Standard deviation of the weights. Small values give texts of one token.

    Returns:
        The model in eval mode on the CPU.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        initializer_range=initializer_range,
        attn_implementation=attn,
    )
    return _random(LlamaForCausalLM, config, seed, dtype, eos_token_id)


def tiny_recurrent(seed: int = 0, *, vocab_size: int = 64, dtype: torch.dtype = torch.float64) -> MambaForCausalLM:
    """A random Mamba: its state cannot be rolled back, so that tree decoding must refuse it."""
    config = MambaConfig(vocab_size=vocab_size, hidden_size=16, state_size=4, num_hidden_layers=2)
    return _random(MambaForCausalLM, config, seed, dtype, None)


def _random(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    seed: int,
    dtype: torch.dtype,
    eos_token_id: int | list[int] | None,
) -> PreTrainedModel:
    # An end of generation is set by the caller or not at all: the configurations of transformers bring their own.
    config.bos_token_id = config.pad_token_id = None
    config.eos_token_id = eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Weights are drawn in float32 whatever the type, so that models of all types are the same up to rounding.
        return kind(config).to(dtype).eval()
