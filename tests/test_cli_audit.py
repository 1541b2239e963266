"""``treepass audit`` and ``treepass models``: verdicts, exit codes, documents, what a terminal and a pipe are shown."""

import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from test_cli_generate import byte_tokenizer
from typer.main import get_command
from typer.testing import CliRunner

import treepass.audit.model
import treepass.cli
import treepass.cli.audit
import treepass.support
from treepass import models
from treepass.audit import MUTANTS, Mutant, audit_model
from treepass.audit.mutants import Bite
from treepass.errors import UnsupportedModelError
from treepass.target import HFTarget
from treepass.testing import tiny_llama, tiny_recurrent

EVERY_DOCUMENT = {"schema", "versions", "model", "dtype", "device", "threads", "seed"}
AUDIT = {"model_type", "verdict", "reason", "attention", "checks"}
MODELS = {"exact", "refused", "wrong", "untested", "not_built", "attention", "transformers", "aliases"}
CHECKS = [
    "structure",
    "trees, dense",
    "trees, per_sequence",
    "cache",
    *(f"error put in: {mutant.name}" for mutant in MUTANTS),
    "greedy",
]
FAST = ("--passes", "1", "--nodes", "6", "--new-tokens", "6")
STYLE = re.compile(r"\x1b\[[\d;]*m")
MAMBA = "cannot decode trees with model type 'mamba': its recurrent state cannot be rolled back to an earlier token"

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny models, by name."""
    root = tmp_path_factory.mktemp("audited")
    broken = tiny_llama(vocab_size=257)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    made = {
        "tiny": tiny_llama(vocab_size=257, max_position_embeddings=512),
        "long": tiny_llama(vocab_size=257, max_position_embeddings=100_000),
        "recurrent": tiny_recurrent(vocab_size=257),
        "nan": broken,
    }
    for name, model in made.items():
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return {name: str(root / name) for name in made}


def treepass_(*arguments):
    return CliRunner().invoke(treepass.cli.app, [*map(str, arguments)], prog_name="treepass")


@pytest.fixture
def run(folders):
    """Runs ``treepass audit model`` in this process."""

    def audit(*arguments, model="tiny"):
        return treepass_("audit", "model", "--model", folders.get(model, model), "--device", "cpu", *FAST, *arguments)

    return audit


def document(result, code=0):
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def lines(result):
    """The checks of a pipe, and the closing line."""
    *checks, closing = result.stdout.splitlines()
    return [line.split("\t") for line in checks], closing


@contextmanager
def harmless():
    """An error that changes nothing and says it did: it cannot be noticed."""
    yield Bite(1)


# treepass audit model


@pytest.mark.arch
def test_an_exact_model(run):
    result = run()
    checks, closing = lines(result)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [name for _, name, _ in checks] == CHECKS
    assert {verdict for verdict, _, _ in checks} == {"exact", "skipped"}
    assert closing == "exact: trees give this model's own text, with attention dense and per_sequence"


@pytest.mark.arch
def test_the_document_of_an_audit(run, folders):
    result = run("--json", "--seed", 3)
    facts = document(result)
    assert result.stderr == ""
    assert set(facts) == EVERY_DOCUMENT | AUDIT
    assert (facts["schema"], facts["model"], facts["seed"]) == ("treepass.audit.model/1", folders["tiny"], 3)
    assert (facts["model_type"], facts["dtype"], facts["device"]) == ("llama", "float32", "cpu")
    assert (facts["verdict"], facts["reason"], facts["attention"]) == ("exact", "", ["dense", "per_sequence"])
    assert [check["name"] for check in facts["checks"]] == CHECKS
    assert all(set(check) == {"name", "verdict", "detail", "error"} for check in facts["checks"])
    errors = {check["name"]: check["error"] for check in facts["checks"]}
    assert 0 < errors["trees, dense"] < 2e-4 < errors["error put in: sibling visible"]
    assert errors["structure"] is None


@pytest.mark.arch
def test_settings_reach_the_audit(run, monkeypatch):
    given = {}

    def watched(model, *, on_check, **settings):
        given.update(settings, dtype=model.dtype)
        return audit_model(model, on_check=on_check, **settings)

    monkeypatch.setattr(treepass.audit, "audit_model", watched)
    facts = document(run("--json", "--passes", 2, "--nodes", 5, "--new-tokens", 7, "--seed", 4, "--dtype", "bfloat16"))
    assert given == {"passes": 2, "nodes": 5, "new_tokens": 7, "seed": 4, "dtype": torch.bfloat16}
    assert (facts["dtype"], facts["seed"]) == ("bfloat16", 4)


@pytest.mark.arch
def test_a_wrong_model(run):
    with MUTANTS[0].inject():
        result, facts = run(), run("--json")
    checks, closing = lines(result)
    assert result.exit_code == 3
    assert [verdict for verdict, _, _ in checks] == ["exact", "wrong", "wrong"]
    assert re.fullmatch(r"wrong: the text would not be this model's own; trees, dense: \d+ rows, .* allowed", closing)
    assert facts.stderr == f"error: {closing.removeprefix('wrong: ')}\n"
    facts = document(facts, code=3)
    assert (facts["verdict"], facts["attention"]) == ("wrong", [])
    assert facts["reason"].startswith("trees, dense: ")


@pytest.mark.arch
def test_an_audit_that_notices_too_little_is_no_success(run, monkeypatch):
    monkeypatch.setattr(treepass.audit.model, "MUTANTS", (Mutant("nothing at all", harmless),))
    result = run()
    checks, closing = lines(result)
    assert result.exit_code == 3
    assert [verdict for verdict, name, _ in checks if name == "error put in: nothing at all"] == ["untested"]
    assert closing.startswith("untested: the checks would not notice every error in this model; error put in: nothing")
    assert document(run("--json"), code=3)["verdict"] == "untested"


@pytest.mark.arch
def test_numbers_that_json_has_not(run):
    result = run("--json", model="nan")
    facts = document(result, code=3)
    assert (facts["verdict"], facts["checks"][1]["error"]) == ("wrong", None)
    assert "difference inf" in facts["checks"][1]["detail"]


@pytest.mark.arch
def test_a_model_refused_by_its_structure_takes_one_line(run):
    result = run(model="recurrent")
    assert (result.exit_code, result.stdout, result.stderr) == (1, f"refused: {MAMBA}\n", "")
    result = run("--json", model="recurrent")
    facts = document(result, code=1)
    assert result.stderr == f"error: {MAMBA}\n"
    assert (facts["verdict"], facts["reason"]) == ("refused", MAMBA.split(": ")[1])
    assert [check["name"] for check in facts["checks"]] == ["structure"]


@pytest.mark.arch
def test_a_model_that_fails_on_trees_is_refused_and_its_words_are_escaped(run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no\t\x1b[31mtrees\nat all")

    monkeypatch.setattr(HFTarget, "forward", fail)
    result = run()
    checks, closing = lines(result)
    reason = "a pass over a tree fails in it (RuntimeError: no \\x1b[31mtrees)"
    assert result.exit_code == 1
    assert checks[1:] == [["refused", f"trees, {name}", reason] for name in ("dense", "per_sequence")]
    assert closing == f"refused: cannot decode trees with model type 'llama': trees, dense: {reason}"


@pytest.mark.unit
@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["text", "json"])
def test_a_model_that_is_not_even_loaded(run, monkeypatch, mode):
    def refuse(*_, **__):
        raise UnsupportedModelError("'x' has model type 't5': it is an encoder-decoder")

    monkeypatch.setattr(models, "load", refuse)
    result = run(*mode)
    line = "error: 'x' has model type 't5': it is an encoder-decoder\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--passes", 0], "--passes must be at least 1, got 0"),
        (["--nodes", 0], "--nodes must be at least 1, got 0"),
        (["--nodes", 513], "--nodes must be from 1 to 512, got 513"),
        (["--new-tokens", -1], "--new-tokens must be at least 1, got -1"),
        (["--seed", -1], "--seed must be at least 0, got -1"),
        (["--dtype", "bfloat61"], "unknown dtype 'bfloat61', known are: auto, .*; did you mean 'bfloat16'\\?"),
    ],
    ids=str,
)
def test_arguments_are_refused_before_the_model_is_loaded(run, monkeypatch, arguments, line):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("loaded"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(f"error: {line}\n", result.stderr)


@pytest.mark.arch
def test_texts_beyond_the_last_position_are_no_verdict(run):
    result = run("--new-tokens", 473)
    assert (result.exit_code, result.stdout) == (2, "")
    bound = "go beyond 512, the model's maximum length; give a smaller --new-tokens"
    assert result.stderr == f"error: greedy texts of 40 + 473 tokens {bound}\n"
    assert run("--new-tokens", 472).exit_code == 0


@pytest.mark.arch
@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
def test_ctrl_c_keeps_what_was_checked(run, monkeypatch, swallowed):
    def interrupted(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not swallowed:
                raise
        return treepass.audit.Check("cache", "wrong", "cut short")

    monkeypatch.setattr(treepass.audit.model._Run, "cache", interrupted)
    result = run()
    checks, closing = lines(result)
    assert (result.exit_code, result.stderr) == (130, "")
    assert [name for _, name, _ in checks] == CHECKS[:3]
    assert closing == "interrupted: 3 checks done, no verdict"
    facts = document(run("--json"), code=130)
    assert set(facts) == EVERY_DOCUMENT | AUDIT
    assert (facts["verdict"], facts["reason"]) == ("interrupted", "3 checks done, no verdict")
    assert facts["attention"] == ["dense", "per_sequence"]
    assert [check["name"] for check in facts["checks"]] == CHECKS[:3]


@pytest.mark.arch
def test_a_defect_is_no_interrupt(run, monkeypatch):
    monkeypatch.setattr(treepass.audit.model._Run, "cache", lambda self: {}["a defect"])
    assert isinstance(run().exception, KeyError)


def start(folders, *arguments, **streams):
    dropped = ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "treepass", *(folders.get(argument, argument) for argument in arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **streams)


def screen(folders, *arguments, columns=100):
    """What a terminal is shown, and the exit code."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = start(folders, *arguments, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's end of a terminal
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    return shown.decode().replace("\r\n", "\n"), process.wait(timeout=20)


