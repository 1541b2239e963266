"""What ``treepass generate`` is made of: whole characters, kinds of tokens, Ctrl-C, traces, progress, warnings."""

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treepass.cli import interrupt, progress
from treepass.cli.interrupt import Interrupts
from treepass.cli.progress import CaughtWarnings, LiveLine, Speedometer
from treepass.cli.text import STYLES, TextStream, roles
from treepass.cli.trace import Trace
from treepass.errors import TreepassError, TreepassWarning
from treepass.record import PassRecord, PassTimes

pytestmark = pytest.mark.unit


class Bytes:
    """A tokenizer with one token per byte; 256 and above are special tokens without text."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class ByteFallback(Bytes):
    """As the byte fallback of SentencePiece models: a run of bytes with a fault in it is nothing but replacements."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        run = bytes(token for token in ids if token < 256)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class Words:
    """A tokenizer with one token per word, whose decoder strips the first space, as SentencePiece's does."""

    words = ("", "▁the", "▁sea", "s", "▁", "▁is")

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(self.words[token] for token in ids).replace("▁", " ").removeprefix(" ")


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


def record(nodes=3, path=(1, 2), emitted=(7, 8, 9), ended="bonus", index=0):
    n = len(emitted)
    return PassRecord(
        sequence=0,
        index=index,
        context_length=4,
        tokens=tuple(range(nodes + 1)),
        parents=tuple(range(-1, nodes)),
        path_prob=(1.0,) * (nodes + 1),
        ranks=(0,) * (nodes + 1),
        path=path,
        emitted=emitted,
        logprobs=(-1.0,) * n,
        scores=(1.0,) * n,
        ended=ended,
        times=PassTimes(),
    )


def test_a_character_comes_with_its_last_byte():
    ids = list("aé漢😀".encode())
    assert pieces(Bytes(), ids) == ["a", "", "é", "", "", "漢", "", "", "", "😀", ""]


def test_a_token_may_end_one_character_and_begin_the_next():
    class Split:
        table = (b"\xe2", b"\x82\xac\xe2", b"\x82\xac")

        def decode(self, ids, **_):
            return b"".join(self.table[token] for token in ids).decode(errors="replace")

    assert pieces(Split(), [0, 1, 1, 1, 2]) == ["", "€", "€", "€", "€", ""]


@pytest.mark.parametrize("tokenizer", [Bytes(), ByteFallback()], ids=["bytes", "byte fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)) | st.sampled_from("é€👩\u200d😀"), max_size=30))
def test_no_valid_text_is_ever_broken(tokenizer, text):
    given_out = pieces(tokenizer, text.encode())
    assert "".join(given_out) == text
    assert "\ufffd" in text or "\ufffd" not in "".join(given_out)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 260) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F]), max_size=40))
def test_broken_bytes_and_special_tokens_give_the_text_of_all_ids(ids):
    assert "".join(pieces(Bytes(), ids)) == Bytes().decode(ids, True, False)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=20))
def test_spaces_are_those_of_the_whole_text(ids):
    assert "".join(pieces(Words(), ids)) == Words().decode(ids, True, False)


def test_bytes_without_an_end_are_not_held_back_for_ever():
    assert "".join(pieces(Bytes(), [0xE2] * 50)[:-1]) == "\ufffd" * 47


def test_long_texts_are_decoded_in_short_windows():
    longest = 0

    class Measured(Bytes):
        def decode(self, ids, **options):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, **options)

    assert "".join(pieces(Measured(), b"tree " * 200)) == "tree " * 200
    assert longest <= 8


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (record(), ["accepted", "accepted", "bonus"]),
        (record(ended="correction"), ["accepted", "accepted", "correction"]),
        (record(path=(), emitted=(7,), ended="correction"), ["correction"]),
        (record(path=(1, 2), emitted=(7, 8), ended="accepted"), ["accepted", "accepted"]),
        (record(nodes=0, path=(), emitted=(7,)), ["plain"]),
    ],
    ids=["bonus", "correction", "nothing accepted", "cut", "no draft"],
)
def test_roles(of, expected):
    assert list(roles(of)) == list(zip(of.emitted, expected, strict=True))


def test_kinds_differ_in_more_than_colour():
    from rich.style import Style

    without_colour = [str(Style.parse(STYLES[role]).without_color) for role in ("accepted", "correction", "bonus")]
    assert len(set(without_colour)) == 3


