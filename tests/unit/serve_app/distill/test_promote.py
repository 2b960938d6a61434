"""A refreshed head is offered to the running service only if it is better."""

import json
from pathlib import Path

from eesd_dist.distill.compare import Difference, HeldOutFigures
from eesd_dist.distill.refresh import REPORT_FILE, RefreshReport
from serve_app.distill.commands import Promotion, promote_if_better

FIGURES = HeldOutFigures(num_positions=9, agreement=0.5, one_minus_tv=0.5, acceptance=0.5)
NO_GAIN = Difference(mean=0.0, low=0.0, high=0.0)


def test_a_head_that_is_no_better_is_not_offered_to_the_service(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text("{}")
    report = RefreshReport(
        num_pieces=8,
        num_tokens=80,
        num_held_out=8,
        old=FIGURES,
        new=FIGURES,
        gain=NO_GAIN,
        agreement_gain=NO_GAIN,
        one_minus_tv_gain=NO_GAIN,
    )
    # There is no service here: had it been asked, this would raise.
    promotion = Promotion(address="127.0.0.1:1")
    message = promote_if_better(tmp_path, report, promotion, compared_with=tmp_path)
    assert message.startswith("not promoted")
    assert "promoted" not in json.loads((tmp_path / REPORT_FILE).read_text())
