"""One pipeline on CPUs with room in memory keeps warm spares; nothing else does by itself."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serve_app.config import ServiceConfig, service_config
from serve_app.service import warm_spares
from serve_app.service.warm_spares import with_default_spares


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 GiB free, no GPU."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    monkeypatch.setattr(warm_spares, "_GPU_DRIVER", tmp_path / "none")


def _config(folder: Path, *, weight_bytes: int = 1000, **keys: object) -> ServiceConfig:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    return service_config({"engine": {"model": {"path": str(folder)}}, **keys})


def _spares(config: ServiceConfig) -> tuple[int, int]:
    spares = with_default_spares(config).recovery.spares
    return spares.num_draft, spares.num_verify


def test_one_pipeline_on_cpus_keeps_one_spare_of_each_stage(tmp_path: Path) -> None:
    assert _spares(_config(tmp_path)) == (1, 1)
    assert _spares(_config(tmp_path, recovery={"spares": {"draft": 0}})) == (0, 1)
    assert _spares(_config(tmp_path, recovery={"spares": {"verify": 2, "draft": 3}})) == (3, 2)


def test_no_spare_is_kept_where_memory_or_a_gpu_would_be_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _spares(_config(tmp_path, weight_bytes=2 * 2**30)) == (0, 0)
    assert _spares(_config(tmp_path, pipelines={"min_count": 1, "max_count": 2})) == (0, 0)
    monkeypatch.setattr(warm_spares, "_GPU_DRIVER", tmp_path)
    config = _config(tmp_path)
    assert config.engine.model.device == "auto"
    assert _spares(config) == (0, 0)


def test_a_configuration_without_numbers_keeps_none(tmp_path: Path) -> None:
    spares = _config(tmp_path).recovery.spares
    assert (spares.num_draft, spares.num_verify) == (0, 0)
