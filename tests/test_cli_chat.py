"""``treepass chat``: turns equal fresh decodings, rows are reused, commands, interrupts, errors."""

import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest
import torch
from test_cli_generate import EVERY_DOCUMENT, STYLE, byte_tokenizer, posix, swapped
from typer.main import get_command
from typer.testing import CliRunner

import treepass
import treepass.cli
from treepass import models
from treepass.cli.chat import COMMANDS
from treepass.cli.completion import Writing
from treepass.cli.interrupt import Interrupts
from treepass.cli.output import escape_controls
from treepass.testing import tiny_llama, tiny_recurrent

CHAT = {
    *("turn", "text", "ids", "prompt_tokens", "prompt_rows", "new_tokens", "passes", "tokens_per_pass"),
    *("finish_reason", "seconds"),
}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
END = 256


def chat_tokenizer(template=TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def readable(model):
    """The model, kept to letters: its answers are tokenised again as it wrote them."""
    letters = set(byte_tokenizer()("abcdefghijklmnopqrstuvwxyz ")["input_ids"])
    model.generation_config.suppress_tokens = [token for token in range(257) if token not in letters]
    return model


def ending(model):
    """The model, with the end token in place of one that it soon writes."""
    prompt = torch.tensor([chat_ids([("user", "abc")])])
    written = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :].tolist()
    capital = byte_tokenizer()("A")["input_ids"][0]  # ids up to here are no letters and brackets of the template
    end = next(token for i, token in enumerate(written) if i >= 5 and token not in written[:i] and token <= capital)
    model = swapped(model, end, END)
    model.generation_config.eos_token_id = END
    return model


