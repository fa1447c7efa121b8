"""`python -m twobp_fx`: the same as the `twobp` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
