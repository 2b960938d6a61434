from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.calibrator import Calibrator
from tests.support.drafters import Agreement, save_head, save_target

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    agreements: tuple[Agreement, ...] = ("always", "sometimes", "never")
    folders = {name: save_head(target, folder / name, name) for name in agreements}
    folders["truncated"] = save_head(
        target, folder / "truncated", "sometimes", draft_vocab=list(range(0, 96, 2))
    )
    folders["calibrated"] = save_head(target, folder / "calibrated", "sometimes")
    Calibrator(log_gap=1.0, depth=-0.1, bias=-0.5, logit_top1=0.0, num_judged=1).save(
        folders["calibrated"]
    )
    return folders


@pytest.fixture(scope="session")
def make_config(target: Path, heads: dict[str, Path]) -> MakeConfig:
    def make(
        head: str = "sometimes",
        *,
        dtype: DType = "float32",
        numerics: Numerics = "invariant",
        num_pages: int = 96,
        page_size: int = 16,
        scheduler: SchedulerConfig | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(path=target, head=heads[head], dtype=dtype, numerics=numerics),
            cache=CacheConfig(num_pages=num_pages, page_size=page_size),
            scheduler=scheduler or SchedulerConfig(prefill_chunk=24),
            speculation=speculation or SpeculationConfig(max_draft_tokens=5, learn_costs=False),
        )

    return make
