"""Options of a command: each field of its models, as a flag with the field's docstring for help. No torch."""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from rorqual.config import StrictModel

Kind = Literal["bool", "int", "float", "json", "list", "text"]

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("-m", "--model-path"),
    "tokenizer": ("--tokenizer-path",),
    "max_model_len": ("-c", "--context-length"),
    "max_num_seqs": ("-np", "--max-running-requests"),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "block_size": ("--page-size",),
    "tensor_parallel_size": ("-tp", "--tp", "--tp-size"),
    "data_parallel_size": ("-dp", "--dp", "--dp-size"),
    "gpu_memory_utilization": ("--mem-fraction-static",),
    "enforce_eager": ("--disable-cuda-graph",),
    "threads": ("-t",),
    "max_tokens": ("--max-new-tokens",),
    "quiet": ("-q",),
    "json_out": ("--json",),
}
"""Other engines' and short spellings, by field."""

INVERSE_ALIASES: dict[str, tuple[str, ...]] = {
    "enable_prefix_caching": ("--disable-radix-cache",),
    "access_log": ("--disable-uvicorn-access-log",),
}
"""Other engines' flags that switch a bool field off."""

NOT_OPTIONS: dict[str, str] = {
    "--enable-chunked-prefill": "leave it out: prompts are always cut to fit a step",
    "--no-enable-chunked-prefill": "prompts are always cut to fit a step; raise --max-num-batched-tokens instead",
    "--ep-size": "experts are shared by all ranks or by none: see --enable-expert-parallel",
    "--enable-auto-tool-choice": "leave it out: tool calls are found if the model's format is known; see "
    "--tool-call-parser",
    "--chat-template-content-format": "leave it out: the template itself shows what it reads",
    "--disable-fastapi-docs": "leave it out: there are none",
    "--n": "the command line gives one answer per prompt; in Python, SamplingParams(n=...) gives more",
    "--logprobs": "the command line does not print them; in Python, SamplingParams(logprobs=...) returns them",
    "--prompt-logprobs": "the command line does not print them; in Python, SamplingParams(prompt_logprobs=...) does",
}
"""Flags of other engines whose nearest neighbour here would mislead; the sentence says what to do."""

SAMPLING_NOT_FLAGS = frozenset({"n", "seed", "logprobs", "prompt_logprobs", "detokenize"})
"""Sampling fields without a flag: `--seed` is the engine's, which seeds every request; the others ask for results that
the commands do not show."""

_RECOMMENDED = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""Sampling fields that a model's generation config may set."""

_GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        "model",
        "tokenizer",
        "skip_tokenizer_init",
        "revision",
        "hf_overrides",
        "trust_remote_code",
        "load_format",
        "chat_template",
        "generation_config",
    ),
    "memory and scheduling": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "block_size",
        "enable_prefix_caching",
        "kv_cache_memory",
        "num_kv_blocks",
        "kv_cache_dtype",
        "index_cache_dtype",
        "gpu_memory_utilization",
    ),
    "several ranks": (
        "tensor_parallel_size",
        "data_parallel_size",
        "data_parallel_rank",
        "enable_expert_parallel",
        "enable_eplb",
        "num_redundant_experts",
        "eplb_window_size",
        "eplb_step_interval",
        "distributed_executor_backend",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rank_timeout",
        "check_ranks",
    ),
}
"""Headings of --help for the engine's many fields; the rest go under their model's own heading."""

_HEADINGS = {
    "EngineConfig": "device and numerics",
    "SamplingParams": "sampling",
    "ServerSettings": "server",
    "ListenerSettings": "server",
    "RoutingSettings": "sharing requests among replicas",
}


class Setting(NamedTuple):
    """A value that somebody gave, and where, for messages: a flag, a variable, or a key in a file."""

    value: Any
    origin: str


class Option(NamedTuple):
    """One field of one model."""

    owner: type[StrictModel]
    name: str
    kind: Kind
    item: Kind
    """Kind of a list's items; else the same as `kind`."""
    choices: tuple[str, ...]
    help: str
    flags: tuple[str, ...]
    """Every spelling, the canonical one first."""
    off_flags: tuple[str, ...]
    """Spellings that mean False; only for bools."""

    @property
    def variable(self) -> str:
        """The environment twin."""
        return f"RORQUAL_{self.flags[0].removeprefix('--').replace('-', '_').upper()}"

    @property
    def heading(self) -> str:
        """The group of --help that it stands in."""
        if self.owner.__name__ == "EngineConfig":
            return next((group for group, names in _GROUPS.items() if self.name in names), _HEADINGS["EngineConfig"])
        return _HEADINGS.get(self.owner.__name__, "command")


def options_of(model: type[StrictModel], *, omit: Iterable[str] = ()) -> list[Option]:
    """One option per field of `model`, in the model's order, without those named in `omit`.

    A field called `x_` gets the flag --x: some words cannot name a field of a pydantic model.
    """
    return [_option(model, name) for name in model.model_fields if name not in set(omit)]


