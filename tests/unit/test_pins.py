"""The pins resolve: against what the pinned packages require, as infra/pins.json records it."""

import itertools
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Environment, Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

_REPOSITORY = Path(__file__).parents[2]
_CPU_BUILD = "torch+cpu"
_NAME = "eesd-dist"
_DEV_TOOLS = {"deepspeed", "hypothesis", "mypy", "playwright", "pytest", "ruff"}
_CUDA = ("cuda-", "nvidia-", "triton")


@cache
def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


@cache
def _pins() -> dict[str, str]:
    lines = (_REPOSITORY / "infra" / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


@cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((_REPOSITORY / "infra" / "pins.json").read_text())
    extras = _project()["optional-dependencies"]
    own = [*map(str, _project()["dependencies"])]
    own += [f'{text}; extra == "{extra}"' for extra, texts in extras.items() for text in texts]
    return {**record, _NAME: {"version": _project()["version"], "requires": own, "extras": extras}}


_parsed = cache(Requirement)


def _supported_pythons() -> list[str]:
    words = [classifier.rpartition(" :: ")[2] for classifier in _project()["classifiers"]]
    return [word for word in words if word.startswith("3.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """A host that the pins are installed on."""

    python: str
    architecture: str
    torch: str
    """Key in the record of the build of torch that its index offers."""

    @property
    def environment(self) -> Environment:
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.architecture,
            "platform_python_implementation": "CPython",
            "platform_release": "6.1",
            "platform_system": "Linux",
            "platform_version": "1",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


_MACHINES = [
    _Machine(python=python, architecture=architecture, torch=torch)
    for python, architecture, torch in itertools.product(
        _supported_pythons(), ("x86_64", "aarch64"), ("torch", _CPU_BUILD)
    )
]
_on_machines = pytest.mark.parametrize(
    "machine", _MACHINES, ids=lambda m: f"{m.python}-{m.architecture}-{m.torch}"
)


class _Resolve:
    """What `pip install -c infra/constraints.txt` installs, and what keeps it from doing so."""

    def __init__(self, machine: _Machine, pins: Mapping[str, str]) -> None:
        self._machine = machine
        self._pins = pins
        self._seen: set[tuple[str, str]] = set()
        self.faults: list[str] = []

    @property
    def installed(self) -> set[str]:
        return {name for name, _ in self._seen} - {_NAME}

    def add(self, name: str, extras: Collection[str] = ()) -> None:
        """Adds a package and all that it requires here, with these of its extras."""
        todo = [(name, extra) for extra in ("", *extras)]
        while todo:
            package, extra = todo.pop()
            if (package, extra) in self._seen:
                continue
            self._seen.add((package, extra))
            for requirement in self._requirements(package, extra):
                required = canonicalize_name(requirement.name)
                self._check(package, requirement)
                if required in self._entries:
                    todo += [(required, extra) for extra in ("", *requirement.extras)]

    @property
    def _entries(self) -> Mapping[str, Any]:
        return {**_record(), "torch": _record()[self._machine.torch]}

    def _requirements(self, package: str, extra: str) -> Iterator[Requirement]:
        entry = self._entries[package]
        if extra and canonicalize_name(extra) not in set(map(canonicalize_name, entry["extras"])):
            self.faults.append(f"{package} has no extra {extra}")
        environment = {**self._machine.environment, "extra": extra}
        for text in entry["requires"]:
            requirement = _parsed(text)
            marker: Marker | None = requirement.marker
            if marker is None or marker.evaluate(environment):
                yield requirement

    def _check(self, package: str, requirement: Requirement) -> None:
        required = canonicalize_name(requirement.name)
        if required == _NAME:
            return
        pin = self._pins.get(required)
        if pin is None:
            self.faults.append(f"{package} requires {requirement}, which is not pinned")
        elif not requirement.specifier.contains(pin, prereleases=True):
            self.faults.append(f"{package} requires {requirement}, pinned is {pin}")


def _faults(machine: _Machine, pins: Mapping[str, str]) -> list[str]:
    resolve = _Resolve(machine, pins)
    resolve.add(_NAME, _project()["optional-dependencies"])
    for name in pins:
        resolve.add(name)
    return resolve.faults


def test_the_record_is_of_the_pins() -> None:
    recorded = {name: entry["version"] for name, entry in _record().items()}
    builds = {_NAME: _project()["version"], _CPU_BUILD: f"{_pins()['torch']}+cpu"}
    assert recorded == {**_pins(), **builds}, "a pin was changed: run `make pins`"


@_on_machines
def test_every_requirement_of_every_pin_is_pinned_and_satisfied(machine: _Machine) -> None:
    assert _faults(machine, _pins()) == []


def test_another_triton_than_torch_requires_is_a_fault_on_gpu_hosts_alone() -> None:
    pins = {**_pins(), "triton": "3.9.0"}
    for machine in _MACHINES:
        faults = _faults(machine, pins)
        assert bool(faults) == (machine.torch == "torch")
        assert all("torch requires triton" in fault for fault in faults)


def test_a_requirement_without_a_pin_is_a_fault() -> None:
    pins = {name: version for name, version in _pins().items() if name != "msgpack"}
    assert "ray requires msgpack<2.0.0,>=1.0.0, which is not pinned" in _faults(_MACHINES[0], pins)


def test_every_pin_is_installed_somewhere() -> None:
    installed: set[str] = set()
    for machine in _MACHINES:
        resolve = _Resolve(machine, _pins())
        resolve.add(_NAME, _project()["optional-dependencies"])
        installed |= resolve.installed
    assert installed == set(_pins())


@pytest.mark.parametrize("python", _supported_pythons())
def test_every_pin_runs_on_every_supported_python(python: str) -> None:
    assert SpecifierSet(_project()["requires-python"]).contains(f"{python}.0")
    others = [
        f"{name} requires Python {entry['requires_python']}"
        for name, entry in _record().items()
        if not SpecifierSet(entry.get("requires_python", "")).contains(f"{python}.0")
    ]
    assert others == []


@_on_machines
def test_serving_alone_installs_no_tool_of_developers(machine: _Machine) -> None:
    resolve = _Resolve(machine, _pins())
    resolve.add(_NAME)
    assert {"ray", "torch", "transformers"} <= resolve.installed
    assert not resolve.installed & _DEV_TOOLS
    cuda = {name for name in resolve.installed if name.startswith(_CUDA)}
    assert bool(cuda) == (machine.torch == "torch")
