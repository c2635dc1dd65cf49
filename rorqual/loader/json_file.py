"""The JSON files that lie beside a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises: ValueError naming the file if it is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The object in the folder's generation_config.json; {} when there is none. Raises as `read_json_object`."""
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}
