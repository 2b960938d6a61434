from dataclasses import replace

import pytest

from cluster.planning.heads import Heads
from cluster.planning.machine import Machine
from cluster.planning.planner import Plan, plan
from cluster.planning.search import search, splits_of
from cluster.planning.shapes import Load, Split, named_shape
from eesd_dist.errors import ConfigError

SHAPE = named_shape("llama-2-13b")
MACHINE = Machine(memory_bytes=72e9)
HEADS = Heads()


def _search(load: Load, num_gpus: int, machine: Machine = MACHINE) -> tuple[Plan, ...]:
    splits = splits_of(SHAPE, draft_vocab_size=8000)
    return search(SHAPE, splits=splits, machine=machine, load=load, num_gpus=num_gpus, heads=HEADS)


def test_the_search_finds_what_trying_every_split_finds() -> None:
    load = Load(num_requests=8, max_draft_tokens=4)
    plans = _search(load, 4)
    degrees = [(draft, verify) for draft in (1, 2, 4) for verify in (1, 2, 4)]
    tried = []
    shared = [((1, verify), True) for verify in (1, 2, 4)]
    for (draft, verify), shares_gpu in [*((degree, False) for degree in degrees), *shared]:
        pipelines = 4 // (draft + verify - shares_gpu)
        for layer in range(1, 11):
            for vocabulary in (None, 8000):
                split = Split(
                    exit_layer=layer,
                    draft_tensor_parallel_size=draft,
                    verify_tensor_parallel_size=verify,
                    draft_vocab_size=vocabulary,
                    shares_gpu=shares_gpu,
                )
                if pipelines:
                    tried.append(
                        plan(
                            SHAPE,
                            machine=MACHINE,
                            split=split,
                            load=load,
                            acceptance=HEADS.acceptance_of(split),
                            num_pipelines=pipelines,
                            num_gpus=4,
                        )
                    )
    assert len(plans) == len(tried)
    assert plans[0].tokens_per_s == max(candidate.tokens_per_s for candidate in tried)
    assert [candidate.tokens_per_s for candidate in plans] == pytest.approx(
        sorted((candidate.tokens_per_s for candidate in tried), reverse=True)
    )


def test_pipelines_share_the_requests_and_all_of_them_count() -> None:
    plans = _search(Load(num_requests=64), 8)
    replicated = next(candidate for candidate in plans if candidate.num_pipelines > 1)
    share = replicated.forecast.load.num_requests
    assert share * replicated.num_pipelines >= 64
    assert replicated.tokens_per_s == pytest.approx(
        64 * replicated.best.expected_tokens / replicated.best.round_s
    )


def test_a_single_request_uses_a_single_pipeline() -> None:
    plans = _search(Load(), 8)
    assert {candidate.num_pipelines for candidate in plans} == {1}


def test_splits_that_do_not_fit_the_memory_are_left_out() -> None:
    small = replace(MACHINE, memory_bytes=20e9)
    plans = _search(Load(), 8, small)
    assert 1 not in {candidate.split.verify_tensor_parallel_size for candidate in plans}
    tiny = replace(MACHINE, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"no split fits 8 GPUs; the last one tried: a "):
        _search(Load(), 8, tiny)
