"""The command line: streams, exit codes, documents, help pages."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import treepass.cli
from treepass import embedded, models
from treepass.cli.output import ExitCode, Verbs, document, escape_controls, examples, print_json
from treepass.errors import ModelLoadError

pytestmark = pytest.mark.unit
COMMON = ("schema", "versions", "model", "dtype", "device", "threads", "seed")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "treepass", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def verbs() -> list[str]:
    return [command.name for command in treepass.cli.app.registered_commands]


def test_help_needs_no_torch():
    script = (
        "import sys, treepass.cli; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [[], *[[verb] for verb in verbs()]], ids=str)
def test_help_ends_in_runnable_examples(arguments):
    result = CliRunner().invoke(treepass.cli.app, [*arguments, "--help"], prog_name="treepass")
    assert result.exit_code == 0
    _, shown = result.stdout.split("  Examples:\n")
    commands = [line.strip() for line in shown.strip().splitlines()]
    assert commands
    for command in commands:
        assert command.startswith(" ".join(["treepass", *arguments]))


def test_env_examples_run():
    for arguments in (["env"], ["env", "--json"]):
        assert CliRunner().invoke(treepass.cli.app, arguments).exit_code == 0


def test_version():
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("treepass 0.")


def test_env_json():
    done = run("env", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout.splitlines()[-1])
    assert set(COMMON) <= set(facts)
    assert facts["schema"] == "treepass.env/1"
    assert facts["model"] == models.DEFAULT_MODEL
    assert facts["seed"] is None
    assert facts["threads"] >= 1
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(facts["versions"].values())
    assert "cpu" in facts["devices"]


@pytest.mark.parametrize("prepared", [True, False])
def test_env_tells_the_state_of_the_default_model(monkeypatch, tmp_path, prepared):
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "is_prepared", lambda folder: prepared)
    result = CliRunner().invoke(treepass.cli.app, ["env"])
    assert f"default model   smollm2-135m, {'prepared' if prepared else 'not prepared yet'}" in result.stdout
    assert f"cache           {tmp_path}" in result.stdout
    facts = json.loads(CliRunner().invoke(treepass.cli.app, ["env", "--json"]).stdout)
    assert facts["default_model"]["prepared"] is prepared


@pytest.mark.parametrize("arguments", [["nonsense"], ["env", "--nonsense"], ["env", "too-much"]], ids=str)
def test_usage_error(arguments):
    done = run(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert done.stdout == ""
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelLoadError("no such\nmodel \x1b[31m"), ExitCode.RUNTIME, "error: no such model \\x1b[31m\n"),
        (ValueError("nodes must be >= 0, got -1"), ExitCode.USAGE, "error: nodes must be >= 0, got -1\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "error: interrupted\n"),
        (typer.Exit(ExitCode.PARITY), ExitCode.PARITY, ""),
    ],
    ids=["TreepassError", "ValueError", "Ctrl-C", "parity"],
)
def test_exit_codes(error, code, line):
    app = typer.Typer(cls=Verbs)

    @app.command("verb")
    def verb() -> None:
        typer.echo("partial")
        raise error

    @app.command("other")
    def other() -> None:
        pass

    result = CliRunner().invoke(app, ["verb"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "partial\n", line)


def test_defects_keep_their_traceback():
    app = typer.Typer(cls=Verbs)
    app.command("other")(lambda: None)

    @app.command("verb")
    def verb() -> None:
        raise KeyError("a defect")

    assert isinstance(CliRunner().invoke(app, ["verb"]).exception, KeyError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é, 漢字, 👩‍🔬\n\tnext", "plain, é, 漢字, 👩‍🔬\n\tnext"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\x08\x7f\x9b", "a\\rb\\x08\\x7f\\x9b"),
        ("x\u202ey\u2066z\u2028", "x\\u202ey\\u2066z\\u2028"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_escape_controls(text, shown):
    assert escape_controls(text) == shown


def test_document_is_one_ascii_line(capsys):
    print_json(document("audit law", model=None, dtype=None, device=None, threads=None, text="a\n\x1b\u202e\ud83d é"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isascii()
    assert line.isprintable()
    contents = json.loads(line)
    assert contents["schema"] == "treepass.audit.law/1"
    assert tuple(contents)[: len(COMMON)] == COMMON
    assert contents["text"] == "a\n\x1b\u202e\ud83d é"


def test_examples_keep_their_lines():
    assert examples("treepass a", "treepass b") == "\b\nExamples:\n  treepass a\n  treepass b"
