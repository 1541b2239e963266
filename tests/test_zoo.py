"""The zoo: every model type is there or says why not, and what depends on positions shows in the logits."""

import pytest
import torch

from treepass.testing.zoo import NotBuildable, model_types, zoo_model

pytestmark = pytest.mark.arch

NOT_BUILDABLE = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "xglm"}
A_DOZEN = ["afmoe", "bert", "bloom", "deepseek_v4", "gemma4", "gpt_neo"]
A_DOZEN += ["inkling2_text", "jamba", "llama4", "minimax_m3_vl_text", "ministral3", "whisper"]

IDS = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits(model, ids=IDS):
    return model(input_ids=ids, use_cache=False).logits


def available(types):
    """Those of the types that the installed transformers has."""
    return [name for name in types if name in model_types()]


@pytest.mark.parametrize("model_type", model_types())
def test_every_type_is_built_or_says_why_not(model_type):
    if model_type in NOT_BUILDABLE:
        with pytest.raises(NotBuildable, match=rf"^{model_type}: \w.{{20}}"):
            zoo_model(model_type)
        return
    model = zoo_model(model_type)
    assert not model.training
    assert model.generation_config.eos_token_id is None
    assert sum(parameter.numel() for parameter in model.parameters()) <= 200_000
    out = logits(model)
    assert out.shape == (1, 40, 64)
    assert out.isfinite().all()
    other = IDS.clone()
    other[0, 0] = IDS[0, 0] % 63 + 1
    assert (logits(model, other[:, :6]) - logits(model, IDS[:, :6]))[0, -1].abs().max() > 1e-4


@pytest.mark.parametrize("model_type", available(A_DOZEN))
def test_weights_are_a_function_of_the_seed(model_type):
    before = torch.get_rng_state()
    first, again, other = zoo_model(model_type, 3), zoo_model(model_type, 3), zoo_model(model_type, 4)
    single = zoo_model(model_type, 3, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    state = first.state_dict()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in state.items())
    assert all(torch.equal(value.float(), single.state_dict()[name].float()) for name, value in state.items())
    assert not torch.equal(logits(first), logits(other))


@pytest.mark.parametrize(
    ("model_type", "feature"),
    [
        ("mistral", {"sliding_window": 512}),
        ("gemma3", {"sliding_window": 512}),  # a field of its text part
        ("gpt_neo", {"window_size": 512}),
        ("llama4_text", {"attention_chunk_size": 512}),
        ("llama4_text", {"floor_scale": 512}),
        ("llama4_text", {"no_rope_layers": [1, 1]}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("deepseek_v32", {"index_topk": 512}),
        ("deepseek_v4", {"index_topk": 512}),
        ("minimax_m3_vl_text", {"index_topk_blocks": 512}),
        ("gemma4_text", {"num_kv_shared_layers": 0}),
        ("inkling_text", {"log_scaling_n_floor": 512}),
        ("qwen2", {"use_sliding_window": False}),
    ],
    ids=str,
)
def test_a_feature_shows(model_type, feature):
    difference = logits(zoo_model(model_type)) - logits(zoo_model(model_type, **feature))
    assert difference.abs().max() > 1e-3


def test_what_cannot_run_in_float64_runs_in_float32():
    assert logits(zoo_model("xglm", dtype=torch.float32)).isfinite().all()
