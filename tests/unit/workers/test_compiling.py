"""Kernels that one process compiles while those that need them start."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from eesd_dist.backends.cpu import ahead
from eesd_dist.backends.cpu.ahead import compile_lock, compile_when_cached, is_compiling
from eesd_dist.backends.cpu.compiled import is_kept, kernel
from eesd_dist.backends.cpu.kernels.draft import is_draft_cached
from eesd_dist.backends.cpu.kernels.verify import is_verify_cached
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig
from eesd_dist.user_folders import CACHE_VARIABLE
from eesd_dist.workers import compiling
from eesd_dist.workers.compiling import start_compiling
from tests.support.drafters import save_head, save_target

DEADLINE_S = 180.0


def wait_until(is_so: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + DEADLINE_S
        time.sleep(0.02)


def children() -> set[int]:
    listing = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "compiling"], capture_output=True
    )
    return {int(pid) for pid in listing.stdout.split()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = save_target(tmp_path_factory.mktemp("target"))
    head = save_head(target, tmp_path_factory.mktemp("head"), "sometimes")
    return EngineConfig(
        model=ModelConfig(path=target, head=head, dtype="float32"),
        cache=CacheConfig(num_pages=96, page_size=16),
    )


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_process_keeps_all_kernels_for_ranks_that_wait(
    empty_folder: Path, tmp_path: Path, config: EngineConfig
) -> None:
    start_compiling(config)
    wait_until(is_compiling)
    assert not is_draft_cached()
    ahead.wait_for_layers()
    chain = compile_when_cached(
        lambda: is_draft_cached(), is_cached=is_draft_cached, is_needed=False
    )
    assert chain.get() is None
    wait_until(lambda: chain.get() is True)
    assert is_verify_cached()
    wait_until(lambda: not is_compiling())
    before = children()
    start_compiling(config)
    copy = shutil.copytree(config.model.path, tmp_path / "copy")
    start_compiling(
        config.model_copy(update={"model": config.model.model_copy(update={"path": copy})})
    )
    assert children() <= before


def test_only_one_process_compiles(empty_folder: Path, config: EngineConfig) -> None:
    with compile_lock() as is_holder:
        assert is_holder
        with compile_lock() as is_second_holder:
            assert not is_second_holder
        command = [sys.executable, "-m", compiling.__name__, config.model_dump_json()]
        assert subprocess.run(command, timeout=DEADLINE_S).returncode == 0
        assert is_compiling()
        waiting = Thread(target=ahead.wait_for_layers, daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert not is_compiling()


def test_it_ends_with_the_process_that_started_it(empty_folder: Path, config: EngineConfig) -> None:
    program = (
        "import sys, time; from eesd_dist.config import EngineConfig;"
        "from eesd_dist.workers.compiling import start_compiling;"
        "start_compiling(EngineConfig.model_validate_json(sys.argv[1])); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, config.model_dump_json()]
    with subprocess.Popen(command) as parent:
        wait_until(is_compiling)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_compiling())
    assert not is_draft_cached()


def test_a_folder_that_cannot_be_written_stops_nobody(
    tmp_path: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    command = [sys.executable, "-m", compiling.__name__, config.model_dump_json()]
    done = subprocess.run(command, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0
    assert "kernels not compiled ahead" in done.stderr
    ahead.wait_for_layers()


def test_what_another_installation_has_kept_is_not_taken_for_kept(
    empty_folder: Path, tmp_path: Path
) -> None:
    source = "def first(x_N):\n    x_N[0] = 1\n"
    functions = []
    for name in ("one", "other"):
        file = tmp_path / name / "same.py"
        file.parent.mkdir()
        file.write_text(source)
        spec = spec_from_file_location(f"{name}_same", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        functions.append(module.first)
    first, other = functions
    assert not is_kept(first)
    kernel(first)(np.zeros(2))
    assert is_kept(first)
    assert not is_kept(other)  # Numba would compile it again
