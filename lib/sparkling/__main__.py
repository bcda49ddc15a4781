"""`python -m sparkling`: the same as the command `sparkling`, where that is not installed."""

import sys

from sparkling.cli import main

if __name__ == "__main__":
    sys.exit(main())
