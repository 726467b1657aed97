"""python -m pypcd"""

import sys

from pypcd._cli import main

sys.exit(main())
