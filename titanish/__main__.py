"""`python -m titanish` is the `titanish` command."""

import sys

from titanish.cli.main import main

sys.exit(main())
