"""The controller of docs/extending.md, as it stands there."""

import pytest

from tests.unit.control.worlds import Alone, draft_length


@pytest.mark.usefixtures("documented_controller")
def test_the_documented_controller_stops_where_the_head_is_unsure() -> None:
    controller = Alone("threshold")
    assert controller.needs_probs
    assert draft_length(controller, ceiling=8, top1_prob=0.6) == 8
    assert draft_length(controller, ceiling=8, top1_prob=0.59) == 0
