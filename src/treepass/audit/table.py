"""The table of model types: every causal language model of transformers, tiny and random, put through the audit.

``python -m treepass.audit.table --other older.json`` measures it anew and writes ``verified.json``, which the package
reads, and ``docs/models.md``, which people read; ``older.json`` is what ``--table older.json`` wrote before with the
oldest transformers that is supported.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treepass import support
from treepass.audit.model import ERROR_PUT_IN, EXACT, REFUSED, UNTESTED, WRONG, Check, audit_model
from treepass.testing import NoDowncasts
from treepass.testing.zoo import NotBuildable, model_types, zoo_model

SCHEMA = "treepass.models/1"
TOLERANCE = 1e-9
"""Largest difference of an exact type in float64, as a share of the largest logit."""

VERSIONS = ["5.18.0", "5.24.0"]
"""Oldest and newest transformers that the table was measured with."""

PARTS = frozenset({"musicgen", "musicgen_melody", "trocr"})
"""Decoders of encoder-decoders whose configurations do not say so."""

NOT_BUILT = "not built"
VERDICTS = (EXACT, REFUSED, UNTESTED, NOT_BUILT)
DECODER, RECURRENT, PART = "decoder", "recurrent", "part of an encoder-decoder"


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about a model type.

    Attributes:
        model_type: the key of transformers' mapping.
        model_class: the class that AutoModelForCausalLM gives for it.
        verdict: ``exact``, ``refused``, ``untested`` or ``not built``.
        kind: ``decoder`` for decoder-only models with nothing but attention, ``recurrent`` or ``part of an
            encoder-decoder``.
        reason: why it is not exact.
        attention: implementations that are exact.
        positions: settings that the verdict holds for, see ``support.positional_features``.
        noticed: errors put in on purpose that the comparison has noticed; every one that changed anything.
        error: the largest difference, as a share of the largest logit.
    """

    model_type: str
    model_class: str
    verdict: str
    kind: str
    reason: str = ""
    attention: tuple[str, ...] = ()
    positions: dict[str, Any] = field(default_factory=dict)
    noticed: tuple[str, ...] = ()
    error: float = 0.0


def measure(model_type: str) -> Row:
    """Builds a tiny random model of the type and audits it in float64.

    What the audit finds wrong is ``refused`` here, with what was found, and the table makes it so for users.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        model = zoo_model(model_type)
    except NotBuildable as reason:
        return Row(model_type, model_class, NOT_BUILT, _kind(model_type), str(reason).removeprefix(f"{model_type}: "))
    audit = audit_model(model, tolerance=TOLERANCE, precision=NoDowncasts)
    kind = RECURRENT if support.RECURRENT in audit.reason else _kind(model_type)
    if audit.verdict != EXACT:
        verdict = REFUSED if audit.verdict == WRONG else audit.verdict
        return Row(model_type, model_class, verdict, kind, audit.reason.removeprefix("trees, dense: "))
    return Row(
        model_type,
        model_class,
        EXACT,
        kind,
        attention=tuple(audit.attention),
        positions=support.positional_features(model.config.get_text_config()),
        noticed=tuple(check.name.removeprefix(ERROR_PUT_IN) for check in audit.checks if _is_noticed(check)),
        error=max(check.error or 0.0 for check in audit.checks if check.name.startswith("trees")),
    )


def common(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The table with only those implementations that another one, of another version, has found exact too.

    Raises:
        ValueError: if a type is exact in one and something else in the other.
    """
    exact = dict(table["exact"])
    for model_type, entry in other["exact"].items():
        if model_type not in exact:
            raise ValueError(f"{model_type} is exact in one version only")
        shared = [name for name in exact[model_type]["attention"] if name in entry["attention"]]
        exact[model_type] = {**exact[model_type], "attention": shared}
    both = {name for verdict in VERDICTS[1:] for name in other[verdict.replace(" ", "_")]} & set(exact)
    if both:
        raise ValueError(f"{', '.join(sorted(both))} exact in one version only")
    return {**table, "exact": exact}


