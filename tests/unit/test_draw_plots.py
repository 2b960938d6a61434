"""The plots of the pages are drawn from records of benchmarks."""

import json
import re

import pytest

from infra.draw_plots import PICTURES, RECORDS, ROOT, machine_panels, picture, pictures


def test_the_script_draws_the_committed_plots_again() -> None:
    for name, panels in pictures().items():
        assert (PICTURES / name).read_text() == picture(panels), name


def test_the_figures_of_the_plot_are_those_of_the_records() -> None:
    two_cores, service, engine = (panel.speedups for panel in machine_panels())
    record = json.loads((RECORDS / "2026-11-26-online-2cpu.json").read_text())
    assert two_cores[16] == record["summary"]["tokens_per_s_on_over_off"]["16"] == 1.879
    assert service[1] == pytest.approx(751.5 / 309.0)
    assert engine == pytest.approx({1: 1.202, 8: 1.090, 32: 1.412, 64: 0.832}, abs=1e-3)


def test_the_table_of_the_readme_has_the_figures_of_the_plot() -> None:
    rows = re.findall(
        r"^\| .* \| \**(\d\.\d\d)\** \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    two_cores, service, engine = (panel.speedups for panel in machine_panels())
    alone = json.loads((RECORDS / "2026-11-26-offline-third-2cpu.json").read_text())
    ratios = [
        alone["variants"]["goodput"]["over_plain"],
        *(two_cores[16], service[1], service[32], engine[1], engine[64]),
    ]
    assert rows == [f"{ratio:.2f}" for ratio in ratios]