def test_an_interrupt_is_raised_at_first_and_then_noted():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
    with Interrupts() as interrupts, interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interrupt_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(interrupt.os, "_exit", left.append)
    with Interrupts() as interrupts, interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        assert left == []
        signal.raise_signal(signal.SIGINT)
    assert left == [130]


def test_an_interrupt_that_surfaces_as_another_error_is_one_still():
    def imports():
        with Interrupts():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("numpy failed to import") from error

    with pytest.raises(KeyboardInterrupt):
        imports()


def test_an_interrupt_that_was_swallowed_is_raised_before_the_first_pass():
    def goes_on():
        with Interrupts() as interrupts:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
            with interrupts.deferred():
                pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        goes_on()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_two_interrupts_end_a_process_that_does_not_listen():
    script = (
        "import time\n"
        "from treepass.cli.interrupt import Interrupts\n"
        "with Interrupts() as interrupts, interrupts.deferred():\n"
        "    print('ready', flush=True)\n"
        "    while not interrupts.requested: time.sleep(0.01)\n"
        "    print('noted', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "noted\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 130


def test_trace_overwrites_when_the_first_pass_is_about_to_run(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n")
    with Trace(path) as trace:
        assert path.read_text() == "old\n"
        trace.start()
        trace.write(record())
        (line,) = path.read_text().splitlines()  # there before the file is closed
        trace.write(record(index=1))
    assert json.loads(line)["schema"] == "treepass.pass/1"
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1]


def test_trace_leaves_things_as_they_were_if_no_pass_runs(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old\n")
    for path in (old, new):
        with Trace(path):
            pass
    assert old.read_text() == "old\n"
    assert not new.exists()


def test_trace_on_a_full_disk_ends_with_a_whole_line(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    real = os.write
    calls = 0

    def half(descriptor, data):
        nonlocal calls
        calls += 1
        if calls == 2:
            return real(descriptor, data[:10])
        if calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with Trace(path) as trace:
        trace.start()
        monkeypatch.setattr(os, "write", half)
        trace.write(record())
        with pytest.raises(TreepassError, match=r"cannot write the trace .*: No space left on device"):
            trace.write(record(index=1))
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["index"] == 0


@pytest.mark.parametrize("path", ["missing/trace.jsonl", ".", "nul\0"])
def test_trace_refuses_a_path_that_cannot_be_written(tmp_path, path):
    with pytest.raises(TreepassError, match=r"cannot write the trace '.*': .*; give --trace a writable path"):
        Trace(tmp_path / path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_line_overwrites_itself_and_goes(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LiveLine() as live:
        live.show("loading 漢字\x1b[2J")
        live.show("ab")
    assert sys.stderr.getvalue() == "\rloading 漢字\\x1b[2J\rab" + " " * 17 + "\r  \r"


def test_live_line_never_wraps(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    LiveLine().show("x" * 500)
    assert sys.stderr.getvalue() == "\r" + "x" * 79


def test_live_line_is_silent_without_a_terminal(capsys):
    with LiveLine() as live:
        live.show("loading")
    assert capsys.readouterr().err == ""


def test_speed_shows_after_two_seconds_and_not_too_often(monkeypatch):
    shown = []
    clock = iter([10.0, 11.9, 12.0, 12.05, 14.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    live = LiveLine()
    monkeypatch.setattr(live, "show", shown.append)
    speed = Speedometer(live, "writing")
    for tokens, passes in ((4, 1), (20, 6), (24, 8), (26, 9), (44, 16)):
        speed.update(tokens, passes)
    assert shown == [
        "writing: 24 tokens, 3.00 tokens per pass, 10.0 tokens/s",
        "writing: 44 tokens, 2.75 tokens per pass, 10.0 tokens/s",
    ]


def test_warnings_are_one_line_each_shown_once(capsys):
    with CaughtWarnings() as caught:
        warnings.warn("a drafter\nfailed \x1b[2J", TreepassWarning, stacklevel=1)
        assert capsys.readouterr().err == ""
        caught.show()
        assert capsys.readouterr().err == "warning: a drafter failed \\x1b[2J\n"
        caught.add(["a drafter\nfailed \x1b[2J", "another"])
    assert capsys.readouterr().err == "warning: another\n"
    assert caught.messages == ["a drafter failed \x1b[2J", "another"]
