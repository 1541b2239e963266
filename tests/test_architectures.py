"""Model types: the table that is shipped is what is measured, and every claim in it can fail."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import greedy_text
from transformers import LlamaForCausalLM

from treepass import support
from treepass.audit import MUTANTS, audit_model
from treepass.audit.table import TOLERANCE, VERSIONS, measure, render, table_of
from treepass.errors import PromptError, UnsupportedModelError
from treepass.generate import TreeDecoder
from treepass.paths import Difference, PathComparison
from treepass.target import HFTarget
from treepass.testing import FunctionDrafter, NoDowncasts, random_tree, tiny_llama
from treepass.testing.zoo import NotBuildable, model_types, zoo_model
from treepass.tree import DraftTree

arch = pytest.mark.arch
unit = pytest.mark.unit

DOZEN = (
    *("cohere2", "deepseek_v2", "deepseek_v32", "falcon", "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "gpt_oss"),
    *("llama4_text", "mistral", "mixtral", "opt", "phi3", "qwen3", "roberta"),
    *("bloom", "bart", "dory", "gpt_neo", "mamba", "qwen3_next"),
)
"""Representatives of the default run: every kind of attention, and every kind of refusal."""


def check_type(model_type: str) -> None:
    """The shipped table says of the type what a new measurement finds."""
    if model_type not in model_types():
        pytest.skip(f"the installed transformers has no {model_type}")
    row = measure(model_type)
    for verdict in ("exact", "refused", "untested", "not_built"):
        entry = support.verified_table()[verdict].get(model_type)
        if row.verdict.replace(" ", "_") != verdict:
            assert entry is None, f"listed as {verdict}, but found {row.verdict}: {row.reason}"
        else:
            assert entry is not None, f"found {row.verdict} ({row.reason}), but not listed"
            if verdict == "exact":
                found = {"positions": row.positions, "noticed": list(row.noticed)}
                assert {key: entry[key] for key in found} == found
                assert set(entry["attention"]) <= set(row.attention)  # what all versions have in common


@arch
@pytest.mark.parametrize("model_type", DOZEN)
def test_a_dozen_types_are_what_the_table_says(model_type):
    check_type(model_type)


@arch
@pytest.mark.table
@pytest.mark.parametrize("model_type", [name for name in model_types() if name not in DOZEN])
def test_every_other_type_is_what_the_table_says(model_type):
    check_type(model_type)


@unit
def test_the_table_covers_every_type_and_at_least_four_fifths_of_the_decoders_are_exact():
    table = support.verified_table()
    assert table["transformers"] == VERSIONS
    verdicts = [set(table[key]) for key in ("exact", "refused", "untested", "not_built")]
    assert set.union(*verdicts) >= set(model_types())
    assert sum(map(len, verdicts)) == len(set.union(*verdicts))
    decoders = [*table["exact"], *(t for t, entry in table["refused"].items() if entry["kind"] == "decoder")]
    assert len(table["exact"]) >= 0.8 * (len(decoders) + len(table["untested"]))
    for entry in table["exact"].values():
        assert {"row index for depth", "sibling visible"} <= set(entry["noticed"])


@unit
def test_the_page_is_the_table():
    page = Path(__file__).parents[1] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == render(support.verified_table())
    assert json.dumps(table_of([])["exact"]) == "{}"


@arch
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_an_audit_under_an_error_is_not_exact(mutant):
    model = zoo_model("gemma3_text")
    with mutant.inject() as bite:
        audit = audit_model(model, tolerance=TOLERANCE, precision=NoDowncasts)
    assert bite.count > 0
    assert audit.verdict == "wrong"
    assert "trees, dense" in audit.reason


@arch
def test_a_comparison_that_notices_nothing_is_untested():
    model = tiny_llama(0)
    for weights in model.lm_head.parameters():
        weights.data.zero_()  # all logits are 0, whatever the mask
    assert audit_model(model).verdict == "untested"


# --- windows ----------------------------------------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("attention", ["dense", "per_sequence"])
@pytest.mark.parametrize("length", [6, 20, 40])
def test_fifty_passes_across_the_edge_of_a_window(length, attention):
    model = zoo_model("gemma3_text", sliding_window=8)
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    comparison = PathComparison(HFTarget(model, attention=attention), model, np.random.default_rng(length))
    with NoDowncasts():
        comparison.start([comparison.rng.integers(64, size=length).tolist()])
        for _ in range(50):
            comparison.step(comparison.random_trees(12, 6))
    assert comparison.difference.rows > 50 * 8
    assert comparison.difference.share < TOLERANCE
    assert len(comparison.texts[0]) > length + 50


@arch
@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral", "gpt_oss"])
@pytest.mark.parametrize("length", [6, 20, 40])
def test_greedy_text_with_a_window_smaller_than_the_prompt(model_type, length):
    model = zoo_model(model_type, 1)
    rng = np.random.default_rng(length)
    prompt = rng.integers(64, size=length).tolist()
    expected = greedy_text(model, prompt, 50)

    def partly_right(session, plan, depth):
        written = len(session.ids) - length
        right = DraftTree.chain([session.ids[-1], *expected[written : written + min(depth, 3)]])
        other = random_tree(rng, session.ids[-1], nodes=6, max_depth=max(1, min(depth, 3)), vocab_size=64)
        return DraftTree.merge([right, other]) if depth else right

    out = TreeDecoder(model, FunctionDrafter(partly_right)).generate(prompt, max_new_tokens=50)
    assert out.ids[0] == expected
    assert out.report.accepted > 0


# --- rotary embeddings that depend on the longest position ------------------------------------------------------------

ORIGINAL = 24
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3]},
        **{"long_factor": [4.0, 5.0, 6.0, 7.0], "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    },
}
BOUND = {"dynamic": ORIGINAL - 1, "longrope": ORIGINAL}


def with_rope(kind: str):
    limit = ORIGINAL if kind == "dynamic" else 96
    return zoo_model("llama", max_position_embeddings=limit, rope_parameters=ROPE[kind])


@arch
@pytest.mark.parametrize("kind", ROPE)
def test_every_rotary_variant_is_exact_up_to_its_bound(kind):
    model = with_rope(kind)
    target = HFTarget(model)
    assert target.max_length == BOUND.get(kind, 96)
    longest = BOUND.get(kind, 60)
    comparison = PathComparison(target, model, np.random.default_rng(0))
    with NoDowncasts():
        for _ in range(4):
            comparison.start([comparison.rng.integers(64, size=6).tolist()])
            while len(comparison.texts[0]) + 5 < longest:
                comparison.step(comparison.random_trees(12, 4))
    assert comparison.difference.rows > 60
    assert comparison.difference.share < TOLERANCE


@arch
@pytest.mark.parametrize("kind", BOUND)
def test_beyond_the_bound_the_text_ends_or_the_prompt_is_refused(kind):
    model = with_rope(kind)
    decoder = TreeDecoder(model)
    with pytest.raises(PromptError, match=f"{BOUND[kind]}, where its {kind} rotary"):
        decoder.generate(list(range(BOUND[kind])), max_new_tokens=2)
    out = decoder.generate([1, 2, 3, 4], max_new_tokens=60)
    assert len(out.sequences[0]) == BOUND[kind]
    assert out.ids[0] == greedy_text(model, [1, 2, 3, 4], BOUND[kind] - 4)
    assert any(kind in warning for warning in out.report.warnings)


# --- types that the table does not know -------------------------------------------------------------------------------


@pytest.fixture
def empty_table(monkeypatch):
    empty = {"transformers": VERSIONS, "exact": {}, "refused": {}, "untested": {}, "not_built": {}}
    monkeypatch.setattr(support, "verified_table", lambda: empty)
    monkeypatch.setattr(support, "_TRIED", {})


@arch
@pytest.mark.usefixtures("empty_table")
@pytest.mark.parametrize("model_type", ["qwen3", "mixtral", "deepseek_v3"])
def test_an_unknown_type_that_is_exact_on_one_tree_is_taken(model_type, monkeypatch):
    model = zoo_model(model_type)
    target = HFTarget(model)
    assert target.attention == "dense"
    assert len(support._TRIED) == 1

    def again(*args):
        raise AssertionError("compared once more")

    monkeypatch.setattr(support, "one_tree_difference", again)
    HFTarget(model)


@arch
@pytest.mark.usefixtures("empty_table")
def test_an_unknown_type_that_is_wrong_on_one_tree_is_refused_with_the_figure(monkeypatch):
    monkeypatch.setattr(support, "REFUSED_TYPES", {})
    if "dory" in model_types():
        with pytest.raises(UnsupportedModelError, match=r"model type 'dory': its logits on a tree .* differ by"):
            HFTarget(zoo_model("dory"))
    with (
        MUTANTS[1].inject(),
        pytest.raises(UnsupportedModelError, match=r"model type 'llama': its logits on a tree .* differ by"),
    ):
        HFTarget(tiny_llama(0))


@arch
def test_another_positional_setting_than_the_verified_one_is_tried():
    model = zoo_model("falcon", alibi=True)
    with pytest.raises(UnsupportedModelError, match="model type 'falcon': "):
        HFTarget(model)
    assert HFTarget(zoo_model("falcon")).attention == "dense"


@arch
def test_a_type_that_the_table_refuses_is_refused_without_trying(monkeypatch):
    monkeypatch.setattr(support, "one_tree_difference", None)
    with pytest.raises(UnsupportedModelError, match=r"model type 'moshi': .* parts from the model's plain forward"):
        HFTarget(zoo_model("moshi"))


@unit
def test_a_type_that_cannot_be_built_says_why():
    for model_type in support.verified_table()["not_built"]:
        if model_type in model_types():
            with pytest.raises(NotBuildable, match=r"\w"):
                zoo_model(model_type)


# --- what only looks like a verified type -----------------------------------------------------------------------------


@arch
@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_an_encoder_is_refused_with_the_way_out(model_type):
    with pytest.raises(UnsupportedModelError, match=f"model type '{model_type}': it is an encoder.*is_decoder=True"):
        HFTarget(zoo_model(model_type, is_decoder=False))


@arch
def test_a_class_of_ones_own_under_a_verified_type_is_tried(monkeypatch):
    class Faithful(LlamaForCausalLM):
        pass

    class Forgetful(LlamaForCausalLM):
        @functools.wraps(LlamaForCausalLM.forward)
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(support, "_TRIED", {})
    for kind, is_exact in ((Faithful, True), (Forgetful, False)):
        model = tiny_llama(0)
        model.__class__ = kind
        if is_exact:
            HFTarget(model)
        else:
            with pytest.raises(UnsupportedModelError, match="logits on a tree are not those of plain forwards"):
                HFTarget(model)
    assert len(support._TRIED) == 2


@arch
@pytest.mark.parametrize("model_type", ["deepseek_v3", "falcon"])
def test_an_attention_that_is_not_exact_for_a_type_is_refused_at_construction(model_type):
    with pytest.raises(UnsupportedModelError, match=f"model type '{model_type}': not exact with attention 'per_seq"):
        HFTarget(zoo_model(model_type), attention="per_sequence")


@arch
@pytest.mark.usefixtures("empty_table")
def test_an_unknown_type_of_a_short_model_is_tried_within_its_length():
    HFTarget(tiny_llama(0, max_position_embeddings=16))
    HFTarget(tiny_llama(0, max_position_embeddings=4))


@unit
def test_infinities_are_equal_to_themselves_only():
    inf = float("inf")
    for got, expected, error in (
        ([-inf, 1.0], [-inf, 1.0], 0.0),
        ([-inf, 1.0], [0.0, 1.0], inf),
        ([0.0, 1.0], [-inf, 1.0], inf),
        ([float("nan"), 1.0], [0.0, 1.0], inf),
        ([0.5, 1.0], [0.0, 1.0], 0.5),
    ):
        difference = Difference()
        difference.add(torch.tensor([got]), torch.tensor([expected]))
        assert difference.error == error
        assert difference.scale == 1.0


@arch
def test_threads_take_turns_and_leave_the_model_as_it_was():
    model = tiny_llama(1)
    prompts = [[1, 2, 3], [9, 8], [4, 4, 4, 4], [60]]
    expected = [greedy_text(model, prompt, 20) for prompt in prompts]
    decoders = [TreeDecoder(model, "random") for _ in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            texts = pool.map(lambda one, prompt: one.generate(prompt, max_new_tokens=20).ids[0], decoders, prompts)
            assert list(texts) == expected
    assert model.config._attn_implementation == "sdpa"
