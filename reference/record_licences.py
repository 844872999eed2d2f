"""Write requirements/licences.toml: pip reads the metadata of every pin, without installing one.

An entry stays as long as its version is pinned; those that are new need the index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from reference.licence_metadata import BY_HAND, licence_of, normalized
from reference.licences import ENVIRONMENTS, RECORD, pinned, recorded

HEADER = "# The licences of all pins, as their metadata have them: `make licences` writes this file.\n"


def main() -> None:
    """Look up the licences of pins that are not recorded, and drop those of pins that have gone."""
    old = recorded() if RECORD.exists() else {}
    licences: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for files in ENVIRONMENTS.values():
            wanted = {f"{name}=={version}" for name, version in pinned(files).items()}
            licences |= {
                key: old[key] for key in wanted & old.keys() if key.partition("==")[0] not in BY_HAND
            }
            licences |= look_up(sorted(wanted - licences.keys()), Path(folder))
    lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in sorted(licences.items())]
    RECORD.write_text(HEADER + "".join(lines))


def look_up(pins: list[str], folder: Path) -> Mapping[str, str]:
    """Return the licence of each of these pins; ``folder`` is for a pip that reports SPDX expressions."""
    if not pins:
        return {}
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", "pip>=25.3"], check=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "-q"]
    command += ["--ignore-installed", "--no-deps", "--report", "-", *pins]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found = {}
    for each in report["install"]:
        metadata = each["metadata"]
        licence = licence_of(
            metadata["name"],
            metadata.get("license_expression"),
            metadata.get("license"),
            metadata.get("classifier", ()),
        )
        found[f"{normalized(metadata['name'])}=={metadata['version'].partition('+')[0]}"] = licence
    return found


if __name__ == "__main__":
    main()
