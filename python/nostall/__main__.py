"""``python -m nostall``."""

import sys

from nostall.cli import main

sys.exit(main())
