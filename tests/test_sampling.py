"""Sampled text depends on model and seed alone, and follows the model's own law; the noise is what it claims to be."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_prompts
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treepass.errors import LogitsError
from treepass.generate import TreeDecoder
from treepass.sampling import Noise, Sampler, SamplingParams, _uniform_bits, draw_seed
from treepass.testing import FunctionDrafter, random_tree, tiny_llama

unit = pytest.mark.unit
arch = pytest.mark.arch

VOCAB = 64
PROMPT = [7, 3, 11]
DRAFTERS = ("suffix", "recycling", "auto", "random")
SETTINGS = {
    "t0.7": {"temperature": 0.7},
    "t1.0": {"temperature": 1.0},
    "t0.7 p0.9": {"temperature": 0.7, "top_p": 0.9},
    "t1.0 p0.9": {"temperature": 1.0, "top_p": 0.9},
    "t1.5 k5": {"temperature": 1.5, "top_k": 5},
    "t1.2 m0.1": {"temperature": 1.2, "min_p": 0.1},
    "t2.0 k20 p0.8 m0.05": {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
}


def warped(row: torch.Tensor, temperature: float, top_k=None, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Scores of one row after transformers' own warpers, in the order of ``generate``."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(1, 0, dtype=torch.long), row[None])[0]


def next_law(model, ids: list[int], **settings) -> np.ndarray:
    """The model's own probabilities of the next token, computed without treepass."""
    with torch.no_grad():
        row = model(torch.tensor([ids])).logits[0, -1]
    return warped(row, **settings).softmax(-1).numpy()


@pytest.fixture(scope="module")
def soft_model():
    """A model whose laws are spread over many tokens."""
    return tiny_llama(2, initializer_range=0.25)


# --- the same seed, the same text -------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("setting", SETTINGS)
def test_same_seed_same_text_with_every_drafter_and_with_none(soft_model, setting):
    plain = TreeDecoder(soft_model, "none")
    decoders = {
        (drafter, nodes): TreeDecoder(soft_model, drafter, nodes=nodes) for drafter in DRAFTERS for nodes in (3, 20)
    }
    accepted: Counter = Counter()
    texts = set()
    for seed, prompt in enumerate(random_prompts(6, VOCAB, seed=1)):
        options = {"max_new_tokens": 20, "seed": seed, **SETTINGS[setting]}
        ids = plain.generate(prompt, **options).ids
        texts.add(tuple(ids[0]))
        for key, decoder in decoders.items():
            if key[1] != (3, 20)[seed % 2]:
                continue
            for _ in range(2):  # the second time the drafter remembers the first
                output = decoder.generate(prompt, **options)
                assert output.ids == ids, (key, seed)
                assert output.seed == seed
                accepted[key[0]] += output.report.accepted
    assert len(texts) == 6
    assert min(accepted[drafter] for drafter in DRAFTERS) > 0


@arch
def test_another_seed_another_text(soft_model):
    decoder = TreeDecoder(soft_model)
    texts = {tuple(decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=s).ids[0]) for s in range(20)}
    assert len(texts) == 20
    drawn = [decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0) for _ in range(3)]
    assert len({output.seed for output in drawn}) == 3
    again = decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=drawn[0].seed)
    assert again.ids == drawn[0].ids


@arch
def test_temperature_0_does_not_look_at_the_seed(soft_model):
    decoder = TreeDecoder(soft_model)
    assert len({tuple(decoder.generate(PROMPT, max_new_tokens=12, seed=s).ids[0]) for s in range(5)}) == 1


@arch
@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
def test_samples_of_one_request_differ_and_do_not_depend_on_their_number(soft_model, drafter):
    options = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    plain = TreeDecoder(soft_model, "none").generate(PROMPT, num_return_sequences=3, **options)
    assert len({tuple(ids) for ids in plain.ids}) == 3
    decoder = TreeDecoder(soft_model, drafter)
    assert decoder.generate(PROMPT, num_return_sequences=3, **options).ids == plain.ids
    assert decoder.generate(PROMPT, num_return_sequences=2, **options).ids == plain.ids[:2]
    assert decoder.generate(PROMPT, **options).ids == plain.ids[:1]
    two = decoder.generate([PROMPT, [1, 2, 3, 4]], num_return_sequences=3, **options)
    assert two.ids[:3] == plain.ids
    assert two.sequences.shape[0] == 6


