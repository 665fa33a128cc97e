"""``python -m paged_mla``: the command ``paged-mla``."""

import sys

from paged_mla.command import main

if __name__ == "__main__":
    sys.exit(main())
