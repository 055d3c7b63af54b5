"""Prints the lowest version of every dependency of the package that pyproject.toml allows, as constraints for pip.

CONTRIBUTING.md has the command that runs the tests with them.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(project: dict) -> list[str]:
    """Return `name==version` for the lower bound of each dependency that has one."""
    listed = project["dependencies"]
    found = [re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", one) for one in listed]
    return [f"{match[1]}=={match[2]}" for match in found if match is not None]


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"])))
