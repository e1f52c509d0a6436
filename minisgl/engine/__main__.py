"""`python -m minisgl.engine` is `minisgl engine`, for torchrun's -m."""

import sys

from minisgl.cli import main

if __name__ == "__main__":
    sys.exit(main(["engine", *sys.argv[1:]]))