def left(shown):
    """The lines that stay on a terminal, without styles."""
    return [re.sub(r".*\r", "", line).rstrip() for line in STYLE.sub("", shown).strip("\n").split("\n")]


@posix
@pytest.mark.arch
def test_ctrl_c_in_the_middle_of_a_check(folders):
    command = ("audit", "model", "--model", "long", "--device", "cpu", "--passes", "5000")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(folders, *command, **streams) as process:
        assert process.stdout.readline().startswith("exact\tstructure\t")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("interrupted: 1 check done, no verdict\n", "")
    assert process.returncode == 130


@posix
@pytest.mark.arch
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_shows_progress_and_verdicts_in_style(folders, columns):
    shown, code = screen(folders, "audit", "model", "--model", "tiny", "--device", "cpu", *FAST, columns=columns)
    assert code == 0
    assert "\rloading" in shown
    assert "\r4 checks done, the next one is running" in shown
    assert "\x1b[38;2;0;158;115mexact" in shown
    assert "\t" not in shown
    words = " ".join(" ".join(left(shown)).split())
    assert "exact: trees give this model's own text, with attention dense and per_sequence" in words
    assert "skipped" in words
    if columns == 80:
        assert "exact     error put in: sibling visible      noticed, difference" in "\n".join(left(shown))
    assert max(map(len, left(shown))) <= columns
    # Nothing is cut: the detail of the first check is there in full, however narrow the column.
    assert {"causal", "decoder", "whose", "cache", "holds", "one", "row", "per", "token"} <= set(words.split())


