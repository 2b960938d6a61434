"""An engine of the fuzz is a pure function of the seed and its number, and can be serialized."""

from collections import Counter
from pathlib import Path

import pytest

from eesd_dist.bench.fuzz.cases import EngineSetup, engine_config, load_case, save_case
from eesd_dist.bench.fuzz.drawing.cases import GROUP_SIZE
from eesd_dist.bench.fuzz.drawing.engines import degrees_of
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import ConfigError
from eesd_dist.schedule.gate import Gate
from tests.unit.bench.fuzz.conftest import MakeSource


def test_the_same_seed_and_number_give_the_same_case_in_any_order(make_source: MakeSource) -> None:
    forward = [make_source(4, num_models=2).case(number) for number in range(25)]
    other = make_source(4, num_models=2)
    assert [other.case(number) for number in reversed(range(25))] == forward[::-1]
    assert make_source(5).case(3) != forward[3]


def test_a_case_survives_its_file(make_source: MakeSource, tmp_path: Path) -> None:
    for number in range(30):
        case = make_source(4).case(number)
        save_case(case, tmp_path / "case.json")
        assert load_case(tmp_path / "case.json") == case


def test_what_is_no_case_is_refused(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text('{"seed": 1}')
    with pytest.raises(ConfigError, match="found no case of the fuzz"):
        load_case(tmp_path / "case.json")


def test_every_request_is_one_that_its_engines_admit(
    make_source: MakeSource, shelf: ModelShelf
) -> None:
    for number in range(0, 80, 3):
        case = make_source(4, num_models=3).case(number)
        folder = shelf.folder(case.world.model)
        for setup in case.engines:
            layout = layout_of(engine_config(case.world, setup, folder=folder))
            gate = Gate(
                max_model_len=layout.max_model_len,
                vocab_size=layout.spec.vocab_size,
                num_pages=setup.num_pages,
                page_size=case.world.page_size,
            )
            for entry in case.entries:
                gate.check(entry.request)


def test_engines_of_a_group_share_a_world_and_its_texts(make_source: MakeSource) -> None:
    cases = [make_source(4, num_models=3).case(number) for number in range(GROUP_SIZE)]
    assert len({case.world for case in cases}) == 1
    texts = {(e.request.prompt, e.request.sampling) for case in cases for e in case.entries}
    assert len(texts) < sum(len(case.entries) for case in cases) / 3


def test_everything_that_can_be_drawn_is_drawn(make_source: MakeSource) -> None:
    source = make_source(4, num_models=3)
    cases = [source.case(number) for number in range(20 * GROUP_SIZE)]
    setups: list[EngineSetup] = [setup for case in cases for setup in case.engines]
    assert {case.world.model for case in cases} == {model.name for model in source.models}
    assert {case.world.dtype for case in cases} == {"float32", "bfloat16"}
    assert {case.world.kv_cache_dtype for case in cases} == {"auto", "bfloat16"}
    assert {setup.speculation.controller for setup in setups} == set(CONTROLLER_NAMES)
    assert {setup.scheduler.overlap for setup in setups} == {True, False, "auto"}
    assert {setup.link.kind for setup in setups} == {"inline", "thread"}
    assert {setup.speculation.tree.shape for setup in setups} == {"none", "static", "dynamic"}
    assert {setup.prefix_caching for setup in setups} == {True, False}
    assert {len(case.engines) for case in cases} == {1, 2}
    kinds = Counter(trouble.kind for case in cases for trouble in case.troubles)
    assert min(kinds[kind] for kind in ("abort", "resume", "loss", "migration")) > 20
    sampling = [entry.request.sampling for case in cases for entry in case.entries]
    assert min(params.seed for params in sampling) < -(2**62)
    assert max(params.seed for params in sampling) > 2**62
    assert any(params.needs_history for params in sampling)
    assert any(params.logit_bias for params in sampling)
    ranks = {(case.world.draft_ranks, case.world.verify_ranks) for case in cases}
    max_degree = max(max(degrees_of(model.spec)) for model in source.models)
    assert (1, 1) in ranks
    assert max_degree == 1 or len(ranks) > 1


def test_an_engine_has_as_many_verify_ranks_as_the_run_requires(make_source: MakeSource) -> None:
    source = make_source(3, num_models=4, min_verify_ranks=3)
    assert all(source.case(n).world.verify_ranks >= 3 for n in range(0, 60, GROUP_SIZE))
