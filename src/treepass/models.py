"""Aliases and loading: from a name to a model and its tokenizer.

torch and transformers are imported when something is loaded, so that the command line answers ``--help`` at once.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from treepass import embedded
from treepass.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2-135m"
ALIASES = (DEFAULT_MODEL,)
DTYPES = ("float32", "bfloat16", "float16")

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode with its tokenizer, and where both came from.

    Attributes:
        model: The causal language model, on ``device``.
        tokenizer: Its tokenizer.
        name: The alias, folder or hub id that was asked for.
        dtype: The type of the weights.
        device: Where the weights are.
        source: Where the weights came from, in words.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    dtype: "torch.dtype"
    device: "torch.device"
    source: str


def load(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: Union[str, "torch.dtype"] = "auto",
    device: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: An alias (see ``ALIASES``), a folder written by ``save_pretrained``, or a hub id. An alias wins
            over a folder of the same name; write ``./name`` for the folder. The default model needs no network.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, a ``torch.dtype``, or ``"auto"``: see ``auto_dtype``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, …; None takes CUDA where there is a device, else the CPU.
        on_progress: Receives one line of text when something starts that takes seconds.

    Returns:
        The model in eval mode, its tokenizer and where they came from.

    Raises:
        ModelLoadError: The model, its weights or its tokenizer cannot be found or read.
        UnsupportedModelError: The model type is no decoder-only language model.
        ValueError: An argument is malformed, or the device is not there.
    """
    name = os.fspath(name_or_path)
    if not name.strip():
        raise ValueError(f"name_or_path must name a model, got {name!r}")
    on = pick_device(device)
    precision = _parse_dtype(dtype, on)
    place = _locate(name, on_progress)

    from transformers import AutoTokenizer

    with embedded.quiet_transformers(warnings=name not in ALIASES):
        config = _read_config(name, place)
        tokenizer = _attempt("tokenizer", name, lambda: AutoTokenizer.from_pretrained(place, trust_remote_code=False))
        model = _read_weights(name, place, config, precision)
    return LoadedModel(model.to(on).eval(), tokenizer, name, precision, on, _describe(name, place, config))


def pick_device(device: str | None = None) -> "torch.device":
    """The device of that name, or by default CUDA where there is a device, else the CPU.

    Raises:
        ValueError: There is no such device.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)  # some names are well-formed but have no device or no driver behind them
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device must name a device of this machine, got {device!r}: {_first_line(error)}") from error
    return torch.device(device)


def auto_dtype(device: "torch.device") -> "torch.dtype":
    """bfloat16 where ``device`` multiplies it natively, else float32.

    Natively means: a CPU with AVX-512 BF16, AMX BF16 or Arm BF16 instructions, as reported by
    ``torch.cpu.get_capabilities`` (a torch that lacks it counts as none), and CUDA from compute capability 8.0 on.
    Emulated bfloat16 is slower than float32. Any other kind of device gets float32.
    """
    import torch

    native = False
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return torch.bfloat16 if native else torch.float32


def _parse_dtype(dtype: Union[str, "torch.dtype"], device: "torch.device") -> "torch.dtype":
    import torch

    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype == "auto":
        return auto_dtype(device)
    if isinstance(dtype, str) and dtype in DTYPES:
        return getattr(torch, dtype)
    raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, DTYPES))} or a floating torch.dtype, got {dtype!r}")


def _locate(name: str, on_progress: Callable[[str], None] | None) -> str:
    """What ``from_pretrained`` is given: the folder of an alias, an existing folder, or a hub id as it stands."""
    if name in ALIASES:
        return str(embedded.prepare(on_progress))
    path = Path(name).expanduser()
    # A hub id has at most one slash and does not begin like a path.
    is_path = path.exists() or path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1
    if not is_path:
        near = [] if "/" in name else difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.8)
        if near:  # a mistyped alias: not worth asking the hub
            raise ModelLoadError(f"unknown model {name!r}; did you mean {near[0]!r}?")
        return name
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ModelLoadError(f"model folder {name!r} {found}; give a folder written by save_pretrained")
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"model folder {name!r} holds no config.json; give a folder written by save_pretrained")
    return str(path)


def _read_config(name: str, place: str) -> "PretrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _attempt("config", name, lambda: AutoConfig.from_pretrained(place, trust_remote_code=False))
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model of this type"
    else:
        return config
    raise UnsupportedModelError(f"{name!r} has model type {config.model_type!r}: {reason}; give a decoder-only model")


def _read_weights(name: str, place: str, config: "PretrainedConfig", dtype: "torch.dtype") -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    model, found = _attempt(
        "weights",
        name,
        lambda: AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        ),
    )
    # transformers fills what a checkpoint lacks with random numbers and carries on.
    if found["missing_keys"]:
        lacking = sorted(found["missing_keys"])
        raise ModelLoadError(
            f"the weights of {name!r} lack {len(lacking)} tensors of the model, {lacking[0]} among them; "
            "fetch or save the checkpoint again"
        )
    return model


def _attempt(what: str, name: str, read: Callable[[], Loaded]) -> Loaded:
    try:
        return read()
    except Exception as error:  # a damaged file raises anything here, from KeyError to a bare Exception of tokenizers
        raise ModelLoadError(f"cannot load the {what} of {name!r}: {_first_line(error)}; {_advice(name)}") from error


def _advice(name: str) -> str:
    if name in ALIASES:
        return f"remove {embedded.model_folder()} to have it prepared anew"
    if Path(name).expanduser().is_dir():
        return "give a folder with config, weights and tokenizer, as save_pretrained writes them"
    return f"check the id and the network, or give a folder or an alias ({', '.join(ALIASES)})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".;:") if lines else ""
    return (text if len(text) <= 200 else text[:199] + "…") or type(error).__name__


def _describe(name: str, place: str, config: Any) -> str:
    if name in ALIASES:
        return f"{embedded.GGUF_FILE} of {embedded.PACKAGE} {embedded.PACKAGE_VERSION}, dequantised in {place}"
    if Path(place).is_dir():
        return f"folder {place}"
    commit = getattr(config, "_commit_hash", None)
    return f"hub {name}" + (f" at {commit}" if commit else "")
