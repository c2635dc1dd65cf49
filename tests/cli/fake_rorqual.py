"""`rorqual` with the fake LLM, as a program of its own: DELAY seconds per token, then the command line."""

from __future__ import annotations

import sys

from rorqual.cli.main import main
from tests.cli.fake_llm import installed

if __name__ == "__main__":
    with installed(delay_s=float(sys.argv[1])):
        code = main(sys.argv[2:])
    sys.exit(code)
