"""Real-life forms of one model: quantised, adapted, compiled, offloaded, in half precision, with odd settings.

Each form is either exact against its own plain decoding, transformers' ``generate`` of the same object, or refused at
construction with the reason. Packages outside the dev extra are skipped where they are missing.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference import greedy_text, path_tokens, random_prompts
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from treepass.compare import NEAR_TIE, first_difference
from treepass.errors import UnsupportedModelError
from treepass.generate import TreeDecoder
from treepass.target import HFTarget, prefill
from treepass.testing import FunctionDrafter, random_tree, tiny_llama
from treepass.tree import DraftTree, Forest

pytestmark = pytest.mark.arch

VOCAB = 64
MAX_NEW_TOKENS = 40
PROMPTS = random_prompts(4, VOCAB, seed=5)

FLOAT32_SHARE = 2e-5
"""Rounding of float32 in a pass, as a share of the logits; measured: 1e-7 to 8e-6."""

HALF_SHARE = {torch.bfloat16: 0.06, torch.float16: 0.015}
"""By dtype: the rounding of a pass as a share of the logits; measured: 0.025 and 0.006."""


def tiny(dtype: torch.dtype = torch.float64, **options: Any) -> LlamaForCausalLM:
    return tiny_llama(10, vocab_size=VOCAB, dtype=dtype, **options)


def plain_text(model: Any, prompt: list[int]) -> list[int]:
    return greedy_text(model, prompt, MAX_NEW_TOKENS)


def knowing_drafter(text: list[int], prompt_length: int) -> FunctionDrafter:
    """Drafts the true continuation within a random tree, so that rows of the walk have neighbours of every kind."""
    rng = np.random.default_rng(len(text) + prompt_length)

    def tree_of(session, plan, depth):
        root, done = session.ids[-1], len(session.ids) - prompt_length
        noise = random_tree(rng, root, nodes=10, max_depth=depth, vocab_size=VOCAB)
        return DraftTree.merge([noise, DraftTree.chain([root, *text[done : done + min(depth, 4)]])])

    return FunctionDrafter(tree_of)


def check_texts(model: Any, plain: Any = None, margin: float = 0.0) -> None:
    """Texts equal those of ``generate``, up to ties of two tokens whose logits differ by no more than ``margin``.

    Args:
        model: what the decoder is given.
        plain: whose ``generate`` is the reference; the same object if None.
        margin: see above; 0 asks for equality.
    """
    plain = model if plain is None else plain
    own = TreeDecoder(model, nodes=16)
    accepted = 0
    for prompt in PROMPTS:
        expected = plain_text(plain, prompt)
        knowing = TreeDecoder(model, knowing_drafter(expected, len(prompt)), nodes=16)
        for decoder in (own, knowing):
            output = decoder.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
            accepted += output.report.accepted
            if margin:
                difference = first_difference(plain, prompt, expected, output.ids[0])
                assert difference is None or difference.margin <= margin
            else:
                assert output.ids == [expected]
    # A drafter whose nodes are never accepted would make this test say nothing.
    assert accepted > 2 * MAX_NEW_TOKENS


@torch.no_grad()
def tree_error(model: Any, trees: int = 3) -> float:
    """The largest difference of a node's logits from those of a plain forward over its path, as a share of these."""
    rng = np.random.default_rng(0)
    target = HFTarget(model)
    worst = 0.0
    for _ in range(trees):
        ids = rng.integers(VOCAB, size=int(rng.integers(2, 12))).tolist()
        cache = target.new_cache()
        prefill(target, cache, ids[:-1])
        tree = random_tree(rng, ids[-1], nodes=24, max_depth=5, vocab_size=VOCAB)
        logits = target.forward(Forest((tree,), (cache.length,)), [cache]).logits.double()
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for row in range(tree.rows):
            path = torch.tensor([ids + path_tokens(tokens, parents, row)])
            expected = model(path, use_cache=False, return_dict=True).logits[0, -1].double()
            worst = max(worst, float((logits[row] - expected).abs().max() / expected.abs().max()))
            assert not math.isnan(worst)
    return worst


def check_exact(model: Any, tolerance: float = 1e-10) -> None:
    """Logits of trees and texts are those of the same object alone."""
    assert tree_error(model) < tolerance
    check_texts(model)


