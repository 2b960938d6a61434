"""The plot of the README is drawn from records of benchmarks."""

import json

import pytest

from infra.draw_plots import PICTURE, RECORDS, panels, picture


def test_the_script_draws_the_committed_plot_again() -> None:
    assert PICTURE.read_text() == picture()


def test_the_figures_of_the_plot_are_those_of_the_records() -> None:
    two_cores, service, engine = (panel.speedups for panel in panels())
    record = json.loads((RECORDS / "2026-11-26-online-2cpu.json").read_text())
    assert two_cores[16] == record["summary"]["tokens_per_s_on_over_off"]["16"] == 1.879
    assert service[1] == pytest.approx(751.5 / 309.0)
    assert engine == pytest.approx({1: 1.202, 8: 1.090, 32: 1.412, 64: 0.832}, abs=1e-3)
