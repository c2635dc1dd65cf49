"""`rorqual models`: which models are here, how large and where; `rorqual models pull NAME` fetches one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel


class PullOptions(StrictModel):
    """What `rorqual models pull` itself takes."""

    revision: str | None = EngineConfig.model_fields["revision"].default
    """Branch, tag or commit of a hub id."""


def run_list(_settings: Settings) -> int:
    """Print the cached models, then the short names that anybody can use."""
    from rorqual.loader.source import SHORT_NAMES, cached_models, models_folder

    cached = cached_models()
    width = max((len(model.name) for model in cached), default=0)
    for model in cached:
        print(f"{model.name:<{width}}  {_size(model.size_bytes):>9}  {model.path}{_formats(model.path)}")
    if not cached:
        print(f"no model is cached in {models_folder()} or in the hub's cache")
    missing = [name for name in SHORT_NAMES if name not in {m.name for m in cached} and name == name.lower()]
    if missing:
        print(f"can be fetched by short name: {', '.join(missing)} (rorqual models pull NAME)")
    print("any folder, .gguf file or hub id (org/name) works as well")
    return 0


def run_pull(settings: Settings) -> int:
    """Fetch a model, and print where it lies."""
    options = settings.build(PullOptions)
    if not settings.positionals:
        raise ValueError("which model? rorqual models pull NAME takes a short name or a hub id (org/name)")
    from rorqual.loader.source import pull

    name = settings.positionals[0]
    path = pull(name, revision=options.revision)
    print(f"{name} is here:", file=sys.stderr)
    print(path)
    return 0


def _formats(path: Path) -> str:
    """The number formats of a GGUF file's matrices, in brackets; nothing for another model or a damaged file."""
    from rorqual.loader.gguf_file import matrix_formats

    if path.suffix == ".gguf":
        with contextlib.suppress(ValueError):
            return f"  ({', '.join(matrix_formats(path))})"
    return ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


LIST = Command(
    words=("models",),
    summary="which models are on this machine",
    details="List the models on this machine with their sizes and places, and the short names that can be fetched.",
    models=(),
    run=run_list,
)
PULL = Command(
    words=("models", "pull"),
    summary="fetch a model",
    details="Fetch a model by its short name or hub id, so that a later start finds it. Prints its path.",
    models=(PullOptions,),
    run=run_pull,
    usage="[OPTIONS] NAME",
    max_positionals=1,
)
