"""A rank that another process has started: `python -m rorqual.engine.worker`, with its order on standard input.

It repeats what the first rank of its replica does, and ends when that one closes, when another rank is lost, or with
the process that started it, however that ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback

import msgspec

from rorqual.config import EngineConfig
from rorqual.distributed.launch import RankOrder
from rorqual.distributed.world import RankFailure, World, is_follower, join, run_node, seat_of_torchrun


def follow_first_rank(config: EngineConfig) -> int | None:
    """Where this program was started for ranks that only follow, be them; returns the exit code when they have ended.

    None, at once, where it is for people to talk to.
    """
    if not is_follower(config):
        return None
    if config.distributed_executor_backend == "torchrun":
        return _follow(config, join(config, seat_of_torchrun(config)))
    return run_node(config)


def _follow(config: EngineConfig, world: World) -> int:
    from rorqual.engine.engine import Engine

    world.on_failure = lambda: os._exit(1)  # the main thread may wait for a rank that will never answer
    try:
        Engine(config, world=world).follow()
    except RankFailure:  # which is logged where it was found
        return 1
    except Exception as error:
        traceback.print_exc()
        world.explain(error)
        return 1
    finally:
        world.close()
    return 0


def main() -> int:
    """Take the order and follow; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the first one decides
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")
    config = EngineConfig(**order.options)
    return _follow(config, join(config, order.seat))


def _end_with_parent() -> None:
    """End when standard input does, which the parent holds open for as long as it lives."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
