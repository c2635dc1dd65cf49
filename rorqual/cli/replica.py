"""One of several replicas of `rorqual serve`: `python -m rorqual.cli.replica FD`, FD a listening socket.

It gets its order on standard input, is a server like any other, and does not outlive the process that started it.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from rorqual.cli.serve import log_to_stderr, serve_on
from rorqual.config import EngineConfig
from rorqual.server.engine_process import end_with_parent
from rorqual.server.router.processes import Order
from rorqual.server.settings import ServerSettings


def main(fd: int) -> int:
    """Serve until a signal; returns the exit code."""
    end_with_parent()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    if os.getppid() != order.parent:  # gone before `end_with_parent`
        return 1
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    log_to_stderr(f"replica {order.number}: ")
    try:
        return serve_on(sock, EngineConfig(**order.config), ServerSettings(**order.settings), replica=order.number)
    except ValueError as error:
        print(f"rorqual: error: replica {order.number}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
