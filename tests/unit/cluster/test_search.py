from dataclasses import replace

import pytest

from cluster.planning.machine import Machine
from cluster.planning.planner import plan
from cluster.planning.search import Heads, search
from cluster.planning.shapes import AcceptanceAt, Load, Split, named_shape
from eesd_dist.errors import ConfigError

SHAPE = named_shape("llama-2-13b")
MACHINE = Machine(memory_bytes=72e9)
HEADS = Heads(draft_vocab_size=8000)


def test_the_search_finds_what_trying_every_split_finds() -> None:
    load = Load(num_requests=8, max_draft_tokens=4)
    found = search(SHAPE, machine=MACHINE, load=load, num_gpus=4, heads=HEADS)
    tried = []
    for draft in (1, 2, 4):
        for verify in (1, 2, 4):
            pipelines = 4 // (draft + verify)
            for layer in range(1, 11):
                for vocabulary in (None, 8000):
                    split = Split(
                        exit_layer=layer,
                        draft_tensor_parallel_size=draft,
                        verify_tensor_parallel_size=verify,
                        draft_vocab_size=vocabulary,
                    )
                    acceptance = 0.8 * (1.0 if vocabulary is None else 0.95)
                    if pipelines:
                        tried.append(
                            plan(
                                SHAPE,
                                machine=MACHINE,
                                split=split,
                                load=replace(load, acceptance=acceptance),
                                num_pipelines=pipelines,
                                num_gpus=4,
                            )
                        )
    assert len(found) == len(tried)
    assert found[0].tokens_per_s == max(each.tokens_per_s for each in tried)
    assert [each.tokens_per_s for each in found] == pytest.approx(
        sorted((each.tokens_per_s for each in tried), reverse=True)
    )


def test_pipelines_share_the_requests_and_all_of_them_count() -> None:
    found = search(SHAPE, machine=MACHINE, load=Load(num_requests=64), num_gpus=8, heads=HEADS)
    several = next(each for each in found if each.num_pipelines > 1)
    share = several.forecast.load.num_requests
    assert share * several.num_pipelines >= 64
    assert several.tokens_per_s == pytest.approx(
        64 * several.best.expected_tokens / several.best.round_s
    )


def test_a_single_request_uses_a_single_pipeline() -> None:
    found = search(SHAPE, machine=MACHINE, load=Load(), num_gpus=8, heads=HEADS)
    assert {each.num_pipelines for each in found} == {1}


def test_splits_that_do_not_fit_the_memory_are_left_out() -> None:
    small = replace(MACHINE, memory_bytes=20e9)
    found = search(SHAPE, machine=small, load=Load(), num_gpus=8, heads=HEADS)
    assert 1 not in {each.split.verify_tensor_parallel_size for each in found}
    tiny = replace(MACHINE, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"no split .* fits 8 GPUs; the last one tried: a "):
        search(SHAPE, machine=tiny, load=Load(), num_gpus=8, heads=HEADS)


@pytest.mark.parametrize("measured_is_truncated", [False, True])
def test_measured_survival_is_that_of_the_measured_head(measured_is_truncated: bool) -> None:
    measured = Load(acceptance=0.6, survival=(0.8, 0.5), max_draft_tokens=3)
    heads = replace(HEADS, coverage=0.9, measured_is_truncated=measured_is_truncated)
    assert heads.load_at(measured, 2, truncated=False) == measured
    found = heads.load_at(measured, 2, truncated=True)
    if measured_is_truncated:
        assert found == measured
    else:
        assert found.acceptance == pytest.approx(0.6 * 0.9)
        assert found.survival == pytest.approx((0.8 * 0.9, 0.5 * 0.81))


def test_the_acceptance_between_two_exit_layers_is_interpolated() -> None:
    points = (
        AcceptanceAt(exit_layer=8, acceptance=0.9),
        AcceptanceAt(exit_layer=4, acceptance=0.5),
    )
    heads = replace(HEADS, acceptance_at=points)
    at = [heads.load_at(Load(), layer, truncated=False).acceptance for layer in (1, 4, 6, 8, 20)]
    assert at == pytest.approx([0.5, 0.5, 0.7, 0.9, 0.9])
    assert heads.load_at(Load(), 8, truncated=True).acceptance == pytest.approx(0.9 * 0.95)
