"""Formats every C++ and Python file of the project; `--check` only looks, and exits 1 where one would change.

The same commands run as commit hooks (.pre-commit-config.yaml) after `pre-commit install`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP = (".h", ".cpp", ".cu", ".cuh")
FOLDERS = ("csrc", "eagle_cuda", "python", "benchmarks", "tests", "tools")


def sources(suffixes: tuple[str, ...]) -> list[str]:
    """Paths of the project's own files with one of these suffixes."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return sorted(
        str(path.relative_to(ROOT)) for path in found if "build" not in path.relative_to(ROOT).parts
    )


def main() -> int:
    check = "--check" in sys.argv[1:]
    commands = [
        ["clang-format", *(["--dry-run", "--Werror"] if check else ["-i"]), *sources(CPP)],
        ["ruff", "check", "--quiet", *([] if check else ["--fix"]), "."],
        ["ruff", "format", "--quiet", *(["--check"] if check else []), "."],
    ]
    return max(subprocess.run(command, cwd=ROOT).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
