"""`rorqual models`: which models are here, how large and where; `rorqual models pull NAME` fetches one."""

from __future__ import annotations

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings


def run_list(settings: Settings) -> int:
    return 0

LIST = Command(words=("models",), summary="list", details="", models=(), run=run_list)
PULL = Command(words=("models","pull"), summary="list", details="", models=(), run=run_list, usage="NAME", max_positionals=1)
