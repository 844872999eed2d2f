"""The generated reference: ``python -m reference`` writes pages of docs/reference from the code.

They are those that need more than docstrings: settings with their ranges, commands, files, routes, licences.
Their packages have to be imported, and people read them while they write a config, so they are kept in the
repository.  The Python API is made of docstrings alone, by mkdocstrings, when the site is built.

The adapter for verl is installed in verl's environment alone; its settings, which import nothing of verl's,
are read from its folder.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training" / "verl"))
