"""The generated reference: ``python -m reference`` writes the pages of docs/reference from the code.

The adapter for verl is installed in verl's environment alone; its settings, which import nothing of verl's,
are read from its folder.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training" / "verl"))
