"""`rorqual ops MODEL`: which implementation of every op this machine runs, and why not the others."""

from __future__ import annotations

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig


def run(settings: Settings) -> int:
    """Print op x backend x verdict for a model on this machine."""
    given = settings.values(EngineConfig)
    if settings.positionals:
        given["model"] = settings.positionals[0]
    settings.build(EngineConfig)
    config = EngineConfig(**given)

    from rorqual.engine.op_report import op_report

    rows = [("op", "backend", "verdict")]
    rows += sorted((row.op, row.backend, row.verdict) for row in op_report(config))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip())
    return 0


COMMAND = Command(
    words=("ops",),
    summary="which kernel runs each op on this machine, and why",
    details="Print op x backend x verdict for MODEL (default: that of --model) on this machine.",
    models=(EngineConfig,),
    run=run,
    usage="[OPTIONS] [MODEL]",
    max_positionals=1,
)
