"""Records as lines of JSON, and reports that add up."""

import io
import json
import math
from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepass.generate import TreeDecoder
from treepass.record import SCHEMA, PassRecord, PassTimes, Report, write_records
from treepass.testing import tiny_llama

unit = pytest.mark.unit
arch = pytest.mark.arch

PARTS = ("draft", "pass", "verify", "commit", "other")


def as_lists(value):
    """Tuples as the lists that JSON knows."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, tuple) else value


def no_constants(name):
    raise AssertionError(f"{name} is no JSON")


def read(text: str) -> list[dict]:
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constants) for line in text.splitlines()]


@arch
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}], ids=str)
def test_records_round_trip_through_lines_of_json(options):
    decoder = TreeDecoder(tiny_llama(1))
    output = decoder.generate([[1, 2, 1], [9]], max_new_tokens=20, **options)
    file = io.StringIO()
    write_records(output.records, file)
    documents = read(file.getvalue())
    assert len(documents) == len(output.records) > 4
    for document, record in zip(documents, output.records, strict=True):
        assert document == {"schema": SCHEMA, **as_lists(asdict(record))}
        assert document["schema"] == "treepass.pass/1"
        assert document.keys() == {"schema", *(field.name for field in fields(PassRecord))}
        assert len(document["tokens"]) == len(document["parents"]) == len(document["path_prob"]) == record.nodes + 1
        assert all(math.isfinite(value) for value in (*document["logprobs"], *document["scores"]))
        assert all(value >= 0 for value in document["times"].values())


@unit
def test_lines_are_written_whole():
    class Flushed(io.StringIO):
        def __init__(self):
            super().__init__()
            self.lines = []

        def flush(self):
            self.lines.append(self.getvalue())

    file = Flushed()
    write_records([record(warnings=("two\nlines \u2028 \x1b[31m",)), record()], file)
    assert len(file.lines) >= 2
    assert all(text.endswith("\n") for text in file.lines)
    assert file.getvalue().count("\n") == 2
    assert "\x1b" not in file.getvalue()
    assert read(file.getvalue())[0]["warnings"] == ["two\nlines \u2028 \x1b[31m"]


@unit
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["path_prob", "logprobs", "scores"])
def test_what_json_cannot_say_is_refused(name, value):
    with pytest.raises(ValueError, match="JSON"):
        record(**{name: (value,)}).to_json()


def record(**changes) -> PassRecord:
    """A record of three nodes, two of them accepted, one token more."""
    values = {
        "sequence": 0,
        "index": 0,
        "context_length": 4,
        "tokens": (1, 2, 3, 4),
        "parents": (-1, 0, 0, 2),
        "path_prob": (1.0, 0.5, 0.25, 0.25),
        "ranks": (0, 0, 1, 0),
        "path": (2, 3),
        "emitted": (3, 4, 9),
        "logprobs": (-0.1, -0.2, -0.3),
        "scores": (1.0, 2.0, 3.0),
        "ended": "bonus",
        "times": PassTimes(0.1, 0.2, 0.3, 0.4, 0.5),
    }
    return PassRecord(**{**values, **changes})


@unit
def test_report_of_one_record():
    report = Report(prompt_rows=4)
    report.add(record())
    assert (report.passes, report.emitted, report.accepted, report.cut_on_accepted, report.nodes) == (1, 3, 2, 0, 3)
    assert report.rows == 4 + 1 + 3
    assert report.accepted_by_depth == [1, 1]
    assert report.accepted_by_rank == [1, 1]
    assert report.time == {"draft": 0.1, "pass": 0.2, "verify": 0.3, "commit": 0.4, "other": 0.5}
    assert report.seconds == pytest.approx(1.5)
    assert report.tokens_per_pass == 3
    assert report.nodes_per_pass == 3
    assert report.tokens_per_second == pytest.approx(2)


@unit
def test_report_without_passes_divides_by_nothing():
    report = Report()
    assert (report.tokens_per_pass, report.nodes_per_pass, report.tokens_per_second) == (0.0, 0.0, 0.0)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passes"] == 0


RECORDS = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 5), st.sampled_from(["", "slow", "broken"])), max_size=20
)


def chain_record(accepted: int, cut: bool, spare: int, warning: str) -> PassRecord:
    """A chain of which ``accepted`` nodes were accepted and ``spare`` were not."""
    rows = 1 + accepted + spare
    cut = cut and accepted > 0
    emitted = accepted + (not cut)
    return record(
        tokens=tuple(range(rows)),
        parents=tuple(range(-1, rows - 1)),
        path_prob=(1.0,) * rows,
        ranks=(0,) * rows,
        path=tuple(range(1, accepted + 1)),
        emitted=tuple(range(emitted)),
        logprobs=(-1.0,) * emitted,
        scores=(1.0,) * emitted,
        ended="accepted" if cut else "correction" if spare else "bonus",
        warnings=(warning,) if warning else (),
    )


@unit
@given(RECORDS, RECORDS)
def test_reports_add_up(first, second):
    reports = []
    for items in (first, second, first + second):
        report = Report()
        for item in items:
            report.add(chain_record(*item))
        assert report.emitted == report.accepted + report.passes - report.cut_on_accepted
        assert report.rows == report.prompt_rows + report.passes + report.nodes
        assert report.accepted == sum(report.accepted_by_depth) == sum(report.accepted_by_rank)
        assert report.accepted_by_depth == sorted(report.accepted_by_depth, reverse=True)
        assert len(set(report.warnings)) == len(report.warnings)
        assert sum(report.time.values()) == pytest.approx(report.seconds)
        reports.append(report)
    one, two, both = reports
    one.merge(two)
    for name in ("passes", "emitted", "accepted", "cut_on_accepted", "nodes", "prompt_rows", "accepted_by_depth"):
        assert getattr(one, name) == getattr(both, name)
    assert one.accepted_by_rank == both.accepted_by_rank
    assert one.warnings == both.warnings
    assert one.time == pytest.approx(both.time)


@unit
def test_the_dictionary_has_the_keys_that_scripts_rely_on():
    report = Report()
    report.add(record())
    document = report.to_dict()
    assert {
        "passes",
        "tokens_per_pass",
        "accepted_by_depth",
        "accepted_by_rank",
        "nodes_per_pass",
        "seconds",
        "prefill_seconds",
        "tokens_per_second",
        "time",
        "warnings",
    } <= document.keys()
    assert document["time"].keys() == set(PARTS)
    document["time"]["draft"] = 99
    document["warnings"].append("changed")
    assert report.time["draft"] == 0.1
    assert report.warnings == []
