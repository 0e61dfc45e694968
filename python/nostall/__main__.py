"""``python -m nostall``."""

from __future__ import annotations

import sys

from nostall.cli import main

sys.exit(main())
