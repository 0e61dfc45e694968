"""What tests of the other rooms have for sources and checkpoints serves here too."""

import sys
from pathlib import Path

_ROOMS = Path(__file__).parents[1] / "python"
sys.path[:0] = [str(_ROOMS / room) for room in ("source", "checkpoint")]
