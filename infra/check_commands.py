"""Checks the shell commands in the cluster files with shellcheck.

    python infra/check_commands.py [FILE ...]

`ray up` runs each entry of the `*_commands` lists with bash, in the home of the SSH user. They are
checked one by one, with the file that they source. Prints the findings with the name of the list;
the exit status is 1 if there is one.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "cluster" / "configs"


def main(paths: list[str]) -> int:
    num_wrong = 0
    for file in [Path(path) for path in paths] or sorted(CONFIGS.glob("*.yaml")):
        for where, command in _commands(file):
            findings = shellcheck(command)
            if findings:
                num_wrong += 1
                print(f"{file.name}: {where}:\n{command}\n{findings}")
    return int(num_wrong > 0)


def shellcheck(command: str) -> str:
    """Returns the findings, empty if there are none."""
    words = [
        str(Path(sys.executable).with_name("shellcheck")),
        "--shell=bash",
        "--external-sources",
    ]
    done = subprocess.run(
        [*words, f"--source-path={ROOT}", "-"],
        input=command + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode > 1:
        raise RuntimeError(f"shellcheck itself failed with {done.returncode}: {done.stderr}")
    return done.stdout


def _commands(file: Path) -> Iterator[tuple[str, str]]:
    content = yaml.safe_load(file.read_text())
    for section, commands in content.items():
        if section.endswith("_commands"):
            for index, command in enumerate(commands):
                yield f"{section}[{index}]", command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