def table_of(rows: Iterable[Row]) -> dict[str, Any]:
    """The table as ``verified.json`` holds it; figures that vary between machines are left out."""
    by_verdict = {verdict: [row for row in rows if row.verdict == verdict] for verdict in VERDICTS}
    return {
        "schema": SCHEMA,
        "transformers": VERSIONS,
        "exact": {
            row.model_type: {
                "class": row.model_class,
                "attention": list(row.attention),
                "positions": row.positions,
                "noticed": list(row.noticed),
            }
            for row in by_verdict[EXACT]
        },
        **{
            verdict.replace(" ", "_"): {
                row.model_type: {"class": row.model_class, "kind": row.kind, "reason": row.reason}
                for row in by_verdict[verdict]
            }
            for verdict in VERDICTS[1:]
        },
    }


def render(table: dict[str, Any]) -> str:
    """The table as a page."""
    exact, refused, untested, not_built = (table[verdict.replace(" ", "_")] for verdict in VERDICTS)
    decoders = [entry for entry in refused.values() if entry["kind"] == DECODER]
    reasons = Counter(entry["reason"] for entry in refused.values())
    counted = len(exact) + len(decoders) + len(untested)
    how = f"""Written by `python -m treepass.audit.table`, and compared with a new measurement by the tests. For every
        model type of `AutoModelForCausalLM` in transformers {VERSIONS[-1]} a tiny random model is built, with every
        kind of layer that the architecture has and every window, cap and scale within reach of 40 tokens. Every row of
        random tree passes, of one sequence and of three at once, is compared with a plain forward over its whole path
        in float64. *Exact* means: no logit differs by more than {TOLERANCE:.0e} of the largest; the rows kept in the
        cache are those of a fresh prefill; greedy texts are those of `generate`; and the same comparison fails as soon
        as an error is put in (row index for depth, a visible sibling, a window left off or counted in rows). Where a
        model rounds to float32 on purpose (norms, routers) that is switched off for the comparison."""
    found = f"""**{len(exact)} exact, {len(refused)} refused, {len(untested)} untested, {len(not_built)} not
        built.** What was found wrong is refused. Of the {counted} decoder-only types with nothing but attention that a
        tiny configuration can build {len(exact) / counted:.0%} are exact. A model whose type or class is not here is
        tried on one tree when it is wrapped, and refused if its logits are not those of plain forwards."""
    lines = [
        "# Which models",
        "",
        *wrap(" ".join(how.split()), 120),
        "",
        *wrap(" ".join(found.split()), 120),
        "",
        "## Exact",
        "",
        "| model type | class | attention | errors noticed |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {entry['class']} | {', '.join(entry['attention'])} | {', '.join(entry['noticed'])} |"
            for name, entry in exact.items()
        ),
        "",
        "## Refused",
        "",
        "| reason | model types |",
        "|---|---|",
        *(
            f"| {reason} | {', '.join(f'`{name}`' for name, entry in refused.items() if entry['reason'] == reason)} |"
            for reason, _ in reasons.most_common()
        ),
        "",
    ]
    for title, entries in (("Untested", untested), ("Not built", not_built)):
        if entries:
            lines += [f"## {title}", "", "| model type | why |", "|---|---|"]
            lines += [f"| `{name}` | {entry['reason']} |" for name, entry in entries.items()] + [""]
    return "\n".join(lines)


def _is_noticed(check: Check) -> bool:
    return check.name.startswith(ERROR_PUT_IN) and check.verdict == EXACT


def _kind(model_type: str) -> str:
    if model_type in PARTS:
        return PART
    return PART if getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False) else DECODER


def main() -> None:
    """Measures all types and writes both files."""
    package = Path(support.__file__).with_name("verified.json")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=Path("docs/models.md"), help="page to write")
    parser.add_argument("--table", type=Path, default=package, help="table to write")
    parser.add_argument("--other", type=Path, help="table of another version of transformers, to hold in common")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model_type in model_types():
        rows.append(measure(model_type))
        sys.stderr.write(f"{model_type:26} {rows[-1].verdict:10} {rows[-1].reason}\n")
    table = table_of(rows)
    if options.other:
        table = common(table, json.loads(options.other.read_text(encoding="utf-8")))
    options.table.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    options.docs.write_text(render(table), encoding="utf-8")


if __name__ == "__main__":
    main()
