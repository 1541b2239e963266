"""The tiny random models: varied, far from ties, the same at every call."""

import pytest
import torch

from treepass.testing import tiny_llama, tiny_recurrent

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("options", [{}, {"tie": True}, {"vocab_size": 16}, {"kv_heads": 1, "attn": "eager"}], ids=str)
def test_greedy_text_is_varied_and_far_from_ties(options):
    distinct, margins = [], []
    for seed in range(6):
        out = tiny_llama(seed, **options).generate(
            torch.tensor([[1, 2, 3]]),
            max_new_tokens=30,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert out.sequences.shape == (1, 33)
        distinct.append(len(set(out.sequences[0, 3:].tolist())))
        top = torch.cat(out.logits).topk(2).values
        margins.append((top[:, 0] - top[:, 1]).min().item())
    assert min(distinct) >= 4
    assert sum(distinct) / len(distinct) >= 7
    assert min(margins) > 1e-5


def test_same_seed_same_weights():
    before = torch.random.get_rng_state()
    first, again, other = tiny_llama(3), tiny_llama(3), tiny_llama(4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    single = tiny_llama(3, dtype=torch.float32)
    assert all(torch.equal(a, b.double()) for a, b in zip(first.parameters(), single.parameters(), strict=True))


def test_options_arrive():
    model = tiny_llama(vocab_size=11, layers=3, kv_heads=1, tie=True, attn="eager", eos_token_id=[4, 5])
    assert model.config.num_hidden_layers == 3
    assert model.config.num_key_value_heads == 1
    assert model.config._attn_implementation == "eager"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (11, 32)
    assert model.generation_config.eos_token_id == [4, 5]
    assert tiny_llama().generation_config.eos_token_id is None


def test_end_of_generation_is_honoured():
    prompt = torch.tensor([[1, 2, 3]])
    text = tiny_llama().generate(prompt, max_new_tokens=30, do_sample=False)[0, 3:].tolist()
    end = text[9]
    stopped = tiny_llama(eos_token_id=end).generate(prompt, max_new_tokens=30, do_sample=False)[0, 3:].tolist()
    assert stopped == text[: text.index(end) + 1]


def test_recurrent_model_runs():
    model = tiny_recurrent()
    assert model.config.model_type == "mamba"
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape == (1, 8)