def check_short_text(model: Any, plain: Any) -> None:
    """For forms whose passes are slow."""
    expected = greedy_text(plain, PROMPTS[0], 12)
    assert TreeDecoder(model).generate(PROMPTS[0], max_new_tokens=12).ids == [expected]


def check_refused(model: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"cannot decode trees with model type '.*': .*(?:{reason})"):
        TreeDecoder(model)


def texts_differ(a: Any, b: Any) -> bool:
    """Whether two models write different texts: without this a form that does nothing would pass."""
    return [plain_text(a, prompt) for prompt in PROMPTS] != [plain_text(b, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A saved model of four layers, float64."""
    path = tmp_path_factory.mktemp("model")
    tiny(layers=4).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folder32(tmp_path_factory) -> str:
    """A saved model wide enough for groups of 32 and 64 weights, float32."""
    path = tmp_path_factory.mktemp("model32")
    wide().save_pretrained(path)
    return str(path)


def wide(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return tiny(dtype, hidden_size=64)


# --- weights and activations in 8 and 4 bits --------------------------------------------------------------------------

QUANTISED_MARGIN = NEAR_TIE[torch.bfloat16]
"""Activations that are rounded to 8 bits on the way turn the last bit of float32 into a step of that rounding: such a
model is as coarse as one in bfloat16, whatever its dtype."""


def torchao_weights(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int8 in groups": lambda: quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32)),
        "int4 in groups": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
        "float8": lambda: quantization.Float8WeightOnlyConfig(),
    }[name]()


TORCHAO_WEIGHTS = ("int8", "int8 in groups", "int4 in groups", "float8")


@pytest.mark.parametrize("name", TORCHAO_WEIGHTS)
def test_torchao_weights_from_pretrained_are_exact(folder32, name):
    from transformers import TorchAoConfig

    config = TorchAoConfig(torchao_weights(name))
    model = AutoModelForCausalLM.from_pretrained(folder32, quantization_config=config, dtype=torch.float32)
    assert texts_differ(model, wide())
    check_exact(model, FLOAT32_SHARE)


@pytest.mark.parametrize("name", TORCHAO_WEIGHTS)
def test_torchao_weights_in_place_are_exact(name):
    # quantize_ takes the output head too, which prefill calls with no rows.
    config = torchao_weights(name)
    from torchao.quantization import quantize_

    model = wide()
    quantize_(model, config)
    assert texts_differ(model, wide())
    check_exact(model, FLOAT32_SHARE)


def torchao_activations(granularity: str) -> LlamaForCausalLM:
    quantization = pytest.importorskip("torchao.quantization")
    model = wide()
    scale = {"row": quantization.PerRow, "tensor": quantization.PerTensor}[granularity]()
    quantization.quantize_(model.model, quantization.Int8DynamicActivationInt8WeightConfig(granularity=scale))
    return model


def test_torchao_activations_scaled_per_tensor_are_refused():
    check_refused(torchao_activations("tensor"), "activations")


def test_torchao_activations_scaled_per_row_part_at_near_ties_only():
    check_texts(torchao_activations("row"), margin=QUANTISED_MARGIN)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_of_torch_itself_is_refused():
    # One scale for the whole tensor, so that a row's numbers depend on its neighbours.
    model = torch.ao.quantization.quantize_dynamic(wide(), {torch.nn.Linear}, dtype=torch.qint8)
    check_refused(model.eval(), "activations")


@pytest.mark.parametrize("weights", ["int8", "int4", "int2", "float8"])
def test_quanto_weights_are_exact(folder32, weights):
    pytest.importorskip("optimum.quanto")
    from transformers import QuantoConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder32, quantization_config=QuantoConfig(weights=weights), dtype=torch.float32
    )
    check_exact(model, FLOAT32_SHARE)


@pytest.mark.parametrize("activations", [None, "qint8"])
def test_quanto_in_place_is_exact(activations):
    quanto = pytest.importorskip("optimum.quanto")
    model = wide()
    quanto.quantize(model, weights=quanto.qint8, activations=activations and getattr(quanto, activations))
    if activations:  # scales are constants once they are calibrated
        with torch.no_grad(), quanto.Calibration():
            for prompt in random_prompts(8, VOCAB, seed=1):
                model(torch.tensor([prompt]))
    quanto.freeze(model)
    model.eval()  # the new layers are in training mode
    if activations:
        check_texts(model, margin=QUANTISED_MARGIN)
    else:
        check_exact(model, FLOAT32_SHARE)


@pytest.mark.parametrize("bits", [8, 4])
def test_hqq_layers_are_exact(bits):
    hqq = pytest.importorskip("hqq.core.quantize")
    model = wide()
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=32)
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            quantised = hqq.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
            setattr(model.model.get_submodule(parent), child, quantised)
    check_exact(model.eval(), FLOAT32_SHARE)


def bitsandbytes_model(folder: str, **settings: Any) -> LlamaForCausalLM:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def test_bitsandbytes_8_bit_with_outlier_columns_is_refused(folder32):
    # Columns in which any row of the pass exceeds the threshold are computed apart, for all rows.
    check_refused(bitsandbytes_model(folder32, load_in_8bit=True), "activations")


def test_bitsandbytes_8_bit_without_outliers_parts_at_near_ties_only(folder32):
    model = bitsandbytes_model(folder32, load_in_8bit=True, llm_int8_threshold=0.0)
    check_texts(model, margin=QUANTISED_MARGIN)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit_parts_at_near_ties_only(folder32, kind):
    # On the CPU its kernel rounds activations more coarsely than float32.
    model = bitsandbytes_model(folder32, load_in_4bit=True, bnb_4bit_quant_type=kind)
    assert tree_error(model) < HALF_SHARE[torch.bfloat16]
    check_texts(model, margin=QUANTISED_MARGIN)


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(config: Any, model: LlamaForCausalLM | None = None) -> Any:
    """A PeftModel whose adapter has random weights: as made, most adapters change nothing."""
    import peft

    return scrambled(peft.get_peft_model(model or tiny(), config)).eval()


@torch.no_grad()
def scrambled(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "ia3_", "prompt", "adaption_")):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def lora(**settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(options | settings))


LORA = {
    "lora": {},
    "dora": {"use_dora": True},
    "lora on both embeddings": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("name", LORA)
def test_an_attached_lora_is_exact(name):
    model = adapted(lora(**LORA[name]))
    assert texts_differ(model, tiny())
    check_texts(model)
    # The model below is the adapted one as well.
    check_exact(model.get_base_model())
    check_texts(model, plain=model.get_base_model())


def test_an_adapter_that_scales_is_exact():
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    model = adapted(config)
    assert texts_differ(model, tiny())
    check_texts(model)


def test_an_adapter_may_be_switched_between_two_requests():
    model = adapted(lora())
    model.add_adapter("other", lora(target_modules=["k_proj"]))
    scrambled(model).eval()
    decoder = TreeDecoder(model)
    texts = []
    for name in ("default", "other"):
        model.set_adapter(name)
        texts.append(plain_text(model, PROMPTS[0]))
        assert decoder.generate(PROMPTS[0], max_new_tokens=MAX_NEW_TOKENS).ids == [texts[-1]]
    with model.disable_adapter():
        texts.append(plain_text(tiny(), PROMPTS[0]))
        assert decoder.generate(PROMPTS[0], max_new_tokens=MAX_NEW_TOKENS).ids == [texts[-1]]
    assert len({tuple(text) for text in texts}) == 3


def test_a_merged_adapter_is_exact():
    model = adapted(lora())
    merged = copy.deepcopy(model).merge_and_unload()
    assert isinstance(merged, LlamaForCausalLM)
    assert texts_differ(merged, tiny())
    check_exact(merged)


def test_an_injected_adapter_is_exact():
    # What transformers' own add_adapter and load_adapter do.
    config = lora()
    import peft

    model = scrambled(peft.inject_adapter_in_model(config, tiny())).eval()
    assert texts_differ(model, tiny())
    check_exact(model)


def test_an_adapter_of_transformers_own_is_exact(tmp_path):
    config = lora(task_type=None)
    model = tiny()
    try:
        model.add_adapter(config)
    except ValueError as error:
        pytest.skip(str(error))  # each transformers asks for a peft of its time
    scrambled(model).eval()
    assert texts_differ(model, tiny())
    check_exact(model)
    model.save_pretrained(tmp_path)
    loaded = tiny()
    loaded.load_adapter(str(tmp_path))
    check_texts(loaded.eval(), plain=model)
    model.disable_adapters()
    check_texts(model, plain=tiny())


PROMPT_LEARNING = {
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
}


@pytest.mark.parametrize("name", PROMPT_LEARNING)
def test_learned_prompts_are_refused(name):
    # Rows of their own before the text, or within every attention: not the model below, whose text is another one.
    peft = pytest.importorskip("peft")
    config = getattr(peft, name)(task_type="CAUSAL_LM", **PROMPT_LEARNING[name])
    check_refused(adapted(config), "adapter|prompt")


def test_a_lora_that_starts_within_the_text_is_refused():
    # Activated LoRA: applied from the last invocation on, which PeftModel looks for in the ids of the whole text.
    config = lora(alora_invocation_tokens=[1, 2])
    check_refused(adapted(config), "adapter")


def test_an_adapter_whose_dropout_is_on_is_refused():
    # get_peft_model adds modules in training mode to a model in evaluation mode.
    config = lora(lora_dropout=0.5)
    import peft

    model = peft.get_peft_model(tiny(), config)
    assert not model.get_base_model().training
    check_refused(model.get_base_model(), "training mode")
    check_refused(model, "training mode")
    check_texts(model.eval())


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled_module(backend: str) -> Any:
    return torch.compile(tiny(torch.float32), backend=backend)


def compiled_forward(backend: str) -> Any:
    model = tiny(torch.float32)
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def compiled_in_place(backend: str) -> Any:
    model = tiny(torch.float32)
    model.compile(backend=backend)
    return model


def compiled_layers(backend: str) -> Any:
    model = tiny(torch.float32)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


COMPILED = [compiled_module, compiled_forward, compiled_in_place, compiled_layers]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("form", COMPILED, ids=lambda form: form.__name__)
def test_a_compiled_model_is_exact(form: Callable[[str], Any]):
    model = form("eager")
    # Every number of rows may compile the graph again, up to a limit and then no more; texts stay the same.
    # Plain passes and passes over trees take turns in one compiled graph.
    assert tree_error(model, trees=1) < FLOAT32_SHARE
    check_short_text(model, plain=tiny(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("form", COMPILED, ids=lambda form: form.__name__)
def test_a_model_compiled_to_machine_code_is_exact(form: Callable[[str], Any]):
    model = form("inductor")
    check_texts(model, plain=tiny(torch.float32))
    assert tree_error(model) < FLOAT32_SHARE


# --- spread over devices, or on none ----------------------------------------------------------------------------------

PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(4)))
SPREAD = {
    "all on the cpu": {"": "cpu"},
    "layers on disk": {"model.layers.1": "disk", "model.layers.3": "disk"},
    "input embeddings on disk": {"model.embed_tokens": "disk"},
    "output head on disk": {"lm_head": "disk"},
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("name", SPREAD)
def test_a_model_spread_over_cpu_and_disk_is_exact(folder, tmp_path, name):
    places = SPREAD[name] if "" in SPREAD[name] else dict.fromkeys(PARTS, "cpu") | SPREAD[name]
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=str(tmp_path))
    assert any(parameter.is_meta for parameter in model.parameters()) == ("disk" in places.values())
    target = HFTarget(model)
    assert target.device == torch.device("cpu")
    assert target.dtype == torch.float64
    # Reading a layer for every pass is slow, so that this compares fewer nodes.
    assert tree_error(model, trees=1) < 1e-10
    check_short_text(model, plain=tiny(layers=4))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_exact(tmp_path, where):
    import accelerate

    model = tiny()
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert model.device.type == "meta"
    check_texts(model, plain=tiny())


def with_torch() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny().config)


def with_accelerate() -> LlamaForCausalLM:
    import accelerate

    with accelerate.init_empty_weights():
        return LlamaForCausalLM(tiny().config)


def without_a_head() -> LlamaForCausalLM:
    model = tiny()
    model.lm_head.to("meta")
    return model


@pytest.mark.parametrize("make", [with_torch, with_accelerate, without_a_head], ids=lambda make: make.__name__)
def test_a_model_without_its_weights_is_refused(make):
    # It would decode, from whatever lies in uninitialised memory.
    check_refused(make().eval(), "meta device")


# --- modes and settings of a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "model", "model.layers.1.self_attn", "model.layers.0.mlp"])
def test_training_mode_of_any_part_is_refused(part):
    model = tiny()
    model.get_submodule(part).train()
    check_refused(model, "training mode")


def test_gradient_checkpointing_is_exact_in_evaluation_mode():
    model = tiny()
    model.gradient_checkpointing_enable()
    check_exact(model)
    model.train()  # here it would also switch the cache off
    check_refused(model, "training mode")


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), ("output_hidden_states", True), ("torchscript", True), ("attention_dropout", 0.5)],
)
def test_settings_of_the_config_that_change_no_number_change_nothing(name, value):
    model = tiny()
    setattr(model.config, name, value)
    check_exact(model)
    assert getattr(model.config, name) == value


def test_attention_weights_may_be_asked_for():
    model = tiny(attn="eager")
    model.config.output_attentions = True
    check_exact(model, 1e-6)  # eager attention rounds its softmax to float32
    assert model(torch.tensor([[1, 2]])).attentions is not None


def test_a_model_that_returns_tuples_is_exact_or_refused():
    # transformers' Llama cannot run so itself; were it repaired, texts would have to be the same.
    model = tiny()
    model.config.return_dict = False
    try:
        plain_text(model, PROMPTS[0])
    except AttributeError:
        check_refused(model, "return_dict")
    else:
        check_texts(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_models_own_attention_is_left_in_place(attention):
    model = tiny(attn=attention)
    check_exact(model, 1e-6)
    assert model.config._attn_implementation == attention


def test_flex_attention_is_left_in_place():
    model = tiny(torch.float32, attn="flex_attention")
    expected = plain_text(tiny(torch.float32), PROMPTS[0])
    assert TreeDecoder(model).generate(PROMPTS[0], max_new_tokens=MAX_NEW_TOKENS).ids == [expected]
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "static"),
        ("cache_implementation", "dynamic"),
        ("cache_implementation", "offloaded"),
        ("use_cache", False),
        ("prompt_lookup_num_tokens", 3),
        ("prefill_chunk_size", 4),
        ("output_scores", True),
        ("return_dict_in_generate", True),
        ("max_length", 20),
        ("renormalize_logits", True),
        ("do_sample", True),
    ],
)
def test_settings_of_generate_that_change_no_text_change_nothing(name, value):
    model = tiny()
    setattr(model.generation_config, name, value)
    check_texts(model, plain=tiny())


@pytest.mark.parametrize(("name", "value"), [("encoder_repetition_penalty", 1.5), ("encoder_no_repeat_ngram_size", 1)])
def test_settings_of_the_models_own_apply(name, value):
    model = tiny()
    setattr(model.generation_config, name, value)
    check_texts(model)
    assert texts_differ(model, tiny())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "quantized"),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("token_healing", True),
        ("force_words_ids", [[3]]),
        ("num_beams", 3),
    ],
)
def test_settings_that_mean_another_way_of_decoding_are_refused_by_name(name, value):
    model = tiny()
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported".replace("[", r"\[").replace("]", r"\]")):
        TreeDecoder(model).generate(PROMPTS[0], max_new_tokens=4)


# --- wrapped ----------------------------------------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, Wrapper], ids=lambda wrap: wrap.__name__)
def test_a_wrapped_model_is_refused(wrap):
    check_refused(wrap(tiny()).eval(), "not a transformers model")


def test_a_forward_that_is_wrapped_is_exact_or_refused():
    model, other = tiny(), tiny()
    model.forward = functools.wraps(model.forward)(functools.partial(LlamaForCausalLM.forward, model))
    check_exact(model)
    other.forward = lambda *args, **kwargs: LlamaForCausalLM.forward(other, *args, **kwargs)
    check_refused(other, "takes no")


def test_hooks_run():
    model = tiny()
    calls = []
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: calls.append(1) or -output)
    assert texts_differ(model, tiny())
    check_exact(model)
    assert calls


def test_a_model_made_in_inference_mode_is_exact():
    with torch.inference_mode():
        model = tiny()
    check_exact(model)


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_SHARE, ids=str)
def test_half_precision_parts_at_near_ties_only(dtype):
    model = tiny(dtype)
    assert HFTarget(model).dtype == dtype
    assert tree_error(model) < HALF_SHARE[dtype]
    check_texts(model, margin=NEAR_TIE[dtype])


def test_a_wider_head_parts_at_near_ties_only():
    model = tiny(torch.bfloat16)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    assert tree_error(model) < HALF_SHARE[torch.bfloat16]
    check_texts(model, margin=NEAR_TIE[torch.bfloat16])


def test_autocast_parts_at_near_ties_only():
    model = tiny(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
        assert tree_error(model) < HALF_SHARE[torch.bfloat16]
        check_texts(model, margin=NEAR_TIE[torch.bfloat16])
