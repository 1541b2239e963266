"""``treepass generate``: streams, documents, comparison, interrupts, errors."""

import errno
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner

import treepass
import treepass.cli
import treepass.cli.comparison
import treepass.support
from treepass import embedded, models
from treepass.cli.completion import encode
from treepass.cli.output import escape_controls
from treepass.cli.progress import LiveLine
from treepass.compare import Difference
from treepass.errors import PromptError
from treepass.sampling import SamplingParams
from treepass.testing import tiny_llama, tiny_recurrent

EVERY_DOCUMENT = {"schema", "versions", "model", "dtype", "device", "threads", "seed"}
GENERATE = {
    *("text", "ids", "prompt_tokens", "new_tokens", "finish_reason", "lossless", "drafter", "rule", "temperature"),
    *("passes", "tokens_per_pass", "accepted_by_depth", "accepted_by_rank", "nodes_per_pass", "seconds"),
    *("tokens_per_second", "time", "warnings", "prefill_seconds"),
}
SETTINGS = {"nodes", "attention", "kernel", "max_new_tokens", "top_k", "top_p", "min_p"}
COMPARE = {"generate", "plain", "identical", "speedup", "speedup_over_plain"}

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")


def byte_tokenizer(**options):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **options)


def swapped(model, one, other):
    """The model with the roles of two tokens exchanged: where it wrote one it writes the other."""
    pair = [one, other]
    for table in (model.lm_head.weight.data, model.model.embed_tokens.weight.data):
        table[pair] = table[pair[::-1]]
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny models of bytes, by name."""
    root = tmp_path_factory.mktemp("models")
    broken = tiny_llama(vocab_size=257)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    made = {
        "escapes": swapped(
            tiny_llama(vocab_size=257), *byte_tokenizer()("x\x1b")["input_ids"]
        ),  # "x" is what it likes best
        "tiny": tiny_llama(vocab_size=257, max_position_embeddings=512),
        "long": tiny_llama(vocab_size=257, max_position_embeddings=100_000),
        "recurrent": tiny_recurrent(vocab_size=257),
        "nan": broken,
    }
    for name, model in made.items():
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return {name: str(root / name) for name in made}


@pytest.fixture
def run(folders):
    """Runs ``treepass generate`` on the tiny model in this process."""

    def run_generate(*arguments, model="tiny", stdin=None):
        options = ["--model", folders.get(model, model), "--dtype", "float32", "--device", "cpu"]
        command = ["generate", *options, *map(str, arguments)]
        return CliRunner().invoke(treepass.cli.app, command, input=stdin, prog_name="treepass")

    return run_generate


def start(folders, *arguments, model="tiny", environment=None, **streams):
    """Runs it in a process of its own, whose output is buffered as usual."""
    options = ["--model", folders[model], "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-m", "treepass", "generate", *options, *arguments]
    dropped = ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
    return subprocess.Popen(command, env=kept | (environment or {}), **streams)


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def error_line(result):
    """The only line that a failed command prints."""
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.unit
def test_every_option_is_documented():
    command = get_command(treepass.cli.app).commands["generate"]
    shown = CliRunner().invoke(treepass.cli.app, ["generate", "--help"], prog_name="treepass").stdout
    for parameter in command.params:
        assert parameter.help, parameter.name
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert f"  {option}" in shown
    assert {parameter.name for parameter in command.params} == set(inspect.signature(treepass.cli.generate).parameters)


@pytest.mark.unit
def test_help_names_every_choice_and_defaults_are_those_of_the_library():
    from treepass.attention import ATTENTIONS, KERNELS
    from treepass.drafters import DRAFTERS
    from treepass.generate import DEFAULT_NEW_TOKENS
    from treepass.sampling import SamplingParams

    parameters = {parameter.name: parameter for parameter in get_command(treepass.cli.app).commands["generate"].params}
    for name, choices in (("drafter", DRAFTERS), ("attention", ATTENTIONS), ("kernel", KERNELS)):
        for choice in choices:
            assert choice in parameters[name].help
    decoder = inspect.signature(treepass.TreeDecoder.__init__).parameters
    call = inspect.signature(treepass.TreeDecoder.generate).parameters
    for name, owner in [
        *((name, decoder) for name in ("drafter", "nodes", "attention", "kernel")),
        *((name, call) for name in ("top_k", "seed")),
    ]:
        assert parameters[name].default == owner[name].default, name
    # The library tells what is not given from what is; what comes out of it then is what the command line shows.
    assert parameters["max_new_tokens"].default == DEFAULT_NEW_TOKENS
    for name in ("temperature", "top_p", "min_p"):
        assert parameters[name].default == getattr(SamplingParams(), name), name


@pytest.mark.arch
def test_text_goes_to_stdout_and_the_rest_to_stderr(run):
    result = run("abc", "--max-new-tokens", 60)
    facts = document(run("abc", "--max-new-tokens", 60, "--json"))
    assert result.exit_code == 0
    assert result.stdout == escape_controls(facts["text"]) + "\n"
    assert result.stdout != facts["text"] + "\n"  # or the model is too tame for this test
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.stderr.splitlines())
    assert list(lines) == ["tokens", "passes", "tokens per pass", "tokens per second", "prefill", "drafter"]
    assert lines["tokens"] == "60 (the limit was reached)"
    assert lines["passes"] == str(facts["passes"])
    assert lines["tokens per pass"] == f"{60 / facts['passes']:.2f}"
    assert lines["prefill"].endswith(" s for 3 prompt tokens")


@pytest.mark.arch
def test_document_has_the_keys_of_the_contract(run):
    facts = document(run("abc", "--max-new-tokens", 20, "--json", "--seed", 5))
    assert set(facts) == EVERY_DOCUMENT | GENERATE | SETTINGS
    assert facts["schema"] == "treepass.generate/1"
    assert set(facts["time"]) == {"draft", "pass", "verify", "commit", "other"}
    assert facts["new_tokens"] == len(facts["ids"]) == 20
    assert (facts["prompt_tokens"], facts["finish_reason"], facts["lossless"]) == (3, "length", True)
    assert (facts["dtype"], facts["device"], facts["rule"], facts["seed"]) == ("float32", "cpu", "follow", 5)
    assert facts["tokens_per_pass"] == 20 / facts["passes"]
    assert facts["warnings"] == []


@pytest.mark.arch
@pytest.mark.parametrize(
    ("sampling", "identical"), [([], True), (["--temperature", 0.8, "--top-k", 50, "--top-p", 0.9], None)]
)
def test_compare_adds_its_keys_and_changes_nothing(run, sampling, identical):
    arguments = ["abc", "--max-new-tokens", 30, "--json", "--seed", 3, *sampling]
    alone, facts = document(run(*arguments)), document(run(*arguments, "--compare"))
    assert set(facts) == EVERY_DOCUMENT | GENERATE | SETTINGS | COMPARE
    assert facts["identical"] is identical
    assert set(facts["generate"]) == set(facts["plain"]) == {"seconds", "tokens_per_second"}
    assert facts["speedup"] == facts["tokens_per_second"] / facts["generate"]["tokens_per_second"]
    assert facts["speedup_over_plain"] == facts["tokens_per_second"] / facts["plain"]["tokens_per_second"]
    # The drafter must not have learnt the text from the warm-up.
    for key in ("ids", "text", "passes", "accepted_by_depth", "accepted_by_rank", "nodes_per_pass"):
        assert facts[key] == alone[key]


@pytest.mark.arch
def test_compare_in_words(run):
    result = run("abc", "--max-new-tokens", 20, "--compare")
    assert result.exit_code == 0
    assert re.search(
        r"^transformers' generate +[\d.]+ tokens/s, treepass is [\d.]+ times as fast$", result.stderr, re.M
    )
    assert re.search(r"^plain decoding +[\d.]+ tokens/s, treepass is [\d.]+ times as fast$", result.stderr, re.M)
    assert re.search(r"^identical ids +yes$", result.stderr, re.M)


@pytest.mark.arch
def test_compare_at_the_end_of_the_model_s_positions(run):
    facts = document(run("a" * 500, "--max-new-tokens", 50, "--json", "--compare"))
    assert facts["identical"] is True
    assert facts["new_tokens"] == 12
    assert facts["warnings"] == ["max_new_tokens was cut from 50 to 12 by the model's maximum length"]


@pytest.mark.arch
@pytest.mark.parametrize(
    ("difference", "code", "words"),
    [
        (Difference(7, (1, 2), 2e-5, True), 0, "no: they part at token 7 by a top-2 margin of 2e-05, a near tie"),
        (Difference(7, (1, 2), 3.25, False), 3, "at token 7 by a top-2 margin of 3.2, more than rounding explains"),
        (Difference(7, (1, None), float("inf"), False), 3, "they part at token 7, where one text has ended"),
    ],
    ids=["near tie", "parity", "ended"],
)
def test_a_difference_is_told_and_only_a_near_tie_is_forgiven(run, monkeypatch, difference, code, words):
    monkeypatch.setattr(treepass.cli.comparison, "first_difference", lambda *_: difference)
    result = run("abc", "--max-new-tokens", 10, "--compare")
    assert result.exit_code == code
    assert words in result.stderr
    assert ("error: the ids differ from those of transformers' generate" in result.stderr) is (code == 3)
    result = run("abc", "--max-new-tokens", 10, "--compare", "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == code
    assert facts["identical"] is False
    assert facts["first_difference"] == {
        "index": 7,
        "tokens": list(difference.tokens),
        "margin": difference.margin if difference.margin < 9 else None,
        "near_tie": difference.near_tie,
    }


@pytest.mark.arch
def test_compare_sees_a_difference(run, monkeypatch):
    real = treepass.cli.comparison.timed_generate

    def altered(*arguments, **options):
        done = real(*arguments, **options)
        done.ids[5] = (done.ids[5] + 1) % 256
        return done

    monkeypatch.setattr(treepass.cli.comparison, "timed_generate", altered)
    result = run("abc", "--max-new-tokens", 10, "--compare", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["first_difference"]["index"] == 5


@pytest.mark.arch
@pytest.mark.parametrize("drafter", ["suffix", "random", "none"])
def test_the_seed_decides_the_text(run, drafter):
    sampling = ("--max-new-tokens", 30, "--temperature", 0.9, "--min-p", 0.02, "--json")
    drawn = document(run("abc", *sampling))
    again = document(run("abc", *sampling, "--seed", drawn["seed"], "--drafter", drafter))
    other = document(run("abc", *sampling, "--seed", drawn["seed"] + 1))
    assert again["ids"] == drawn["ids"] != other["ids"]
    shown = run("abc", "--max-new-tokens", 5, "--temperature", 0.9, "--seed", 7).stderr
    assert re.search(r"^seed +7$", shown, re.M)


@pytest.mark.arch
def test_settings_reach_the_decoder(run):
    chosen = ("--nodes", 3, "--drafter", "recycling", "--kernel", "eager", "--attention", "dense")
    facts = document(run("abc", "--json", "--max-new-tokens", 9, *chosen))
    assert (facts["nodes"], facts["drafter"], facts["kernel"], facts["attention"]) == (3, "recycling", "eager", "dense")
    assert 0 < facts["nodes_per_pass"] <= 3
    assert document(run("abc", "--json", "--nodes", 0, "--max-new-tokens", 9))["nodes_per_pass"] == 0


@pytest.mark.arch
def test_attention_is_per_sequence_where_that_is_verified(run, monkeypatch):
    arguments = ("abc", "--json", "--max-new-tokens", 9)
    default, dense = document(run(*arguments)), document(run(*arguments, "--attention", "dense"))
    assert (default["attention"], dense["attention"]) == ("per_sequence", "dense")
    assert default["ids"] == dense["ids"]
    monkeypatch.setattr(treepass.support, "is_verified", lambda model: False)
    assert document(run(*arguments))["attention"] == "dense"
    assert document(run(*arguments, "--attention", "per_sequence"))["attention"] == "per_sequence"


@pytest.mark.arch
def test_threads(run):
    before = torch.get_num_threads()
    try:
        assert document(run("abc", "--json", "--max-new-tokens", 2, "--threads", 1))["threads"] == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.arch
def test_prompt_from_standard_input(run):
    given = document(run("abc", "--json", "--max-new-tokens", 8))
    read = document(run("-", "--json", "--max-new-tokens", 8, stdin="abc\n"))
    assert (read["ids"], read["prompt_tokens"]) == (given["ids"], 3)
    assert document(run("-", "--json", "--max-new-tokens", 8, "--raw", stdin="abc\n"))["prompt_tokens"] == 4


@pytest.mark.arch
def test_chat_template_unless_raw(tmp_path, folders, run):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>{% if add_generation_prompt %}!{% endif %}"
    treepass.load(folders["tiny"], dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = document(run("<abc>!", "--json", "--max-new-tokens", 8))
    chat = document(run("abc", "--json", "--max-new-tokens", 8, model=str(tmp_path)))
    raw = document(run("<abc>!", "--json", "--max-new-tokens", 8, "--raw", model=str(tmp_path)))
    assert plain["ids"] == chat["ids"] == raw["ids"]
    assert (chat["prompt_tokens"], raw["prompt_tokens"]) == (6, 6)
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(PromptError, match=r"chat template cannot be applied .*no users here.*; use --raw"):
        encode(tokenizer, "abc", raw=False)


@pytest.mark.arch
def test_trace(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("what was there\n")
    facts = document(run("abc", "--json", "--max-new-tokens", 40, "--compare", "--trace", path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [token for record in records for token in record["emitted"]] == facts["ids"]
    assert [record["index"] for record in records] == list(range(facts["passes"]))


@pytest.mark.arch
def test_the_end_of_the_text_is_in_the_ids_and_not_in_the_text(run, folders, tmp_path):
    ids = document(run("abc", "--json", "--max-new-tokens", 30))["ids"]
    end = next(token for i, token in enumerate(ids) if i >= 5 and token not in ids[:i])
    model = swapped(treepass.load(folders["tiny"], dtype="float32", device="cpu").model, end, 256)
    model.generation_config.eos_token_id = 256
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    ended = document(run("abc", "--json", "--max-new-tokens", 30, "--compare", model=str(tmp_path)))
    assert ended["ids"] == [*ids[: ids.index(end)], 256]
    assert (ended["finish_reason"], ended["identical"]) == ("stop", True)
    assert "<end>" not in ended["text"]
    result = run("abc", "--max-new-tokens", 30, model=str(tmp_path))
    assert result.stdout == escape_controls(ended["text"]) + "\n"
    assert "(the model ended the text)" in result.stderr


@pytest.mark.arch
def test_warnings_are_lines_and_in_the_document(run, monkeypatch):
    real = models.load

    def load(*arguments, **options):
        warnings.warn("an old\ndriver", UserWarning, stacklevel=1)
        return real(*arguments, **options)

    monkeypatch.setattr(models, "load", load)
    result = run("abc", "--json", "--max-new-tokens", 300, "--drafter", "random", "--nodes", 1)
    hopeless = "no node of drafter 'random' was accepted in 32 passes; drafting is switched off for this request"
    assert document(result)["warnings"] == ["an old driver", hopeless]
    assert result.stderr == f"warning: an old driver\nwarning: {hopeless}\n"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([""], 2, "the prompt is empty; give at least one word"),
        ([" \n"], 2, "the prompt is empty; give at least one word"),
        (["-"], 2, "the prompt on standard input is empty; give at least one word"),
        (["\udcff"], 2, "the prompt is not valid utf-8 text: .*"),
        (["x", "--max-new-tokens", 0], 2, "--max-new-tokens must be at least 1, got 0"),
        (["x", "--max-new-tokens", -3], 2, "--max-new-tokens must be at least 1, got -3"),
        (["x", "--nodes", 513], 2, "--nodes must be from 0 to 512, got 513"),
        (["x", "--threads", 0], 2, "--threads must be at least 1, got 0"),
        (["x", "--drafter", "sufix"], 2, "unknown drafter 'sufix', known are: auto, .*; did you mean 'suffix'\\?"),
        (["x", "--attention", "flash"], 2, "unknown attention 'flash', known are: dense, per_sequence"),
        (["x", "--kernel", "spda"], 2, "unknown kernel 'spda', .*; did you mean 'sdpa'\\?"),
        (["x", "--dtype", "float8"], 2, "unknown dtype 'float8', known are: auto, .*"),
        (["x", "--temperature", -0.5], 2, "temperature must be finite and >= 0, got -0.5"),
        (["x", "--temperature", "nan"], 2, "temperature must be finite and >= 0, got nan"),
        (["x", "--top-k", -1], 2, "top_k must be an integer >= 0, got -1"),
        (["x", "--top-p", 0], 2, r"top_p must lie in \(0, 1\], got 0.0"),
        (["x", "--min-p", 2], 2, r"min_p must lie in \[0, 1\], got 2.0"),
        (["x", "--trace", "/nonexistent/t.jsonl"], 1, "cannot write the trace '/nonexistent/t.jsonl': No such file .*"),
    ],
    ids=str,
)
def test_arguments_are_refused_before_the_model_is_loaded(run, monkeypatch, arguments, code, line):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("loaded"))
    result = run(*arguments, stdin="")
    assert re.fullmatch(f"error: {line}", error_line(result))
    assert result.exit_code == code


@pytest.mark.arch
@pytest.mark.parametrize(
    ("model", "prompt", "line"),
    [
        ("/nonexistent", "x", "model folder '/nonexistent' does not exist; give a folder written by save_pretrained"),
        ("recurrent", "x", "cannot decode trees with model type 'mamba': its recurrent state cannot be rolled back .*"),
        ("nan", "x", r"the target's logits at node 0 \(position 0\) are NaN, .*"),
        ("tiny", "x" * 600, "the prompt has 600 tokens, but the model's maximum is 512 .*; shorten the prompt"),
    ],
    ids=["missing", "recurrent", "NaN", "too long"],
)
@pytest.mark.parametrize("mode", [(), ("--json",), ("--compare",)], ids=["text", "json", "compare"])
def test_errors_are_one_line(run, tmp_path, model, prompt, line, mode):
    trace = tmp_path / "trace.jsonl"
    result = run(prompt, "--trace", trace, *mode, model=model)
    assert re.fullmatch(f"error: {line}", error_line(result))
    assert result.exit_code == 1
    assert not trace.exists() or trace.read_text() == ""


@pytest.mark.unit
@pytest.mark.parametrize("full", [False, True], ids=["no folder", "full"])
def test_a_cache_folder_that_cannot_be_written(run, tmp_path, monkeypatch, full):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREEPASS_CACHE", str(tmp_path if full else tmp_path / "file" / "folder"))
    monkeypatch.setattr(embedded, "_find_gguf", lambda: tmp_path / "file")

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded, "_dequantise", no_space)
    result = run("x", model=models.DEFAULT_MODEL)
    assert re.fullmatch(
        r"error: cannot write the default model \(about 550 MB\) to .*; set TREEPASS_CACHE to a folder .*",
        error_line(result),
    )
    assert result.exit_code == 1


@posix
@pytest.mark.arch
def test_a_closed_pipe_ends_without_a_word(folders):
    with start(folders, "abc", "--max-new-tokens", "50000", model="long") as process:
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=20) == 1


@pytest.mark.arch
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's full device")
@pytest.mark.parametrize("json_too", [(), ("--json",)], ids=["text", "json"])
def test_a_full_disk(folders, json_too):
    with open("/dev/full", "w") as full, start(folders, "abc", *json_too, stdout=full) as process:
        line = "error: cannot write the output: No space left on device; free some space or write elsewhere\n"
        assert process.stderr.read() == line
        assert process.wait(timeout=20) == 1


@posix
@pytest.mark.arch
def test_ctrl_c_keeps_the_text_and_whole_lines(folders, tmp_path):
    path = tmp_path / "trace.jsonl"
    arguments = ("abc", "--max-new-tokens", "50000", "--trace", str(path), "--compare")
    with start(folders, *arguments, model="long") as process:
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    records = [json.loads(line) for line in path.read_text().splitlines()]
    ids = [token for record in records for token in record["emitted"]]
    tokenizer = AutoTokenizer.from_pretrained(folders["long"])
    assert begun + rest == escape_controls(tokenizer.decode(ids)) + "\n"
    assert errors.startswith(f"tokens                  {len(ids)} (interrupted)\n")
    assert "Traceback" not in errors


@posix
@pytest.mark.arch
def test_ctrl_c_still_gives_the_document(folders, tmp_path):
    path = tmp_path / "trace.jsonl"
    with start(folders, "abc", "--max-new-tokens", "50000", "--json", "--trace", str(path), model="long") as process:
        while not (path.exists() and path.stat().st_size):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    facts = json.loads(out)
    assert (process.returncode, errors) == (130, "")
    assert facts["finish_reason"] == "interrupted"
    assert facts["passes"] == len(path.read_text().splitlines()) >= 1


@pytest.mark.arch
@pytest.mark.parametrize("moment", ["warm-up", "generate", "plain"])
def test_ctrl_c_in_the_comparison_keeps_the_text(run, monkeypatch, moment):
    comparer = treepass.cli.comparison.Comparer
    method = {"warm-up": "warm_up", "generate": "_generate", "plain": "_run_plain"}[moment]
    real = getattr(comparer, method)
    calls = []

    def interrupted(self, *arguments):
        calls.append(method)
        if moment != "generate" or len(calls) == 2:  # the first one is the warm-up
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments)

    monkeypatch.setattr(comparer, method, interrupted)
    result = run("abc", "--max-new-tokens", 40, "--compare", "--json")
    assert result.exit_code == 130
    facts = json.loads(result.stdout)
    assert set(facts) == EVERY_DOCUMENT | GENERATE | SETTINGS | COMPARE
    assert facts["generate"] is facts["plain"] is facts["identical"] is None
    written = (0, "interrupted") if moment == "warm-up" else (40, "length")
    assert (facts["new_tokens"], facts["finish_reason"]) == written


@pytest.mark.arch
def test_generate_of_transformers_stops_between_two_tokens(folders):
    decoder = treepass.TreeDecoder(treepass.load(folders["tiny"], dtype="float32", device="cpu").model)
    written = []
    comparer = treepass.cli.comparison.Comparer(
        decoder, [1, 2, 3], SamplingParams(), LiveLine(), should_stop=lambda: len(written) == 5
    )
    assert len(comparer._generate([1, 2, 3], 40, (), written.append).ids) == 5
    assert written == [1, 2, 3, 4, 5]


class Screen:
    """A process whose stdout, stderr or both are a terminal."""

    def __init__(self, folders, *arguments, both=True, model="tiny", **environment):
        import pty

        self._ours, theirs = pty.openpty()
        self.process = start(
            folders,
            *arguments,
            model=model,
            stdin=subprocess.DEVNULL,
            stdout=theirs if both else subprocess.PIPE,
            stderr=theirs,
            environment={"TERM": "xterm-256color", "COLORTERM": "truecolor"} | environment,
        )
        os.close(theirs)
        self.shown = ""

    def read(self, until=None):
        """Reads the screen up to some words, or to the end."""
        chunks = self.shown.encode()
        while until is None or until not in self.shown:
            assert select.select([self._ours], [], [], 60)[0], self.shown
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # Linux's end of a terminal
                break
            if not chunk:
                break
            chunks += chunk
            self.shown = chunks.decode(errors="ignore").replace("\r\n", "\n")
        return self.shown

    def close(self):
        code = self.process.wait(timeout=20)
        os.close(self._ours)
        return code


STYLE = re.compile(r"\x1b\[[\d;]*m")


@posix
@pytest.mark.arch
def test_a_terminal_shows_kinds_of_tokens_and_no_escape_of_the_model(folders, run):
    facts = document(run("abc", "--max-new-tokens", 150, "--json", model="escapes"))
    assert facts["text"].count("\x1b") > 3
    screen = Screen(folders, "abc", "--max-new-tokens", "150", model="escapes")
    shown = screen.read()
    assert screen.close() == 0
    assert "\rloading" in shown
    text = shown[shown.index("\x1b[") :]
    assert "\x1b" not in STYLE.sub("", text)
    body, summary = STYLE.sub("", text).split("\n\n", 1)
    # A tab moves the cursor, which rich writes as spaces.
    assert re.sub(r"[ \t]+", " ", body) == re.sub(r"[ \t]+", " ", escape_controls(facts["text"]))
    accepted = facts["new_tokens"] - facts["passes"]
    assert re.match(rf"{accepted} accepted   \d+ corrected", summary)
    assert "\x1b[4;38;2;0;158;115m" in text  # underlined, bluish green
    assert "\x1b[38;2;213;94;0m" in text  # vermillion
    assert re.search(r"│ tokens +│ 150 \(the limit was reached\) +│", summary)


@posix
@pytest.mark.arch
def test_without_colour_the_underlines_remain(folders):
    screen = Screen(folders, "abc", "--max-new-tokens", "150", NO_COLOR="1")
    shown = screen.read()
    assert screen.close() == 0
    assert "\x1b[4m" in shown
    assert not re.search(r"\x1b\[[\d;]*38;", shown)


@posix
@pytest.mark.arch
def test_a_pipe_with_a_terminal_for_errors_shows_live_speed(folders):
    screen = Screen(folders, "abc", "--max-new-tokens", "50000", "--json", both=False, model="long")
    shown = screen.read(until="tokens/s")
    screen.process.send_signal(signal.SIGINT)
    out = screen.process.stdout.read()
    assert re.search(r"\rwriting: \d+ tokens, \d\.\d\d tokens per pass, \d+\.\d tokens/s", shown)
    assert json.loads(out)["finish_reason"] == "interrupted"
    rest = screen.read()
    assert rest.endswith("\r")  # the line is gone
    assert screen.close() == 130


@posix
@pytest.mark.arch
def test_ctrl_c_while_the_model_loads_is_one_line(folders):
    screen = Screen(folders, "abc", both=False)
    screen.read(until="loading")
    screen.process.send_signal(signal.SIGINT)
    assert re.sub(r"\r *", "\r", screen.read()).endswith("\rerror: interrupted\n")
    assert screen.process.stdout.read() == ""
    assert screen.close() == 130


@pytest.mark.model
def test_default_model_writes_what_generate_writes(tmp_path, default_model):
    arguments = ["generate", "Count from 1 to 10.", "--max-new-tokens", "40", "--dtype", "float32", "--device", "cpu"]
    result = CliRunner().invoke(treepass.cli.app, [*arguments, "--compare", "--json"])
    facts = document(result)
    ids = encode(default_model.tokenizer, "Count from 1 to 10.", raw=False)
    expected = default_model.model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)
    assert facts["ids"] == expected[0, len(ids) :].tolist()
    assert facts["identical"] is True or facts["first_difference"]["near_tie"]
    assert facts["model"] == "smollm2-135m"
    assert facts["tokens_per_pass"] > 1
    streamed = CliRunner().invoke(treepass.cli.app, arguments)
    assert streamed.stdout.rstrip("\n") == facts["text"].rstrip("\n")
