"""`rorqual` with the fake LLM, as a program of its own: DELAY seconds per token, then the command line."""

from __future__ import annotations

import sys

from fake_llm import installed

from rorqual.cli.main import main

if __name__ == "__main__":
    with installed(delay_s=float(sys.argv[1])):
        code = main(sys.argv[2:])
    sys.exit(code)
