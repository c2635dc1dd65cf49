"""What a command of `rorqual` is: its options, its arguments and what it runs; and how it opens an engine. No torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rorqual.cli.options import SAMPLING_NOT_FLAGS, Option, options_of
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel
from rorqual.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rorqual.llm import LLM


@dataclass(frozen=True)
class Command:
    """One command. Everything in it is light: `run` imports what it needs."""

    words: tuple[str, ...]
    """What is typed after `rorqual`."""
    summary: str
    """One line for `rorqual --help`."""
    details: str
    """What `--help` of the command says first."""
    models: tuple[type[StrictModel], ...]
    """The options, as fields of these models."""
    run: Callable[[Settings], int]
    """Does the work and returns the exit code."""
    usage: str = "[OPTIONS]"
    """What follows the words in the usage line."""
    max_positionals: int | None = 0
    """None for any number."""

    def options(self) -> list[Option]:
        """Every option of every model."""
        return [o for model in self.models for o in options_of(model, omit=_omitted(model))]


def _omitted(model: type[StrictModel]) -> Iterable[str]:
    return SAMPLING_NOT_FLAGS if model is SamplingParams else ()


def open_llm(settings: Settings, *, quiet: bool) -> LLM:
    """The engine that the settings describe; unless `quiet`, with progress and its banner on stderr.

    Raises:
        ValueError: an option is wrong, or the model cannot be opened.
    """
    config = settings.build(EngineConfig)  # first, so that a wrong option costs no import of torch

    from rorqual.llm import LLM

    llm = LLM(**config.model_dump(exclude_unset=True), progress=not quiet)
    gc.freeze()  # what is there now stays until the end, so no collection need look at it again, at the exit neither
    if not quiet:
        print(llm.engine.banner(), file=sys.stderr, flush=True)
    return llm


def sampling_params(settings: Settings, llm: LLM) -> SamplingParams:
    """Flags over the model's generation config; the temperature is 0 (greedy) when neither names one."""
    merged = {"temperature": 0.0} | llm.default_sampling_params().model_dump(exclude_unset=True)
    return SamplingParams(**(merged | settings.values(SamplingParams)))