@posix
@pytest.mark.arch
def test_a_terminal_shows_a_refusal_on_one_line(folders):
    shown, code = screen(folders, "audit", "model", "--model", "recurrent", "--device", "cpu", columns=150)
    assert (left(shown), code) == ([f"refused: {MAMBA}"], 1)


@pytest.mark.unit
@pytest.mark.parametrize("path", [["audit", "model"], ["models"]], ids=" ".join)
def test_every_option_is_documented(path):
    command = get_command(treepass.cli.app)
    for name in path:
        command = command.commands[name]
    shown = treepass_(*path, "--help").stdout
    for parameter in command.params:
        assert parameter.help, parameter.name
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert f"  {option}" in shown


@pytest.mark.unit
def test_defaults_are_those_of_the_library():
    command = get_command(treepass.cli.app).commands["audit"].commands["model"]
    parameters = {parameter.name: parameter.default for parameter in command.params}
    library = inspect.signature(audit_model).parameters
    for name in ("passes", "nodes", "new_tokens", "seed"):
        assert parameters[name] == library[name].default, name
    assert (parameters["model"], parameters["dtype"]) == (models.DEFAULT_MODEL, "float32")


@pytest.mark.unit
@pytest.mark.parametrize("path", [["audit"], ["audit", "model"], ["models"]], ids=" ".join)
def test_help_ends_in_runnable_examples(path):
    result = treepass_(*path, "--help")
    assert result.exit_code == 0
    _, shown = result.stdout.split("  Examples:\n")
    for command in shown.strip().splitlines():
        assert command.strip().startswith(" ".join(["treepass", *path]))


