"""python -m pypcd"""

import sys

from pypcd.cli import main

if __name__ == "__main__":
    sys.exit(main())
