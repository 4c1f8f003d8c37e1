"""`python -m lctrain`, `accelerate launch -m lctrain`, `torchrun -m lctrain`."""

import sys

from lctrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
