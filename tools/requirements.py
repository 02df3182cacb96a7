"""Prints what pyproject.toml asks for, build tools and all groups included, for pip: one requirement a line.

`pip install --editable .[decode,dev]` would do the same but build the package before the tools that build it
are there. Reads the few lines it needs by itself, because Python 3.10 has no TOML reader.
"""

from __future__ import annotations

import re
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
lists = re.findall(r"^(requires|dependencies|decode|dev) = \[(.*?)\]", text, re.M | re.S)
if [name for name, _ in lists] != ["requires", "dependencies", "decode", "dev"]:
    raise SystemExit(f"pyproject.toml: expected requires, dependencies, decode and dev, found {lists}")
print("\n".join(requirement for _, items in lists for requirement in re.findall(r'"([^"]+)"', items)))