@arch
@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}], ids=str)
def test_a_sequence_does_not_depend_on_its_neighbours(soft_model, drafter, setting):
    options = {"max_new_tokens": 16, "seed": 9, **setting}
    prompts = random_prompts(6, VOCAB, seed=2, longest=20)
    alone = [TreeDecoder(soft_model, "none").generate(prompt, **options).ids[0] for prompt in prompts]
    decoder = TreeDecoder(soft_model, drafter)
    for batch in ([0, 1, 2], [2, 1, 0], [1, 4], [5, 3, 1, 0], [2]):
        output = decoder.generate([prompts[i] for i in batch], **options)
        assert output.ids == [alone[i] for i in batch], batch


@arch
def test_text_does_not_depend_on_random_trees(soft_model):
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_k": 8, "seed": 4}
    expected = TreeDecoder(soft_model, "none").generate(PROMPT, **options).ids
    rng = np.random.default_rng(0)
    accepted = 0
    for _ in range(20):
        drafter = FunctionDrafter(
            lambda session, plan, depth: random_tree(
                rng, session.ids[-1], nodes=int(rng.integers(60)), max_depth=min(depth, 6), vocab_size=VOCAB
            )
        )
        output = TreeDecoder(soft_model, drafter, nodes=64).generate(PROMPT, **options)
        assert output.ids == expected
        accepted += output.report.accepted
    assert accepted > 20


