"""``python -m triton_relattn`` runs the demo, see :mod:`triton_relattn.demo`."""

import sys

from .demo.run import main

if __name__ == "__main__":
    sys.exit(main())
