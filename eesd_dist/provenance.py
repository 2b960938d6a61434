"""Provenance of a number: hardware, versions, commit, command, seed.

Every benchmark and checkpoint contains a `Provenance`, so that its figures can be reproduced. What
cannot be determined (no git, no GPU driver) is None or empty.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "ray",
    "numpy",
    "deepspeed",
)
"""Distributions with versions that can change a figure."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""Instruction sets that affect the speed and the type of a CPU's matrix products."""

QUESTION_TIMEOUT_S = 10.0

# The folders of an absolute path that is an argument, or the value of one (`--out=/a/b`).
_ABSOLUTE_FOLDER = re.compile(r"(?<![^=])/(?:[^/]+/)*(?=[^/])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine, as the operating system reports it."""

    cpu_model: str
    num_cpus: int
    """CPUs this process may run on."""
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    gpus: tuple[str, ...]
    """Name, memory and driver of each, as the driver prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The machine, software and command of one run."""

    command: str
    commit: str | None
    """Full git SHA of the checkout the code runs from; None outside one."""
    has_local_changes: bool | None
    """True if tracked files differ from `commit`; None outside a checkout."""
    python: str
    system: str
    versions: tuple[tuple[str, str], ...]
    hardware: Hardware
    seed: int | None
    started_unix_s: float

    def as_json(self) -> dict[str, object]:
        """Returns a dict for `json.dumps`: versions by name, all other fields unchanged."""
        return {**asdict(self), "versions": dict(self.versions)}

    def lines(self) -> list[str]:
        """Returns the same as text, one fact per line."""
        hardware = self.hardware
        changes = " with local changes" if self.has_local_changes else ""
        return [
            f"command   {self.command}",
            f"commit    {self.commit or 'not a git checkout'}{changes}",
            f"cpu       {hardware.cpu_model}, {hardware.num_cpus} usable, "
            f"{' '.join(hardware.cpu_flags) or 'no flags of interest'}",
            f"memory    {hardware.memory_bytes / 2**30:.1f} GiB",
            f"gpu       {'; '.join(hardware.gpus) or 'none'}",
            f"system    {self.system}, Python {self.python}",
            f"versions  {', '.join(f'{name} {version}' for name, version in self.versions)}",
            f"seed      {'none' if self.seed is None else self.seed}",
        ]


def collect_provenance(
    *, seed: int | None = None, command: Sequence[str] | None = None, root: Path | None = None
) -> Provenance:
    """Reads the machine, the checkout at `root` (default: this file's) and the command line.

    Records and heads are published: of an absolute path, only the last name is kept."""
    checkout = Path(__file__).resolve().parent if root is None else root
    commit = _answer(["git", "-C", str(checkout), "rev-parse", "HEAD"])
    status = _answer(["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"])
    return Provenance(
        command=shlex.join(
            _ABSOLUTE_FOLDER.sub("", argument)
            for argument in (sys.argv if command is None else command)
        ),
        commit=commit or None,
        has_local_changes=None if status is None else bool(status),
        python=platform.python_version(),
        system=platform.platform(),
        versions=_versions(),
        hardware=read_hardware(),
        seed=seed,
        started_unix_s=time.time(),
    )


def read_hardware() -> Hardware:
    model, flags = _cpu_facts(_text_of(Path("/proc/cpuinfo")))
    return Hardware(
        cpu_model=model or platform.processor() or platform.machine(),
        num_cpus=_num_usable_cpus(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
    )


def _cpu_facts(cpuinfo: str) -> tuple[str, frozenset[str]]:
    """Returns model name and flags of the first CPU; x86 has `flags`, Arm has `Features`."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def _num_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> tuple[tuple[str, str], ...]:
    """Reads versions from package metadata: importing torch to get its version takes seconds."""
    versions: list[tuple[str, str]] = []
    for name in PACKAGES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(versions)


def _gpus() -> tuple[str, ...]:
    fields = "name,memory.total,driver_version"
    answer = _answer(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    return tuple((answer or "").splitlines())


def _answer(command: list[str]) -> str | None:
    """Returns a program's output, or None when it cannot be started, fails or times out."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=QUESTION_TIMEOUT_S
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # only Linux has /proc
        return ""
