"""Records what the pinned packages require, as their published metadata says.

    make pins

For every pin of constraints.txt, pins.json has Requires-Python, Requires-Dist and the extras that
are used, from the public index: a private one may have other builds. torch stands there twice,
since its CUDA build and its CPU build have one version and different requirements.
tests/unit/test_pins.py resolves the pins against the record, without a network.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_HERE = Path(__file__).parent
CONSTRAINTS = _HERE / "constraints.txt"
RECORD = _HERE / "pins.json"
CPU_BUILD = "torch+cpu"
"""Key of torch's build without CUDA; `torch` is the one of the public index, with it."""
_CPU_WHEELS = "https://download.pytorch.org/whl/cpu/torch/"
_EXTRA = re.compile(r'extra == "([^"]+)"')
_OTHER_INDEXES = re.compile(r"PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|CONSTRAINT)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes infra/pins.json.")
    parser.add_argument("--cpu-wheels", default=_CPU_WHEELS, help="folder or page of torch+cpu")
    cpu_wheels: str = parser.parse_args().cpu_wheels
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line and line[0] != "#"]
    (torch,) = (pin for pin in pins if pin.startswith("torch=="))
    record = dict(_metadata(pins))
    cpu = [f"{torch}+cpu", "--no-index", "--find-links", cpu_wheels]
    record[CPU_BUILD] = dict(_metadata(cpu))["torch"]
    _drop_unused_extras(record)
    # One line for each package: a changed pin is a changed line.
    lines = (f" {json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {RECORD} ({len(record)} packages)")


def _metadata(words: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what pip finds for these requirements, each alone, in the public index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    done = subprocess.run(
        [*command, "--ignore-installed", "--report", "-", *words],
        env=_public_view(os.environ),
        stdout=subprocess.PIPE,
        check=True,
    )
    for entry in json.loads(done.stdout)["install"]:
        metadata = entry["metadata"]
        yield (
            canonicalize_name(metadata["name"]),
            {
                "version": metadata["version"],
                "requires_python": metadata.get("requires_python", ""),
                "extras": metadata.get("provides_extra", []),
                "requires": metadata.get("requires_dist", []),
            },
        )


def _drop_unused_extras(record: dict[str, dict[str, Any]]) -> None:
    """Leaves out extras that neither the project nor a package that it installs asks for."""
    project = tomllib.loads((_HERE.parent / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    used: set[tuple[str, str]] = set()
    while texts:
        requirement = Requirement(texts.pop())
        name = canonicalize_name(requirement.name)
        for extra in {"", *map(canonicalize_name, requirement.extras)} if name in record else ():
            if (name, extra) not in used:
                used.add((name, extra))
                texts += [text for text in record[name]["requires"] if extra in _extras_of(text)]
    for key, entry in record.items():
        names = {extra for name, extra in used if name == key.removesuffix("+cpu")}
        entry["extras"] = sorted(names - {""})
        entry["requires"] = [text for text in entry["requires"] if _extras_of(text) & {"", *names}]


def _extras_of(text: str) -> set[str]:
    """Returns the extras that a requirement belongs to; an empty name for the package itself."""
    extras = _EXTRA.findall(str(Requirement(text).marker or ""))
    return set(map(canonicalize_name, extras)) or {""}


def _public_view(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a pip that knows no index but its default."""
    variables = {key: text for key, text in environment.items() if not _OTHER_INDEXES.match(key)}
    return {**variables, "PIP_CONFIG_FILE": os.devnull}


if __name__ == "__main__":
    main()
