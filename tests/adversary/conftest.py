"""The attacks use the federation in one process that the engine's tests have."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
