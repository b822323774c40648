"""Conversations and interrupts as a user meets them: real processes, piped lines and a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from commands import COMMAND, ENVIRONMENT, PROMPT, inside
from decodery.cli.chat_input import HISTORY, editor
from decodery.cli.conversation import Conversation
from decodery.cli.decode import decode
from decodery.core.errors import PromptError
from decodery.llm.llm import LLM, Output

GENERATE = ["generate", PROMPT, "--ignore-eos", "--max-new-tokens", "8000"]


def test_interrupted_generate_keeps_its_text(model: Path) -> None:
    command = [*COMMAND, *GENERATE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        text = process.stdout.read(1)
        process.send_signal(signal.SIGTERM)
        text += process.stdout.read()
        assert (process.wait(60), process.stderr.read()) == (143, "")
    assert text.endswith("\n") and 1 < len(text) < 4000


class Interrupted(io.StringIO):
    """Output whose reader presses Ctrl-C as it sees the first of it."""

    pressed = False

    def write(self, text: str) -> int:
        if text and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.usefixtures("loaded")
def test_ctrl_c_ends_generate_without_an_error() -> None:
    status, text, errors = inside(*GENERATE, output=Interrupted())
    assert (status, errors) == (0, "")
    assert text.endswith("\n") and 1 < len(text) < 4000


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_generation_between_passes(smollm2_int8: LLM, kind: signal.Signals) -> None:
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len("".join(pieces)) > 20 and not interrupted:
            interrupted.append(True)
            signal.raise_signal(kind)

    interrupted: list[bool] = []
    lm = smollm2_int8
    before = signal.getsignal(kind)
    (output,) = decode(lm, [lm.request(lm.encode(PROMPT), ignore_eos=True)], write)
    assert output.finish_reason == "cancelled" and output.text == "".join(pieces)
    assert 0 < len(output.tokens) < 256
    assert signal.getsignal(kind) is before


def test_chat_reads_only_what_is_new(smollm2_int8: LLM) -> None:
    def prefilled(output: Output) -> int:
        return sum(step.rows for step in output.trace.steps if step.prefill)

    conversation = Conversation(smollm2_int8, {"max_new_tokens": 40})
    first = conversation.say("Name three colours.", lambda piece: None)
    second = conversation.say("And three animals?", lambda piece: None)
    tokens = smollm2_int8.encode(conversation.messages[:3])
    assert prefilled(first) == len(first.prompt_tokens)
    assert prefilled(second) < len(tokens) - len(first.tokens)
    fresh = smollm2_int8.generate(conversation.messages[:3], max_new_tokens=40)
    assert fresh.tokens == second.tokens


def test_a_failed_turn_leaves_the_conversation_as_it_was(smollm2_int8: LLM) -> None:
    conversation = Conversation(smollm2_int8, {"max_new_tokens": 8})
    conversation.say("Hello", lambda piece: None)
    kept = list(conversation.messages)
    with pytest.raises(PromptError, match="context"):
        conversation.say("tide " * 9000, lambda piece: None)
    assert conversation.messages == kept
    assert conversation.say("Bye", lambda piece: None).text


@pytest.mark.usefixtures("loaded")
def test_chat_with_piped_lines() -> None:
    lines = "Name a colour.\n\n/what\nAnother one.\n/reset\nName a colour.\n/exit\nHi\n"
    code, output, errors = inside("chat", "--max-new-tokens", "16", text=lines)
    assert code == 0
    figures = [line for line in errors.splitlines() if line.startswith("[")]
    sizes = [int(re.search(r"context (\d+) of 8192", line)[1]) for line in figures]  # type: ignore[index]
    assert len(sizes) == 3 and sizes[0] == sizes[2] < sizes[1]
    assert "there is no /what" in errors
    assert ">" not in output and "context" not in output and len(output.splitlines()) >= 3


@pytest.mark.usefixtures("loaded")
def test_piped_lines_that_all_fail_end_with_status_1() -> None:
    code, output, errors = inside("chat", text="tide " * 9000 + "\n/what\n")
    assert (code, output) == (1, "")
    first, second = errors.splitlines()
    assert re.fullmatch(r"decodery: this turn has 9\d{3} tokens, and the model's context 8192: shorten it", first)
    assert second.startswith("decodery: there is no /what")


@pytest.mark.usefixtures("loaded")
def test_commands_of_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = f"/system Answer in French.\nName a colour.\n/save {path}\n/save {path}\n/save\n/help\n/system\n/reset\n"
    code, output, errors = inside("chat", "--max-new-tokens", "8", text=lines)
    assert code == 0
    assert json.loads(path.read_text()) == [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": output.removesuffix("\n")},
    ]
    for said in ("is set", f"{path} exists already", "as in /save talk.json", "/system TEXT", "no system message now"):
        assert said in errors


@pytest.mark.usefixtures("loaded")
def test_a_policy_without_an_end_drops_no_turn() -> None:
    code, _, errors = inside("chat", "--max-new-tokens", "4", "--cache-policy", "streaming-llm", text="Hi\n")
    assert code == 0 and re.search(r"context \d+\]", errors)


def test_a_full_context_drops_the_oldest_turns(smollm2_int8: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(smollm2_int8.model, "config", replace(smollm2_int8.model.config, max_positions=200))
    conversation, dropped = Conversation(smollm2_int8, {"max_new_tokens": 8}), list[int]()
    conversation.instruct("Be brief.")
    for number in range(8):
        output = conversation.say(f"Say {'tide ' * 20} {number}", lambda piece: None, dropped.append)
        assert len(output.prompt_tokens) + 8 <= 200
    assert dropped and all(turns > 1 for turns in dropped) and len(dropped) < 4
    assert conversation.messages[-2]["content"].endswith("7")
    rendered = [{"role": "system", "content": "Be brief."}, *conversation.messages[:-1]]
    assert list(output.prompt_tokens) == list(smollm2_int8.encode(rendered))
    with pytest.raises(PromptError, match="with the system message, and the model's context 200: shorten it"):
        conversation.say("tide " * 200, lambda piece: None, dropped.append)


@pytest.mark.parametrize(
    ("keys", "turn"),
    [
        ("\x1b[200~one\ntwo\nthree\x1b[201~\r", "one\ntwo\nthree"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
    ],
    ids=["paste", "alt-enter", "backslash"],
)
def test_a_turn_of_several_lines(keys: str, turn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("DECODERY_HOME", str(tmp_path))
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        assert editor(pipe, DummyOutput()).prompt() == turn
        # The arrow up brings back the turn before, in the next chat too.
        pipe.send_text("\x1b[A\r")
        assert editor(pipe, DummyOutput()).prompt() == turn
    assert (tmp_path / HISTORY).stat().st_mode & 0o777 == 0o600


def test_a_chat_goes_on_without_a_place_for_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "file" / "home"))
    with create_pipe_input() as pipe:
        pipe.send_text("one\r")
        assert editor(pipe, DummyOutput()).prompt() == "one"


_STYLE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


class Terminal:
    """A process at a terminal of 24 rows of 80 columns."""

    def __init__(self, home: Path, *arguments: str) -> None:
        import fcntl
        import pty
        import struct
        import termios

        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # Tests that were started in the background ignore it, and what they start inherits that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        environment = {**ENVIRONMENT, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "DECODERY_HOME": str(home)}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], **streams, env=environment, preexec_fn=take_terminal, close_fds=True
        )
        os.close(theirs)
        self._file = ours
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def press(self, key: str, done: Callable[[], bool]) -> None:
        """Press until it is noticed: as a prompt appears there is a moment in which Python loses a signal."""
        for _ in range(5):
            self.type(key)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                self.read(0.1)
                if done():
                    return
        raise AssertionError(f"{key!r} is not noticed; {self.seen!r}")

    def wait_for(self, pattern: str) -> str:
        """What is shown until `pattern` is; fails when the program ends first or a minute has gone."""
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end and self.process.poll() is None, f"no {pattern!r} in {self.seen!r}"
            self.read(0.2)
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def read(self, seconds: float) -> None:
        """Take what is shown, once something is or the time is over."""
        # Reading fails when the program has closed its terminal.
        with suppress(OSError):
            if select.select([self._file], [], [], seconds)[0]:
                # What is read may end within a sequence of control characters.
                self.seen = _STYLE.sub("", self.seen + os.read(self._file, 4096).decode(errors="replace"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """What starts a command at a terminal; its cache is that of the tests, but for the turns typed before."""
    opened: list[Terminal] = []
    for kept in model.parent.parent.iterdir():
        if kept.name != HISTORY:
            (tmp_path / kept.name).symlink_to(kept)

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_ctrl_c_stops_an_answer_and_not_the_chat(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", "--max-new-tokens", "4000", "--ignore-eos")
    chat.wait_for(">")
    chat.type("Tell me a long story.\n")
    chat.wait_for(r"story\.\r+\n.*\w+ \w+")
    chat.type("\x03")
    assert "tokens/s" in chat.wait_for(r"stopped, context \d+ of 8192\]\s+>")
    chat.type("/reset\n")
    chat.wait_for("conversation is reset")
    chat.wait_for(">")
    chat.type("Go on.\n")
    chat.wait_for(r"Go on\.\r+\n.*\w+ \w+")
    chat.type("\x03")
    chat.wait_for(r"stopped, .*\]\s+>")
    chat.press("\x03", lambda: "press Ctrl-C again, or type /exit, to leave" in chat.seen)
    chat.press("\x03", lambda: chat.process.poll() is not None)
    assert chat.process.returncode == 130


def test_a_pasted_text_is_one_turn_and_a_long_prompt_shows_how_far_it_is_read(
    terminal: Callable[..., Terminal],
) -> None:
    chat = terminal("chat", "--max-new-tokens", "4")
    chat.wait_for(">")
    chat.type("\x1b[200~" + "tide tide tide tide tide tide tide\n" * 100 + "Go on.\x1b[201~\r")
    assert "reading the prompt" in chat.wait_for(r"context \d+ of 8192\]\s+>")
    chat.type("/exit\r")
    assert chat.process.wait(20) == 0
    assert "tokens" not in chat.seen


def test_chat_ends_with_the_input(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat")
    chat.wait_for(">")
    chat.type("\x04")
    assert chat.process.wait(20) == 0
