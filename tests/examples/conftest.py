"""Makes the examples importable, as they are for each other when one of them runs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
