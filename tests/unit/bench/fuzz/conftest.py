from collections.abc import Callable

import pytest
import torch

from eesd_dist.bench.fuzz.drawing.cases import Source
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.config import DType

MakeSource = Callable[..., Source]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    return ModelShelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="session")
def make_source(shelf: ModelShelf) -> MakeSource:
    def make(
        seed: int,
        *,
        num_models: int = 1,
        dtypes: tuple[DType, ...] = ("float32", "bfloat16"),
        min_verify_ranks: int = 1,
    ) -> Source:
        models = tuple(shelf.random(seed, number) for number in range(num_models))
        return Source(
            seed=seed,
            models=models,
            prompts={},
            dtypes=dtypes,
            device="cpu",
            is_on_cpu=True,
            min_verify_ranks=min_verify_ranks,
        )

    return make
