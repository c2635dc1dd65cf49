"""`python -m rorqual` is the command `rorqual`."""

import sys

from rorqual.cli.main import main

sys.exit(main())
