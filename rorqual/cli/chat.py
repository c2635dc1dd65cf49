"""`rorqual chat`: a conversation in the terminal. Ctrl-C stops the answer, never the program."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from rorqual.cli.command import Command, open_llm, sampling_params
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel
from rorqual.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rorqual.llm import LLM

HELP = """\
/reset   forget the conversation
/help    this list
/exit    leave (also Ctrl-D)
Ctrl-C   stop the answer that is running"""


class ChatOptions(StrictModel):
    """What `rorqual chat` itself takes."""

    system: str | None = None
    """The system message, which stays in front of the conversation."""
    quiet: bool = False
    """No banner, progress or hints on standard error."""


def run(settings: Settings) -> int:
    """Talk until /exit or the end of the input."""
    options = settings.build(ChatOptions)
    settings.build(SamplingParams)  # before any model is opened
    with open_llm(settings, quiet=options.quiet) as llm:
        chat = Chat(llm, sampling_params(settings, llm), system=options.system)
        if not options.quiet:
            print("/help lists the commands, Ctrl-D leaves.", file=sys.stderr, flush=True)
        for line in _lines(prompt="> "):
            if line.strip() == "/exit":
                break
            chat.take(line)
    return 0


def _lines(*, prompt: str) -> Iterator[str]:
    """What the person types; Ctrl-C drops the line, Ctrl-D ends. There is no prompt when stdin is no terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):  # line editing and history, where Python has it
        import readline  # noqa: F401
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr, flush=True)
        except EOFError:
            print(flush=True)
            return


class Chat:
    """The conversation so far and how the next turn is answered."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def take(self, line: str) -> None:
        """Obey a command or answer a message; whatever is wrong with the message, the conversation goes on."""
        word = line.strip()
        if word == "/reset":
            self.messages = list(self.opening)
            _say("the conversation starts over")
        elif word == "/help":
            print(HELP, flush=True)
        elif word.startswith("/") and len(word.split()) == 1 and word.isascii() and word[1:].isalpha():
            near = difflib.get_close_matches(word, ["/reset", "/help", "/exit"], n=1)
            _say(f"unknown command {word}: {f'did you mean {near[0]}?' if near else '/help lists them'}")
        elif word:
            self._answer(line)

    def _answer(self, message: str) -> None:
        self.messages.append({"role": "user", "content": message})
        try:
            text, note = self._stream()
        except ValueError as error:
            text, note = "", f"{error}. /reset starts over"
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()  # an unanswered message would put two of the user's in a row
        if note:
            _say(note)

    def _stream(self) -> tuple[str, str]:
        """Print the answer as it comes; returns its text and what to say about its end."""
        parts: list[str] = []
        count, reason, fault = 0, None, None
        stream: Any = self.llm.stream_chat(self.messages, self.params)
        with _interrupts() as interrupted, contextlib.closing(stream):  # closing it aborts the request
            for delta in stream:
                parts.append(delta.text)
                count += len(delta.token_ids)
                reason, fault = delta.finish_reason, delta.error
                print(delta.text, end="", flush=True)
                if interrupted.is_set():
                    break
        print(flush=True)
        text = "".join(parts)
        if interrupted.is_set():
            return text, "stopped"
        if reason == "error":
            return "", f"the answer failed: {fault}"
        if reason == "length" and count == self.params.max_tokens:
            return text, f"cut at --max-tokens {count}"
        return text, "the context is full: /reset starts over" if reason == "length" else ""


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, instead of an exception that would strike in the middle of an engine step.

    A second Ctrl-C raises KeyboardInterrupt after all, for an engine that does not come back.
    """
    happened = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield happened  # Python delivers signals to the main thread only
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        if happened.is_set():
            raise KeyboardInterrupt
        happened.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield happened
    finally:
        signal.signal(signal.SIGINT, before)


def _say(note: str) -> None:
    print(f"[{note}]", file=sys.stderr, flush=True)


COMMAND = Command(
    words=("chat",),
    summary="talk to a model in the terminal",
    details="A conversation in the terminal. Ctrl-C stops an answer, /reset starts over, Ctrl-D leaves.",
    models=(ChatOptions, SamplingParams, EngineConfig),
    run=run,
)