@pytest.mark.model
def test_the_default_model_is_exact(tmp_path):
    facts = document(treepass_("audit", "model", "--device", "cpu", *FAST, "--json"))
    assert (facts["model"], facts["verdict"], facts["model_type"]) == ("smollm2-135m", "exact", "llama")


# treepass models


@pytest.fixture
def table(monkeypatch):
    """A small table in place of the real one."""
    both, errors = ["dense", "per_sequence"], ["row index for depth", "sibling visible"]
    small = {
        "transformers": ["5.18.0", "999.0.0"],
        "exact": {
            "llama": {"class": "LlamaForCausalLM", "attention": both, "positions": {}, "noticed": errors},
            "falcon": {
                "class": "FalconForCausalLM",
                "attention": ["dense"],
                "positions": {"alibi": False},
                "noticed": errors,
            },
        },
        "refused": {
            "mamba": {"class": "MambaForCausalLM", "kind": "recurrent", "reason": "it is recurrent"},
            "bloom": {"class": "BloomForCausalLM", "kind": "decoder", "reason": "rows,\tnot positions \x1b[31m"},
            "rwkv": {"class": "RwkvForCausalLM", "kind": "recurrent", "reason": "it is recurrent"},
        },
        "untested": {"odd": {"class": "Odd", "kind": "decoder", "reason": "an error went unnoticed"}},
        "not_built": {"huge": {"class": "Huge", "kind": "decoder", "reason": "no small one can be made"}},
    }
    monkeypatch.setattr(treepass.support, "verified_table", lambda: small)
    return small


@pytest.mark.unit
def test_models_in_a_pipe(table):
    result = treepass_("models")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "llama\texact\tdense, per_sequence",
        "falcon\texact\tdense",
        "mamba\trefused\tit is recurrent",
        "bloom\trefused\trows, not positions \\x1b[31m",
        "rwkv\trefused\tit is recurrent",
        "odd\tuntested\tan error went unnoticed",
        "huge\tnot built\tno small one can be made",
    ]


@pytest.mark.unit
def test_the_document_of_models(table):
    facts = document(treepass_("models", "--json"))
    assert set(facts) == EVERY_DOCUMENT | MODELS
    assert facts["schema"] == "treepass.models/1"
    assert (facts["exact"], facts["wrong"]) == (["llama", "falcon"], [])
    assert set(facts["refused"]) == {"mamba", "bloom", "rwkv"}
    assert facts["refused"]["mamba"] == "it is recurrent"
    assert facts["untested"] == {"odd": "an error went unnoticed"}
    assert facts["not_built"] == {"huge": "no small one can be made"}
    assert facts["attention"] == {"llama": ["dense", "per_sequence"], "falcon": ["dense"]}
    assert (facts["transformers"], facts["aliases"]) == (["5.18.0", "999.0.0"], ["smollm2-135m"])


def about(model_type):
    result = treepass_("models", model_type)
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.stdout.splitlines())


