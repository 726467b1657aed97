"""python -m pypcd"""

import sys

from pypcd._cli import main

if __name__ == "__main__":
    sys.exit(main())
