"""Write the pages, or report what in the code lacks a meaning."""

import sys

from reference.pages import flaws, write

if found := flaws():
    print("\n".join(found), file=sys.stderr)
    sys.exit(1)
write()