def _option(model: type[StrictModel], name: str) -> Option:
    field = model.model_fields[name]
    types_ = list(_plain_types(field.annotation))
    kind = _kind(types_)
    flag = "--" + name.rstrip("_").replace("_", "-")
    on = (flag, *ALIASES.get(name, ()))
    off = (f"--no-{flag[2:]}", *INVERSE_ALIASES.get(name, ())) if kind == "bool" else ()
    item = _kind([inner for t in types_ for inner in _plain_types(*get_args(t))]) if kind == "list" else kind
    choices = tuple(str(value) for t in types_ if get_origin(t) is Literal for value in get_args(t))
    text = " ".join((field.description or "").split())
    if kind == "list" and "repeated" not in text:
        text = f"{text} Can be repeated."
    if "default" not in text.lower() and (default := _default_shown(model, name, field.default)):
        text = f"{text} (default: {default})"
    return Option(model, name, kind, item, choices, text, on, off)


def _default_shown(model: type[StrictModel], name: str, default: Any) -> str:
    """What --help says is used when nobody sets the field; empty where its docstring says it all."""
    if default is None or default is False or default in ({}, ()):
        return ""
    if model.__name__ == "SamplingParams" and name in _RECOMMENDED:
        return f"the model's own, else {0 if name == 'temperature' else default}"  # see command.sampling_params
    return "on" if default is True else str(default)


def _plain_types(*annotations: Any) -> Iterable[Any]:
    """The members of unions, without Annotated and None."""
    for annotation in annotations:
        origin = get_origin(annotation)
        if origin is Annotated:
            yield from _plain_types(get_args(annotation)[0])
        elif origin in (Union, types.UnionType):
            yield from _plain_types(*get_args(annotation))
        elif annotation not in (type(None), Ellipsis):
            yield annotation


def _kind(annotations: list[Any]) -> Kind:
    """How text becomes a value of one of these types."""
    found = {dict if isinstance(a, type) and issubclass(a, StrictModel) else get_origin(a) or a for a in annotations}
    kinds: list[tuple[set[Any], Kind]] = [
        ({dict}, "json"),
        ({list, tuple, set, frozenset}, "list"),
        ({bool}, "bool"),
        ({float}, "float"),
        ({int}, "int"),
    ]
    return next((kind for classes, kind in kinds if found & classes), "text")


class _Keep(argparse.Action):
    """Store what was typed as a Setting whose origin is the spelling that was used."""

    def __init__(self, option_strings: list[str], dest: str, *, option: Option, **kwargs: Any) -> None:
        kwargs["nargs"] = 0 if option.kind == "bool" else None
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self.option = option

    def __call__(self, _parser: Any, found: argparse.Namespace, typed: Any, spelling: str | None = None) -> None:
        option, origin = self.option, spelling or self.option.flags[0]
        value: Any = (
            origin not in option.off_flags if option.kind == "bool" else from_text(option, typed, origin=origin)
        )
        if option.kind == "list":
            value = [*getattr(found, self.dest, Setting([], origin)).value, *value]
        setattr(found, self.dest, Setting(value, origin))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that neither guesses abbreviations nor exits: its complaints are ValueErrors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a person's mistake."""
        if found := re.fullmatch(r"argument ([^:]+): expected one argument", message):
            flag = found[1].split("/")[0]
            raise ValueError(f"{flag} needs a value (one that starts with a dash is written {flag}=VALUE)")
        raise ValueError(message.removeprefix("argument "))

    def add_options(self, options: Iterable[Option]) -> None:
        """Add a flag for every option, under the headings of --help."""
        groups: dict[str, Any] = {}
        for option in options:
            if option.heading not in groups:
                groups[option.heading] = self.add_argument_group(option.heading)
            kept = {"dest": option.name, "action": _Keep, "option": option}
            shown = {} if option.kind == "bool" else {"metavar": _metavar(option)}
            text = option.help.replace("%", "%%")
            groups[option.heading].add_argument(*option.flags, *option.off_flags, help=text, **kept, **shown)


class _HelpFormatter(argparse.HelpFormatter):
    """Spellings in one list with the value named once, at the end."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        return ", ".join(action.option_strings) + value if action.option_strings else str(action.metavar)


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return {"int": "N", "float": "X", "json": "JSON"}.get(option.kind, "VALUE")


_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def from_text(option: Option, text: str, *, origin: str) -> Any:
    """Turn what was typed into a value for the field; what is no number stays text, for the model to judge.

    Raises:
        ValueError: bad JSON, or a word that is neither true nor false; names `origin`.
    """
    if option.kind == "json" or (option.kind == "list" and option.item != "text" and text.lstrip().startswith("[")):
        wanted = "object" if option.kind == "json" else "list"
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{origin} must be a JSON {wanted}, got {text!r} ({error})") from None
    if option.kind == "list":
        parts = text.split(",") if option.item != "text" else [text]
        return [_scalar(option.item, part, origin=origin) for part in parts]
    return _scalar(option.kind, text, origin=origin)


def _scalar(kind: Kind, text: str, *, origin: str) -> Any:
    if kind == "bool":
        if text.strip().lower() not in _WORDS:
            raise ValueError(f"{origin} must be true or false, got {text!r}")
        return _WORDS[text.strip().lower()]
    if kind == "int" and re.fullmatch(r"\s*[+-]?\d+\s*", text):
        return int(text)
    if kind == "float":
        try:
            return float(text)
        except ValueError:
            return text
    return text
