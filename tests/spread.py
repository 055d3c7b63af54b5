"""In how many files of the package a concept is named, in code or prose: `python tests/spread.py [COMMIT ...]`.

A concept that has an object is named in few files. Without commits, the files of the working tree are read.
"""

import re
import subprocess
import sys
from collections.abc import Mapping

from rooms import PACKAGE, ROOT

from dpfl_lightning.config.registry import names_of

TASKS = "|".join(names_of("task"))

#: concept -> what names it
CONCEPTS = {
    "persons": r"(?i)(?<![a-z])persons?(?![a-z])",
    "noise of a simulation": r"noise_key|test_key|KEYED|(?<![a-z_])simulated\b(?! (?:client|network|group|person|wrong|"
    r"p-value|update|difference))|(?<![a-z_])SIMULATED|\.simulation\b|key of a simulation",
    "counts of held-out records": r"(?i:(?<![a-z])(?:\w*count\w*_held_out|of_held_out|held_out_counts|of_counts|"
    r"gaussian_?counts|laplace_?counts)|counts? of (?:[a-z]+ )?held[- ]out|held[- ]out counts?)",
    "Laplace noise": r"(?i)laplace",
    "a task's name, outside its class": rf"[\"'](?:{TASKS})[\"']|(?<=task )(?:{TASKS})\b|(?<=task: )(?:{TASKS})\b",
}
SUFFIXES = (".py", ".html")  # of code and templates
#: files in which a concept is at home
AT_HOME = {"a task's name, outside its class": {"dpfl_lightning/models/tasks.py"}}


def working_tree() -> dict[str, str]:
    """Path -> text of each file of the package."""
    paths = sorted(path for suffix in SUFFIXES for path in PACKAGE.rglob(f"*{suffix}"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def committed(commit: str) -> dict[str, str]:
    """As `working_tree`, of a commit."""
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", commit, "dpfl_lightning"], text=True)
    paths = [path for path in listed.splitlines() if path.endswith(SUFFIXES)]
    return {path: subprocess.check_output([*git, "show", f"{commit}:{path}"], text=True) for path in paths}


def named_in(files: Mapping[str, str], concept: str) -> list[str]:
    """The files that name a concept, without those in which it is at home."""
    home = AT_HOME.get(concept, set())
    return [path for path, text in files.items() if path not in home and re.search(CONCEPTS[concept], text)]


def main(commits: list[str]) -> None:
    trees = {commit: committed(commit) for commit in commits} or {"now": working_tree()}
    for concept in CONCEPTS:
        print(f"{concept}: " + ", ".join(f"{len(named_in(files, concept))} ({name})" for name, files in trees.items()))
    if not commits:
        for concept in CONCEPTS:
            print("", concept, *named_in(trees["now"], concept), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