# --- the law of the tokens --------------------------------------------------------------------------------------------


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square test of counts against a law; tokens expected fewer than five times are taken together."""
    total = counts.sum()
    if counts[law == 0].any():
        return 0.0
    rare = law * total < 5
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*(law[~rare] * total), law[rare].sum() * total]
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, np.array(expected) * (total / sum(expected))).pvalue)


LAWS = [
    ({"temperature": 1.0}, {"temperature": 0.85}),
    ({"temperature": 0.7}, {"temperature": 0.85}),
    ({"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0}),
    ({"temperature": 1.0, "top_k": 8}, {"temperature": 1.0, "top_k": 9}),
    ({"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.05}),
]


@arch
@pytest.mark.parametrize(("setting", "other"), LAWS, ids=str)
def test_choices_follow_the_models_law_over_2000_seeds(soft_model, setting, other):
    with torch.no_grad():
        row = soft_model(torch.tensor([PROMPT])).logits[0, -1]
    chosen = [Sampler(SamplingParams(seed=seed, **setting)).choose(row, len(PROMPT)).token for seed in range(2000)]
    counts = np.bincount(chosen, minlength=VOCAB)
    assert p_value(counts, next_law(soft_model, PROMPT, **setting)) > 1e-4
    # The test tells laws apart: it fails against that of another setting.
    assert p_value(counts, next_law(soft_model, PROMPT, **other)) < 1e-6


@arch
@pytest.mark.parametrize(("setting", "other"), [LAWS[1], LAWS[2]], ids=str)
def test_tokens_follow_the_models_law_over_2000_seeds(soft_model, setting, other):
    decoder = TreeDecoder(soft_model, "recycling", nodes=2)
    texts = [
        decoder.generate(PROMPT, max_new_tokens=2, seed=seed, keep_records=False, eos_token_id=[], **setting).ids[0]
        for seed in range(2000)
    ]
    first = np.bincount([ids[0] for ids in texts], minlength=VOCAB)
    assert p_value(first, next_law(soft_model, PROMPT, **setting)) > 1e-4
    assert p_value(first, next_law(soft_model, PROMPT, **other)) < 1e-6
    for token in np.argsort(-first)[:2].tolist():
        second = np.bincount([ids[1] for ids in texts if ids[0] == token], minlength=VOCAB)
        assert second.sum() > 100
        assert p_value(second, next_law(soft_model, [*PROMPT, token], **setting)) > 1e-4
        assert p_value(second, next_law(soft_model, PROMPT, **setting)) < 1e-6


@unit
def test_a_flat_law_is_drawn_evenly():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3))
    counts = np.bincount([sampler.choose(torch.zeros(20), position).token for position in range(2000)], minlength=20)
    assert p_value(counts, np.full(20, 0.05)) > 1e-4
    skewed = np.linspace(0.5, 1.5, 20) / 20
    assert p_value(counts, skewed) < 1e-6


@unit
def test_samples_of_a_request_are_independent():
    row = torch.zeros(4)
    pairs: Counter = Counter()
    samplers = [[Sampler(SamplingParams(1.0, seed=seed), sample) for sample in (0, 1)] for seed in range(2000)]
    for samplers_of_seed in samplers:
        pairs[tuple(sampler.choose(row, 5).token for sampler in samplers_of_seed)] += 1
    counts = np.array([pairs[a, b] for a in range(4) for b in range(4)])
    assert p_value(counts, np.full(16, 1 / 16)) > 1e-4


# --- the noise --------------------------------------------------------------------------------------------------------


@unit
def test_noise_is_gumbel():
    noise = np.concatenate([Noise(seed).gumbel(position, np.arange(500)) for seed in range(5) for position in range(8)])
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-4
    assert stats.kstest(noise * 1.05, "gumbel_r").pvalue < 1e-4
    by_position = np.array([Noise(1).gumbel(position, np.array([17]))[0] for position in range(20000)])
    assert stats.kstest(by_position, "gumbel_r").pvalue > 1e-4
    by_seed = np.array([Noise(seed).gumbel(3, np.array([17]))[0] for seed in range(20000)])
    assert stats.kstest(by_seed, "gumbel_r").pvalue > 1e-4
    by_sample = np.array([Noise(1, sample).gumbel(3, np.array([17]))[0] for sample in range(20000)])
    assert stats.kstest(by_sample, "gumbel_r").pvalue > 1e-4


@unit
def test_neighbouring_noise_is_not_correlated():
    tokens = np.arange(4000)
    base = Noise(1).gumbel(10, tokens)
    for other in (
        Noise(1).gumbel(11, tokens),
        Noise(2).gumbel(10, tokens),
        Noise(1, 1).gumbel(10, tokens),
        Noise(1).gumbel(10, tokens + 1),
        Noise(-1).gumbel(10, tokens),
        Noise(1 << 32).gumbel(10, tokens),
    ):
        assert not np.array_equal(base, other)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.08


def uniforms(seed: int, sample: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """The uniform numbers behind the noise."""
    return np.exp(-np.exp(-Noise(seed, sample).gumbel(position, tokens)))


@unit
def test_uniforms_lie_in_the_open_interval():
    values = np.concatenate([uniforms(seed, 0, 4, np.arange(50000)) for seed in range(4)])
    assert values.min() > 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-4


@unit
@pytest.mark.parametrize(("bits", "bound"), [(0, -3.0), ((1 << 52) - 1, 36.0)])
def test_the_ends_of_the_interval_give_finite_noise(monkeypatch, bits, bound):
    import treepass.sampling

    for tokens in (np.arange(3), torch.arange(3)):
        monkeypatch.setattr(treepass.sampling, "_uniform_bits", lambda key, tokens: tokens * 0 + bits)
        noise = np.asarray(Noise(0).gumbel(0, tokens))
        assert np.isfinite(noise).all()
        assert (noise < bound).all() if bound < 0 else (noise > bound).all()


def plain_bits(key: int, token: int) -> int:
    """SplitMix64 at counter ``token`` in exact integers, 52 bits of it."""
    word = (token * 0x9E3779B97F4A7C15 + key) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * factor) % 2**64
    return (word ^ (word >> 31)) >> 12


@unit
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
def test_bits_are_those_of_exact_integers_in_numpy_and_torch(key, tokens):
    expected = [plain_bits(key, token) for token in tokens]
    assert _uniform_bits(key, np.array(tokens, dtype=np.int64)).tolist() == expected
    assert _uniform_bits(key, torch.tensor(tokens)).tolist() == expected
    assert max(expected) < 2**52


@unit
@given(st.integers(-(2**70), 2**70), st.integers(0, 5), st.integers(0, 10**6))
def test_noise_of_numpy_and_torch_is_the_same(seed, sample, position):
    tokens = np.arange(100)
    noise = Noise(seed, sample)
    ours, theirs = noise.gumbel(position, tokens), noise.gumbel(position, torch.from_numpy(tokens))
    assert theirs.dtype == torch.float64
    # The bits are the same; the two libraries' logarithms may round differently in the last place.
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-13, atol=1e-15)


@unit
def test_noise_never_changes_between_versions():
    # A stored seed must give the stored text in years to come.
    values = Noise(7, 1).gumbel(3, np.array([0, 1, 49151]))
    assert values.tolist() == pytest.approx(
        [-math.log(-math.log((plain_bits(noise_key(7, 1, 3), t) + 0.5) / 2**52)) for t in (0, 1, 49151)], rel=1e-14
    )


def noise_key(seed: int, sample: int, position: int) -> int:
    """The key of one position, written out in exact integers."""

    def mix(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = ((word ^ (word >> shift)) * factor) % 2**64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    base = mix(mix(seed % 2**64) ^ mix((sample + 1) * golden % 2**64))
    return mix((base + (position + 1) * golden) % 2**64)


@unit
@pytest.mark.parametrize("setting", SETTINGS)
def test_padding_of_the_vocabulary_changes_no_choice(setting):
    rng = np.random.default_rng(3)
    for seed in range(200):
        row = torch.from_numpy(rng.normal(size=50) * 2)
        sampler = Sampler(SamplingParams(seed=seed, **SETTINGS[setting]))
        padded = torch.cat([row, torch.full((30,), float("-inf"), dtype=row.dtype)])
        choice, other = sampler.choose(row, 8), sampler.choose(padded, 8)
        assert other.token == choice.token
        assert other.logprob == pytest.approx(choice.logprob, abs=1e-12)


@unit
def test_draws_are_32_bits():
    seeds = {draw_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**32 for seed in seeds)


# --- what can be chosen -----------------------------------------------------------------------------------------------


def check_support(row: torch.Tensor, **settings) -> None:
    """The tokens that can be chosen, and the law over them, are those of transformers' warpers."""
    tokens, scores = Sampler(SamplingParams(**settings)).support(row)
    expected = warped(row, **settings)
    kept = torch.nonzero(expected > float("-inf"))[:, 0]
    assert tokens.tolist() == sorted(tokens.tolist())
    # Which of equal scores at the edge are kept is no one's promise; how many is.
    assert sorted(row[tokens].tolist()) == sorted(row[kept].tolist())
    edge = row[kept].min()
    assert set(tokens[row[tokens] > edge].tolist()) == set(kept[row[kept] > edge].tolist())
    law = torch.sort(scores.softmax(-1)).values
    torch.testing.assert_close(law, torch.sort(expected[kept].softmax(-1)).values, rtol=1e-9, atol=1e-12)