def chat_ids(turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    return chat_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny models of bytes, by name."""
    root = tmp_path_factory.mktemp("chatting")
    broken = tiny_llama(vocab_size=257)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    made = {
        "tiny": tiny_llama(vocab_size=257, max_position_embeddings=1024),
        "readable": readable(tiny_llama(vocab_size=257, max_position_embeddings=1024)),
        "ending": ending(tiny_llama(vocab_size=257, max_position_embeddings=1024)),
        "short": tiny_llama(vocab_size=257, max_position_embeddings=96),
        "long": readable(tiny_llama(vocab_size=257, max_position_embeddings=100_000)),
        "escapes": swapped(tiny_llama(vocab_size=257), *byte_tokenizer()("x\x1b")["input_ids"]),
        "recurrent": tiny_recurrent(vocab_size=257),
        "nan": broken,
        "bare": tiny_llama(vocab_size=257),
        "fussy": tiny_llama(vocab_size=257),
    }
    templates = {"bare": None, "fussy": "{{ raise_exception('no users here') }}"}
    for name, model in made.items():
        model.save_pretrained(root / name)
        chat_tokenizer(templates.get(name, TEMPLATE)).save_pretrained(root / name)
    return {name: str(root / name) for name in made}


@pytest.fixture
def run(folders):
    """Runs ``treepass chat`` on lines from a pipe, in this process."""

    def chat(*arguments, lines=(), model="tiny"):
        stdin = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines)
        command = ["chat", "--model", folders.get(model, model), "--dtype", "float32", "--device", "cpu"]
        return CliRunner().invoke(treepass.cli.app, [*command, *map(str, arguments)], input=stdin, prog_name="treepass")

    return chat


def documents(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def fresh(folder, turns, **settings):
    """What a new decoder writes after these turns, without a tree and without a cache of anything before."""
    decoder = treepass.TreeDecoder(treepass.load(folder, dtype="float32", device="cpu").model, "none", nodes=0)
    return decoder.generate(chat_ids(turns), **settings).ids[0]


def start(folders, *arguments, model, **streams):
    options = ["--model", folders[model], "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.Popen(
        [sys.executable, "-m", "treepass", "chat", *options, *arguments],
        **streams,
        env=kept | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )


@pytest.mark.unit
def test_every_option_is_documented():
    commands = get_command(treepass.cli.app).commands
    shown = CliRunner().invoke(treepass.cli.app, ["chat", "--help"], prog_name="treepass").stdout
    parameters = {parameter.name: parameter for parameter in commands["chat"].params}
    for parameter in parameters.values():
        assert parameter.help, parameter.name
        assert all(f"  {option}" in shown for option in parameter.opts)
    assert set(parameters) == set(inspect.signature(treepass.cli.chat).parameters)
    for parameter in commands["generate"].params:
        if parameter.name in parameters:
            assert parameters[parameter.name].default == parameter.default
    for command in COMMANDS:
        assert command in shown


@pytest.mark.arch
@pytest.mark.parametrize("model", ["tiny", "readable", "ending"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 40, "seed": 3}], ids=["greedy", "sampled"])
def test_turns_are_fresh_decodings_of_the_template(run, folders, model, sampling):
    options = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", value)]
    system = ("--system", "be brief")
    lines = ["abc", "what else", "abc"]
    facts = documents(run("--json", "--max-new-tokens", 40, *system, *options, lines=lines, model=model))
    turns = [("system", "be brief")]
    for number, (line, turn) in enumerate(zip(lines, facts, strict=True), 1):
        turns.append(("user", line))
        assert turn["ids"] == fresh(folders[model], turns, max_new_tokens=40, **sampling)
        assert (turn["turn"], turn["prompt_tokens"], turn["new_tokens"]) == (
            *(number, len(chat_ids(turns))),
            len(turn["ids"]),
        )
        assert turn["text"] == chat_tokenizer().decode(turn["ids"], skip_special_tokens=True)
        turns.append(("assistant", turn["text"]))


@pytest.mark.arch
def test_the_end_token_is_no_part_of_the_conversation(run):
    first, second = documents(run("--json", "--max-new-tokens", 40, lines=["abc", "def"], model="ending"))
    assert (first["ids"][-1], first["finish_reason"]) == (END, "stop")
    assert "<end>" not in first["text"]
    assert second["prompt_tokens"] == len(chat_ids([("user", "abc"), ("assistant", first["text"]), ("user", "def")]))


@pytest.mark.arch
@pytest.mark.parametrize("model", ["tiny", "readable"])
def test_rows_of_what_was_said_are_reused(run, model):
    first, second = documents(run("--json", "--max-new-tokens", 30, lines=["abc", "de"], model=model))
    before = chat_ids([("user", "abc")])
    after = chat_ids([("user", "abc"), ("assistant", first["text"]), ("user", "de")])
    assert first["prompt_rows"] == len(before) - 1
    # The last token that was written has no row yet.
    written = [*before, *first["ids"]][:-1]
    common = next((i for i, (a, b) in enumerate(zip(after, written, strict=False)) if a != b), len(written))
    assert second["prompt_rows"] == len(after) - 1 - common
    if model == "readable":
        assert second["prompt_rows"] == len("?[user]de[assistant") < len(before)
    else:
        assert len(before) <= common < len(written)  # some bytes were no characters


@pytest.mark.arch
def test_the_first_pass_of_a_turn_stands_on_the_rows_before(run, monkeypatch):
    seen = []
    real = Writing._on_pass
    monkeypatch.setattr(Writing, "_on_pass", lambda self, record: (seen.append(record), real(self, record)))
    facts = documents(run("--json", "--max-new-tokens", 20, lines=["abc", "de"], model="readable"))
    firsts = [record.context_length for record in seen if record.index == 0]
    assert firsts == [turn["prompt_tokens"] - 1 for turn in facts]
    assert len(seen) == sum(turn["passes"] for turn in facts)


@pytest.mark.arch
def test_text_goes_to_stdout_without_a_code(run):
    lines = ["abc", "def"]
    result = run("--max-new-tokens", 60, lines=lines, model="escapes")
    facts = documents(run("--max-new-tokens", 60, "--json", lines=lines, model="escapes"))
    assert any("\x1b" in turn["text"] for turn in facts)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "".join(escape_controls(turn["text"]) + "\n" for turn in facts)
    assert "\x1b" not in result.stdout


@pytest.mark.arch
def test_documents(run):
    result = run("--json", "--max-new-tokens", 9, "--seed", 5, "--nodes", 4, lines=["abc", "", "/help", "d"])
    facts = documents(result)
    assert [turn["turn"] for turn in facts] == [1, 2]
    for turn in facts:
        assert set(turn) == EVERY_DOCUMENT | CHAT
        assert (turn["schema"], turn["dtype"], turn["device"]) == ("treepass.chat/1", "float32", "cpu")
        assert (turn["seed"], turn["new_tokens"], turn["finish_reason"]) == (5, 9, "length")
        assert turn["tokens_per_pass"] == turn["new_tokens"] / turn["passes"]
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["/clear", "/exit", "/help"]


@pytest.mark.arch
def test_commands(run):
    options = ("--json", "--max-new-tokens", 9, "--system", "s")
    asked, after, last = documents(run(*options, lines=["abc", "  ", "def", " /clear ", "abc", "/exit", "def"]))
    assert (asked["turn"], after["turn"], last["turn"]) == (1, 2, 3)
    assert last["ids"] == asked["ids"]
    assert last["prompt_tokens"] == asked["prompt_tokens"] == len(chat_ids([("system", "s"), ("user", "abc")]))
    assert after["prompt_tokens"] > asked["prompt_tokens"]
    assert last["prompt_rows"] < asked["prompt_rows"]  # the system message has its rows
    result = run(*options, lines=["/claer", "/etc/hosts ends in"])
    assert result.exit_code == 1
    assert result.stderr == (
        "error: unknown command '/claer', known are: /clear, /exit, /help; did you mean '/clear'?\n"
    )
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.arch
def test_a_conversation_that_is_too_long_is_refused_and_goes_on(run):
    lines = ["abc", "x" * 60, "x" * 200, "/clear", "x" * 200, "abc"]
    result = run("--json", "--max-new-tokens", 40, lines=lines, model="short")
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert [turn["turn"] for turn in facts] == [1, 2]
    assert facts[0]["ids"] == facts[1]["ids"]
    first, second, third = result.stderr.splitlines()
    tail = "tokens, but the model's maximum is 96 with at least one new token"
    assert re.fullmatch(rf"error: the conversation has \d+ {tail}; /clear forgets it", first)
    assert re.fullmatch(rf"error: the conversation has \d+ {tail}; /clear forgets it", second)
    assert third == f"error: the message makes {len(chat_ids([('user', 'x' * 200)]))} {tail}; shorten it"


@pytest.mark.arch
def test_an_answer_is_cut_at_the_end_of_the_positions(run):
    result = run("--json", "--max-new-tokens", 400, lines=["abc"], model="short")
    (turn,) = documents(result)
    assert turn["prompt_tokens"] + turn["new_tokens"] == 96
    assert result.stderr.startswith(f"warning: max_new_tokens was cut from 400 to {turn['new_tokens']} by ")


@pytest.mark.arch
@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("bare", "model '.*bare' has no chat template, .*; continue a text with treepass generate"),
        ("fussy", r"the model's chat template cannot be applied \(.*no users here\); use treepass generate --raw"),
        ("/nonexistent", "model folder '/nonexistent' does not exist; give a folder written by save_pretrained"),
        ("recurrent", "cannot decode trees with model type 'mamba': .*"),
        ("nan", r"the target's logits at node 0 \(position \d+\) are NaN, .*"),
    ],
    ids=["no template", "template fails", "missing", "recurrent", "NaN"],
)
@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["text", "json"])
def test_errors_are_one_line(run, model, line, mode):
    result = run(*mode, lines=["abc", "def"], model=model)
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(f"error: {line}\n", result.stderr)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1, got 0"),
        (["--threads", 0], "--threads must be at least 1, got 0"),
        (["--nodes", 513], "--nodes must be from 0 to 512, got 513"),
        (["--drafter", "sufix"], "unknown drafter 'sufix', .*; did you mean 'suffix'\\?"),
        (["--dtype", "float8"], "unknown dtype 'float8', .*"),
        (["--temperature", -0.5], "temperature must be finite and >= 0, got -0.5"),
        (["--system", "\udcff"], "the system message is not valid text: .*"),
    ],
    ids=str,
)
def test_arguments_are_refused_before_the_model_is_loaded(run, monkeypatch, arguments, line):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("loaded"))
    result = run(*arguments, lines=["abc"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(f"error: {line}\n", result.stderr)


@pytest.mark.arch
def test_a_line_that_is_no_text_costs_no_other(run):
    result = run("--json", "--max-new-tokens", 5, lines=b"abc\n\xff\xfe\ndef")
    assert result.exit_code == 1
    assert [json.loads(line)["turn"] for line in result.stdout.splitlines()] == [1, 2]
    assert re.fullmatch("error: the message is not valid utf-8 text: .*\n", result.stderr)


@pytest.mark.arch
def test_ctrl_c_ends_the_answer_and_not_the_conversation(run, folders, monkeypatch):
    real = Writing._on_pass
    passes = []

    def interrupted(self, record):
        real(self, record)
        passes.append(record)
        if record.index == 2 and sum(one.index == 2 for one in passes) <= 2:  # in the first two answers
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Writing, "_on_pass", interrupted)
    facts = documents(run("--json", "--max-new-tokens", 60, lines=["abc", "def", "ghi"], model="readable"))
    assert [turn["finish_reason"] for turn in facts] == ["interrupted", "interrupted", "length"]
    assert [turn["passes"] for turn in facts[:2]] == [3, 3]
    turns = [("user", "abc"), ("assistant", facts[0]["text"]), ("user", "def"), ("assistant", facts[1]["text"])]
    assert facts[2]["ids"] == fresh(folders["readable"], [*turns, ("user", "ghi")], max_new_tokens=60)


@pytest.mark.unit
def test_a_part_of_a_command_can_be_interrupted_again_and_again():
    with Interrupts() as interrupts:
        for _ in range(3):
            with interrupts.one_of_many():
                assert not interrupts.requested
                signal.raise_signal(signal.SIGINT)
                assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@posix
@pytest.mark.arch
def test_ctrl_c_in_a_pipe(folders):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(folders, "--max-new-tokens", "50000", model="long", **streams) as process:
        for message in ("abc", "def"):
            process.stdin.write(message + "\n")
            process.stdin.flush()
            assert len(process.stdout.read(20)) == 20
            process.send_signal(signal.SIGINT)
            while process.stdout.read(1) != "\n":
                assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=20) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def words(shown):
    """What a terminal was shown, without styles and line breaks."""
    return re.sub(r"\s+", " ", STYLE.sub("", shown))


class Talk:
    """A process whose three streams are one terminal."""

    def __init__(self, folders, *arguments, model):
        import pty

        self._ours, theirs = pty.openpty()
        self.process = start(folders, *arguments, model=model, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self._shown = ""

    def type(self, text):
        os.write(self._ours, text.encode())

    def read(self, until=None):
        """What has come since the last call, up to some words or to the end."""
        while until is None or not re.search(until, self._shown):
            assert select.select([self._ours], [], [], 60)[0], self._shown
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # Linux's end of a terminal
                break
            if not chunk:
                break
            self._shown += chunk.decode(errors="replace").replace("\r\n", "\n")
        shown, self._shown = self._shown, ""
        return shown

    def close(self):
        code = self.process.wait(timeout=20)
        os.close(self._ours)
        return code


@posix
@pytest.mark.arch
def test_a_terminal(folders, run):
    lines = ["abc", "de"]
    facts = documents(run("--json", "--max-new-tokens", 40, lines=lines, model="readable"))
    talk = Talk(folders, "--max-new-tokens", "40", model="readable")
    assert "readable, float32 on cpu; /help lists the commands > " in words(talk.read(until="> $"))
    for line, turn in zip(lines, facts, strict=True):
        talk.type(line + "\n")
        shown = talk.read(until="\n> $")
        assert "\x1b[4;38;2;0;158;115m" in shown  # accepted: underlined, bluish green
        assert "\x1b[2m" in shown
        plain = words(shown)
        reused = turn["prompt_tokens"] - 1 - turn["prompt_rows"]
        assert re.sub(r"\s+", " ", turn["text"]).strip() in plain
        assert re.search(
            rf"40 tokens \(the limit was reached\), {turn['tokens_per_pass']:.2f} per pass, [\d.]+ tokens/s, "
            rf"{reused} of {turn['prompt_tokens']} prompt rows reused > $",
            plain,
        )
    talk.type("\x04")
    assert talk.read() == "\n"
    assert talk.close() == 0


@posix
@pytest.mark.arch
def test_ctrl_c_on_a_terminal(folders):
    talk = Talk(folders, "--max-new-tokens", "50000", model="long")
    talk.read(until="> $")
    talk.type("abc\n")
    talk.read(until=r"\x1b\[4;38;2;0;158;115m")
    talk.process.send_signal(signal.SIGINT)
    assert re.search(r"tokens \(interrupted\), ", talk.read(until="\n> $"))
    talk.process.send_signal(signal.SIGINT)
    assert talk.read() == "\n"
    assert talk.close() == 0


@pytest.mark.model
def test_the_default_model_remembers(default_model):
    command = ["chat", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--json"]
    lines = "What is the capital of France?\nAnd of Italy?\n"
    first, second = documents(CliRunner().invoke(treepass.cli.app, command, input=lines))
    assert ("Paris" in first["text"], "Rome" in second["text"]) == (True, True)
    turns = [("user", "What is the capital of France?"), ("assistant", first["text"]), ("user", "And of Italy?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = default_model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    expected = default_model.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert second["ids"] == expected[0, len(ids) :].tolist()
    assert second["prompt_rows"] < 20 < second["prompt_tokens"]
