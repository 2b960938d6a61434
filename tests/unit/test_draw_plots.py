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
    assert engine == pytest.approx({1: 1.1425, 8: 1.05, 32: 0.9505, 64: 0.9377})


def test_the_tables_of_the_readme_have_the_figures_of_the_records() -> None:
    readme = (ROOT / "README.md").read_text()
    _, service, engine = (panel.speedups for panel in machine_panels())
    ratios = re.findall(r"^\| [^|]* \| [\d,]* \| \**(\d\.\d\d)\** \|$", readme, re.MULTILINE)
    expected = (service[1], service[32], engine[1], engine[64])
    assert ratios == [f"{ratio:.2f}" for ratio in expected]
    batches = json.loads((RECORDS / "2026-11-30-batches-2cpu.json").read_text())
    labels = {"bundled prompts": "", "1,900 tokens of prompt": ", 1,900 tokens"}
    for kind, label in labels.items():
        for count in batches["AVX2"][kind]["batches"]:
            cells = [f"| {count}{label} |"]
            for instructions in ("AVX512_BF16", "AVX2"):
                row = batches[instructions][kind]["batches"][count]
                cells += [
                    f" {row[name]['tokens_per_s']:,.0f} |"
                    for name in ("transformers", "plain", "speculation")
                ]
                cells.append(f" {row['speculation']['over_plain']['value']:.2f} |")
            assert "".join(cells) in readme