@unit
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([None, 1, 2, 7, 50, 400]),
    st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.booleans(),
)
def test_support_equals_that_of_transformers(seed, size, spread, temperature, top_k, top_p, min_p, ties):
    rng = np.random.default_rng(seed)
    # Off a grid of round numbers, so that no cumulated sum stands exactly on the edge.
    row = torch.from_numpy(rng.normal(size=size) * spread + 0.123)
    if ties:
        row = torch.round(row * 2) / 2
    if size > 3:
        row[int(rng.integers(size))] = float("-inf")
    if spread == 0 or ties:
        top_p = min(1.0, top_p * 1.0123)
    check_support(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@unit
@pytest.mark.parametrize("size", [63, 64, 65, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("top_p", [0.00123, 0.501234, 0.987654, 0.999999])
def test_support_of_flat_and_nearly_flat_laws(size, top_p):
    check_support(torch.zeros(size, dtype=torch.float64), temperature=1.0, top_p=top_p)
    slope = torch.linspace(0, 0.1, size, dtype=torch.float64)
    check_support(
        slope[torch.randperm(size, generator=torch.Generator().manual_seed(size))], temperature=1.0, top_p=top_p
    )


@unit
def test_of_equal_scores_the_lowest_ids_are_kept():
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    tokens, _ = Sampler(SamplingParams(temperature=1.0, top_p=0.4)).support(row)
    assert tokens.tolist() == [1, 2]
    tokens, _ = Sampler(SamplingParams(temperature=1.0, top_k=2)).support(row)
    assert tokens.tolist() == [1, 2, 3, 5]  # ties at the k-th are kept, as transformers does


@unit
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-8, 1e-2, 5.0])
@pytest.mark.parametrize("extra", [{}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_extreme_temperatures_give_finite_choices(dtype, temperature, extra):
    rng = np.random.default_rng(0)
    for scale in (1.0, 30.0, 1000.0):
        for seed in range(20):
            row = torch.from_numpy(rng.normal(size=40) * scale).to(dtype)
            choice = Sampler(SamplingParams(temperature=temperature, seed=seed, **extra)).choose(row, 3)
            assert math.isfinite(choice.logprob)
            assert math.isfinite(choice.score)
            if temperature == 1e-8 or extra == {"top_k": 1}:
                assert row[choice.token] == row.max()
            assert choice.logprob == pytest.approx(
                float(row.double().log_softmax(-1)[choice.token]), rel=1e-4, abs=1e-4 * scale
            )


@arch
@pytest.mark.parametrize("temperature", [1e-8, 1e-2, 5.0])
@pytest.mark.parametrize("top_k", [None, 1])
def test_extreme_temperatures_in_a_text(soft_model, temperature, top_k):
    greedy = TreeDecoder(soft_model, "none").generate(PROMPT, max_new_tokens=16).ids
    options = {"max_new_tokens": 16, "temperature": temperature, "top_k": top_k, "seed": 2}
    expected = TreeDecoder(soft_model, "none").generate(PROMPT, **options).ids
    for drafter in DRAFTERS:
        assert TreeDecoder(soft_model, drafter).generate(PROMPT, **options).ids == expected
    assert (expected == greedy) == (temperature < 1 or top_k == 1)


@unit
def test_ties_go_to_the_lowest_id():
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    assert Sampler(SamplingParams()).choose(row, 0).token == 1


@unit
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [[0.0, math.nan, 1.0], [math.nan] * 3, [-math.inf] * 3, [0.0, math.inf, 1.0], [math.inf, math.inf, 0.0]],
    ids=str,
)
def test_a_row_without_a_law_is_an_error(row, temperature):
    with pytest.raises(LogitsError, match=r"node 4 \(position 8\) are NaN, infinite or all masked"):
        Sampler(SamplingParams(temperature=temperature)).choose(torch.tensor(row), 9, node=4)


@unit
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_chosen(temperature):
    row = torch.full((30,), -math.inf)
    row[[3, 17]] = torch.tensor([0.0, -20.0])
    sampler = Sampler(SamplingParams(temperature=temperature))
    assert {sampler.choose(row, position).token for position in range(300)} == {3}
    row[17] = 0.0
    seen = {sampler.choose(row, position).token for position in range(300)}
    assert seen == ({3} if temperature == 0 else {3, 17})


@unit
@pytest.mark.parametrize("setting", [*SETTINGS, "greedy"])
def test_draft_scores_foresee_the_choice_where_q_is_p(setting):
    params = {} if setting == "greedy" else SETTINGS[setting]
    rng = np.random.default_rng(1)
    for position in range(200):
        logits = rng.normal(size=12) * 2
        sampler = Sampler(SamplingParams(seed=8, **params))
        chosen = sampler.choose(torch.from_numpy(logits), position).token
        tokens = np.argsort(-logits)
        logprobs = torch.from_numpy(logits).log_softmax(-1).numpy()[tokens]
        scores = sampler.draft_scores(logprobs, tokens, position)
        assert tokens[int(np.argmax(scores))] == chosen
        support = {chosen} if setting == "greedy" else set(sampler.support(torch.from_numpy(logits))[0].tolist())
        if setting != "greedy":
            assert set(tokens[np.isfinite(scores)].tolist()) == support


# --- parameters -------------------------------------------------------------------------------------------------------


@unit
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": math.nan}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": math.inf}, "temperature must be finite and >= 0, got inf"),
        ({"temperature": "hot"}, "temperature must be finite and >= 0, got 'hot'"),
        ({"temperature": True}, "temperature must"),
        ({"temperature": None}, "temperature must"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"top_p": math.nan}, "top_p must"),
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, "min_p must"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
        ({"top_k": math.inf}, "top_k must"),
        ({"top_k": math.nan}, "top_k must"),
        ({"top_k": "many"}, "top_k must"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed": "x"}, "seed must"),
        ({"seed": math.nan}, "seed must be an integer, got nan"),
        ({"seed": math.inf}, "seed must be an integer, got inf"),
    ],
    ids=str,
)
def test_parameters_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@arch
@pytest.mark.parametrize(
    "settings",
    [
        {"seed": np.int64(7)},
        {"seed": 7.0},
        {"seed": np.uint8(7)},
        {"temperature": np.float32(0.5), "seed": 7},
        {"temperature": np.float64(0.5), "seed": 7},
        {"top_k": 5.0, "seed": 7},
        {"top_k": np.int32(5), "seed": 7},
        {"top_p": np.float32(0.5), "seed": 7},
    ],
    ids=lambda s: " ".join(f"{k}={v!r}" for k, v in s.items()),
)
def test_accepted_parameters_work_whatever_kind_of_number_they_are(soft_model, settings):
    decoder = TreeDecoder(soft_model)
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in settings.items()}
    plain = {name: int(value) if name in ("seed", "top_k") else value for name, value in plain.items()}
    options = {"temperature": 0.8, "max_new_tokens": 8}
    output = decoder.generate(PROMPT, **options | settings)
    assert output.ids == decoder.generate(PROMPT, **options | plain).ids
    assert all(record.to_json() for record in output.records)
