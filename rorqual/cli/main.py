"""`rorqual`: find the command, resolve its settings, run it, and end in one line when something is wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from rorqual import __version__
from rorqual.cli.command import Command
from rorqual.cli.options import NOT_OPTIONS, Parser, Setting
from rorqual.cli.settings import near_misses, resolve
from rorqual.config import did_you_mean

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # as shells report SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code.

    0 is success, 1 a failed request, 2 a mistake that one line on stderr explains, 130 Ctrl-C. --debug and
    RORQUAL_DEBUG=1 show the traceback of a mistake.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in typed or os.environ.get("RORQUAL_DEBUG", "0") not in ("", "0")
    try:
        _never_fail_on_characters()
        return _run(typed)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains again
        return EXIT_BROKEN_PIPE
    except ValueError as error:
        if debug:
            traceback.print_exc()
        with contextlib.suppress(OSError):  # stderr may be a full disk
            print(f"rorqual: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_MISTAKE


def commands() -> dict[tuple[str, ...], Command]:
    """Every command by its words, in the order of --help."""
    from rorqual.cli import (
        bench,
        bench_kernels,
        bench_serve,
        chat,
        collect_env,
        generate,
        models,
        ops,
        plan,
        route,
        serve,
    )

    talk = (generate.COMMAND, chat.COMMAND, serve.COMMAND, route.COMMAND, models.LIST, models.PULL)
    measure = (bench.THROUGHPUT, bench.LATENCY, bench.PREFILL, bench_kernels.COMMAND, bench_serve.COMMAND)
    look = (plan.COMMAND, ops.COMMAND, collect_env.COMMAND)
    return {command.words: command for command in (*talk, *measure, *look)}


def _run(typed: list[str]) -> int:
    known = commands()
    command = next((known[words] for n in (2, 1) if (words := tuple(typed[:n])) in known), None)
    if command is None:
        return _without_command(typed, known)
    rest = typed[len(command.words) :]
    parser = _parser(command)
    head, behind = _split_at_dashes(rest)
    if {"-h", "--help"} & set(head):
        parser.print_help()
        return 0
    flags, loose = parser.parse_known_args(head)
    positionals = [*_positionals(command, loose), *behind]
    if command.max_positionals is not None and len(positionals) > command.max_positionals:
        raise ValueError(f"unexpected argument {positionals[command.max_positionals]!r}: see {parser.prog} --help")
    for sentence in near_misses((o.variable for c in known.values() for o in c.options()), os.environ):
        print(f"rorqual: warning: {sentence}", file=sys.stderr)
    settings = resolve(
        command.options(),
        flags,
        positionals=positionals,
        environ=os.environ,
        config_file=_config_file(flags.config),
    )
    return command.run(settings)


def _parser(command: Command) -> Parser:
    words = " ".join(command.words)
    parser = Parser(
        prog=f"rorqual {words}",
        usage=f"rorqual {words} {command.usage}",
        description=command.details,
        epilog="Every option --some-name can also be set by the variable RORQUAL_SOME_NAME or the key some-name of the "
        "--config file; a flag wins over a variable, and a variable over the file.",
        add_help=False,
    )
    parser.add_options(command.options())
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file with options; keys in kebab or snake case.")
    general.add_argument("--debug", action="store_true", help="Show the traceback of an error (also RORQUAL_DEBUG=1).")
    general.add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser


def _config_file(flag: str | None) -> Setting | None:
    if flag is not None:
        return Setting(flag, "--config")
    return Setting(path, "RORQUAL_CONFIG") if (path := os.environ.get("RORQUAL_CONFIG")) else None


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first "--"; the latter are never flags."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _positionals(command: Command, loose: list[str]) -> list[str]:
    """What argparse left over, unless it looks like a flag."""
    spellings = [s for o in command.options() for s in (*o.flags, *o.off_flags)]
    for argument in loose:
        flag = argument.partition("=")[0]
        if flag in NOT_OPTIONS:
            raise ValueError(f"unknown option {flag}: {NOT_OPTIONS[flag]}")
        if len(argument) > 1 and argument[0] == "-" and " " not in flag:
            near = did_you_mean(flag, spellings) if flag.startswith("--") else ""
            hint = near if near.startswith("did you") else f"see rorqual {' '.join(command.words)} --help"
            raise ValueError(f"unknown option {flag}: {hint}")
    return loose


def _without_command(typed: list[str], known: dict[tuple[str, ...], Command]) -> int:
    """Help, version, or the complaint that there is no such command."""
    word = typed[0] if typed else ""
    if word in ("-V", "--version"):
        print(f"rorqual {__version__}")
        return 0
    group = {words: c for words, c in known.items() if words[0] == word}
    asked = word in ("-h", "--help") or (bool(group) and typed[1:2] in (["-h"], ["--help"]))
    if asked or not typed:
        print(_overview(group or known), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else EXIT_MISTAKE
    if group:
        allowed = ", ".join(" ".join(words) for words in group)
        raise ValueError(f"unknown command {' '.join(typed[:2])!r}: allowed: {allowed}")
    if word.startswith("-"):
        raise ValueError(f"options come after the command, got {word!r} first: see rorqual --help")
    raise ValueError(f"unknown command {word!r}: {did_you_mean(word, {words[0] for words in known})}")


def _overview(known: dict[tuple[str, ...], Command]) -> str:
    lines = [f"  {' '.join(words):<18} {command.summary}" for words, command in known.items()]
    return "\n".join(
        [
            "usage: rorqual COMMAND [OPTIONS]",
            "",
            "An LLM inference engine, from a laptop's CPU to Hopper GPUs.",
            "",
            "commands:",
            *lines,
            "",
            "rorqual COMMAND --help shows a command's options; rorqual --version the version.",
        ]
    )


def _never_fail_on_characters() -> None:
    """A terminal that cannot show a character gets a substitute; text is never a reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