@pytest.mark.unit
def test_one_type_and_what_its_verdict_rests_on(table):
    assert about("llama") == {
        "type": "llama",
        "verdict": "exact",
        "class": "LlamaForCausalLM",
        "attention": "dense, per_sequence",
        "errors noticed": "row index for depth, sibling visible",
        "measured with": "transformers 5.18.0 to 999.0.0",
    }
    assert about("falcon")["settings"].startswith("alibi=False; with others a model is tried on one tree")
    assert (about("mamba")["verdict"], about("mamba")["reason"]) == ("refused", "it is recurrent")
    assert about("huge")["verdict"] == "not built"
    table["transformers"] = ["1.0.0", "1.0.1"]
    assert about("llama")["measured with"].endswith(
        "which is installed, a model is tried on one tree when it is wrapped"
        ", and refused if its logits are not those of plain forwards"
    )


@pytest.mark.unit
@pytest.mark.parametrize("model_type", ["mixtral", "llama4", "something-of-my-own"])
def test_a_type_that_is_not_in_the_table_is_tried(table, model_type):
    assert about(model_type)["verdict"] == "not in the table"
    assert about(model_type)["reason"].startswith("a model is tried on one tree when it is wrapped")
    facts = document(treepass_("models", model_type, "--json"))
    assert (facts["type"], facts["verdict"], facts["exact"], facts["refused"]) == (
        model_type,
        "not in the table",
        [],
        {},
    )


@pytest.mark.unit
def test_the_document_of_one_type(table):
    facts = document(treepass_("models", "mamba", "--json"))
    assert set(facts) == EVERY_DOCUMENT | MODELS | {"type", "verdict", "reason"}
    assert (facts["type"], facts["verdict"], facts["reason"]) == ("mamba", "refused", "it is recurrent")
    assert (facts["exact"], facts["refused"]) == ([], {"mamba": "it is recurrent"})


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lama", "unknown model type 'lama'; did you mean 'llama'?"),
        ("faclon", "unknown model type 'faclon'; did you mean 'falcon'?"),
        ("smollm2-135m", "'smollm2-135m' is a model, not a type; run treepass audit model --model smollm2-135m"),
        ("some/model", "'some/model' is a model, not a type; run treepass audit model --model some/model"),
    ],
)
@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["text", "json"])
def test_a_name_that_is_no_type(table, name, line, mode):
    result = treepass_("models", name, *mode)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {line}\n")


@pytest.mark.unit
def test_models_on_a_terminal(table, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    treepass.cli.models(None)
    shown = STYLE.sub("", capsys.readouterr().out)
    assert shown.startswith("2 exact, 3 refused, 1 untested, 1 not built, 0 wrong\nmeasured with transformers 5.18.0")
    assert "exact (attention: dense, per_sequence)\nllama" in shown
    assert "exact (attention: dense)\nfalcon" in shown
    assert re.search(r"│ it is recurrent +│ mamba, rwkv", shown)
    assert re.search(r"│ an error went unnoticed +│ odd", shown)
    assert shown.index("mamba, rwkv") < shown.index("bloom")  # the commonest reason first
    assert "\\x1b[31m" in shown


@posix
@pytest.mark.arch
def test_the_real_table(folders):
    exact = document(treepass_("models", "--json"))["exact"]
    assert "llama" in exact
    assert about("llama")["verdict"] == "exact"
    shown, code = screen(folders, "models", columns=60)
    assert code == 0
    assert "\rreading the table" in shown
    assert "\x1b[38;2;0;158;115m" in shown
    assert max(map(len, left(shown))) <= 60
    words = set(re.split(r"[\s,│]+", " ".join(left(shown))))
    assert set(exact) <= words
    shown, code = screen(folders, "models", "llama")
    assert code == 0
    assert [line.split() for line in left(shown)[:2]] == [["type", "llama"], ["verdict", "exact"]]
    piped = start(folders, "models", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, errors = piped.communicate(timeout=60)
    assert (errors, "\x1b" in out) == ("", False)
    assert [line.split("\t")[0] for line in out.splitlines() if "\texact\t" in line] == exact
