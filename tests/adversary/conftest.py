"""Attacks: what somebody would try who wants to publish the break. Each must fail here, and say so when it does not."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))  # the federation in one process, which its tests have
