"""Where a command's settings come from: flag > environment twin > --config file > default, resolved here only."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rorqual.cli.options import Option, Setting, from_text
from rorqual.config import StrictModel, did_you_mean

M = TypeVar("M", bound=StrictModel)


class Settings:
    """What a command was told: its positional arguments, and per model the values that somebody set and where."""

    def __init__(self, positionals: Sequence[str], found: Mapping[type[StrictModel], Mapping[str, Setting]]) -> None:
        self.positionals = list(positionals)
        self._found = found

    def values(self, model: type[StrictModel]) -> dict[str, Any]:
        """The fields of `model` that were set anywhere, as they were given."""
        return {name: setting.value for name, setting in self._found.get(model, {}).items()}

    def set(self, model: type[StrictModel], name: str, value: Any, *, origin: str) -> None:
        """Set a field that was given in another way than by its flag."""
        self._found = {**self._found, model: {**self._found.get(model, {}), name: Setting(value, origin)}}

    def origin(self, model: type[StrictModel], name: str) -> str:
        """Where a field's value came from, for messages: "--page-size", "RORQUAL_BLOCK_SIZE", ..., or "the default"."""
        setting = self._found.get(model, {}).get(name)
        return setting.origin if setting else "the default"

    def build(self, model: type[M]) -> M:
        """The model made of what was set.

        Raises:
            ValueError: what the model says, with the flag, variable or file key that is at fault instead of the field.
        """
        try:
            return model(**self.values(model))
        except ValueError as error:
            message = str(error)
        for name, setting in self._found.get(model, {}).items():
            try:
                model(**{name: setting.value})
            except ValueError as error:
                said = str(error)
                names_it = said.startswith(f"{name} ")
                raise ValueError(setting.origin + (said.removeprefix(name) if names_it else f": {said}")) from None
        raise ValueError(message + self._elsewhere(model, message))

    def _elsewhere(self, model: type[StrictModel], message: str) -> str:
        """Which of the fields that a message names were not typed as flags."""
        found = self._found.get(model, {})
        hidden = [s.origin for name, s in found.items() if name in message and not s.origin.startswith("-")]
        return f" (set by {', '.join(hidden)})" if hidden else ""


def resolve(
    options: Iterable[Option],
    flags: Namespace,
    *,
    positionals: Sequence[str],
    environ: Mapping[str, str],
    config_file: Setting | None,
) -> Settings:
    """Merge the three sources, strongest first.

    Raises:
        ValueError: a value that cannot be read, an unknown key, or a config file that cannot be used.
    """
    known = list(options)
    file = _from_file(known, config_file) if config_file else {}
    found: dict[type[StrictModel], dict[str, Setting]] = {}
    for option in known:
        setting = getattr(flags, option.name, None) or _from_environment(option, environ) or file.get(option.name)
        if setting:
            found.setdefault(option.owner, {})[option.name] = setting
    return Settings(positionals, found)


def _from_environment(option: Option, environ: Mapping[str, str]) -> Setting | None:
    """An empty variable counts as unset: compose files pass those for what nobody chose.

    So does RORQUAL_PORT=tcp://..., which Kubernetes sets where a service is called rorqual.
    """
    text = environ.get(option.variable, "")
    if option.name == "port" and text.startswith("tcp://"):
        return None
    return Setting(from_text(option, text, origin=option.variable), option.variable) if text else None


def near_misses(variables: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """A sentence for every set RORQUAL_ variable that is no option but is spelt nearly like one.

    Others pass in silence: orchestrators set names like RORQUAL_SERVICE_HOST of their own accord.
    """
    # RORQUAL_CACHE is read by the loader, RORQUAL_CPU_ISA by the compiled kernels.
    known = {"RORQUAL_CONFIG", "RORQUAL_DEBUG", "RORQUAL_CACHE", "RORQUAL_CPU_ISA", *variables}
    strangers = [name for name in environ if name.startswith("RORQUAL_") and name not in known]
    close = [(name, difflib.get_close_matches(name, known, n=1, cutoff=0.9)) for name in sorted(strangers)]
    return [f"environment variable {name} is not an option: did you mean {m[0]}?" for name, m in close if m]


def _from_file(options: list[Option], config_file: Setting) -> dict[str, Setting]:
    """The settings of a YAML file, by field; keys are flags without their dashes, in kebab or snake case."""
    path = Path(config_file.value).expanduser()
    spellings = {flag.lstrip("-"): option for option in options for flag in (*option.flags, *option.off_flags)}
    found: dict[str, Setting] = {}
    for key, value in _read_yaml(path, config_file.origin).items():
        kebab = str(key).replace("_", "-")
        if kebab not in spellings:
            raise ValueError(f"unknown key {key!r} in {path}: {did_you_mean(kebab, spellings)}")
        option, origin = spellings[kebab], f"{key} in {path}"
        if option.name in found:
            raise ValueError(f"{origin} sets what {found[option.name].origin} has set already: keep one of them")
        if value is not None:  # "key:" with nothing behind it says nothing
            found[option.name] = Setting(_from_yaml(option, kebab, value, origin), origin)
    return found


def _from_yaml(option: Option, kebab: str, value: Any, origin: str) -> Any:
    if option.kind == "bool" and f"--{kebab}" in option.off_flags:
        if not isinstance(value, bool):
            raise ValueError(f"{origin} must be true or false, got {value!r}")
        return not value
    if option.kind == "list" and not isinstance(value, list):
        return [value]
    return value


def _read_yaml(path: Path, origin: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the config file {path} ({origin}): {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} ({origin}) is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} ({origin}) must hold keys and values, got a {type(content).__name__}")
    return content
