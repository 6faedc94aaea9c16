"""Entry point of `python -m symphony`."""

import sys

from symphony.cli import main

sys.exit(main())
