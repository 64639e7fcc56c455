"""Makes `python -m overflowstat` the same as the command `overflowstat`."""

import sys

from overflowstat.cli import main

if __name__ == "__main__":
    sys.exit(main())
