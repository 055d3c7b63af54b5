"""What pyproject.toml admits and the tested sets pin holds no version with a fault in security that is known.

`security_bounds.yaml` is the list of known faults.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FILES = ("constraints.txt", "constraints-flower.txt")
FAULTS = yaml.safe_load((ROOT / "tests" / "security_bounds.yaml").read_text())


def required() -> dict[str, list[Requirement]]:
    """What the build, the package and each extra require."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    of = {"build": read["build-system"]["requires"], "package": read["project"]["dependencies"]}
    of |= read["project"]["optional-dependencies"]
    return {part: [Requirement(line) for line in lines] for part, lines in of.items()}


def pins(file: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(one.name): Version(str(one.specifier)[2:]) for one in map(Requirement, lines)}


def admitted(requirement: Requirement) -> list[str]:
    """The faults of the list that some version has which the requirement admits."""
    found = []
    for fault in FAULTS:
        if fault["package"] != canonicalize_name(requirement.name):
            continue
        least = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        below = "first" in fault and not (least and max(least) >= Version(fault["first"]))
        never = [one for one in fault.get("never", ()) if requirement.specifier.contains(one, prereleases=True)]
        if below or never:
            found.append(f"{requirement} admits {fault['advisory']}")
    return found


def test_no_requirement_admits_a_known_fault():
    assert [line for lines in required().values() for one in lines for line in admitted(one)] == []


@pytest.mark.parametrize("line", ["torch>=2.6", "Jinja2>=3.1", "lightning>=2.5", "pillow", "flwr<2", "torch>=2.9,<3"])
def test_a_requirement_that_admits_one_is_noticed(line):
    assert admitted(Requirement(line))


@pytest.mark.parametrize("file", FILES)
def test_no_pin_has_a_known_fault_and_all_are_admitted(file):
    found = pins(file)
    for fault in FAULTS:
        if (pin := found.get(fault["package"])) is not None:
            assert pin >= Version(fault.get("first", "0")) and str(pin) not in fault.get("never", ()), fault
    parts = required()
    if file == "constraints.txt":
        del parts["flower"]  # which needs other versions
    pinned = [one for lines in parts.values() for one in lines if canonicalize_name(one.name) in found]
    assert len(pinned) > 30
    assert [str(one) for one in pinned if not one.specifier.contains(found[canonicalize_name(one.name)])] == []


def test_each_fault_is_of_a_package_in_use_and_says_what_and_where_from():
    used = {canonicalize_name(one.name) for lines in required().values() for one in lines}
    used |= {name for file in FILES for name in pins(file)}
    for fault in FAULTS:
        assert fault.keys() - {"first", "never"} == {"package", "advisory", "why", "source"}, fault
        assert ("first" in fault) != ("never" in fault) and fault["package"] in used, fault
        assert re.fullmatch(r"(CVE-\d{4}-\d+|GHSA(-\w{4}){3}|PYSEC-\d{4}-\d+)", fault["advisory"]), fault
        assert fault["source"].startswith("https://") and len(fault["why"]) > 20, fault
