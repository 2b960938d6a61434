"""Options that a step refuses before it reads anything."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.distill.calibrate import CalibrateOptions
from eesd_dist.distill.collect import CollectOptions, CollectRequest
from eesd_dist.distill.evaluate import EvaluateOptions
from eesd_dist.distill.held_out import PromptChoice
from eesd_dist.distill.run import RunRequest
from eesd_dist.errors import ConfigError

COLLECT = CollectOptions(model=Path("model"))
EVALUATE = EvaluateOptions()
CALIBRATE = CalibrateOptions()


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: replace(EVALUATE, timed_prompts=0), "timed_prompts is 0: it must be above 0"),
        (lambda: replace(EVALUATE, temperatures=(0.0, -1.0)), r"temperatures are \[0.0, -1.0\]"),
        (lambda: replace(EVALUATE, temperatures=()), r"temperatures are \[\]"),
        (lambda: replace(CALIBRATE, temperatures=(-1.0,)), r"temperatures are \[-1.0\]"),
        (lambda: replace(CALIBRATE, max_tokens=0), "max_tokens is 0"),
        (lambda: replace(COLLECT, workers=0), "workers is 0"),
        (lambda: replace(COLLECT, held_out=0), "held_out is 0"),
        (lambda: replace(COLLECT, temperatures=(-0.5,)), r"temperatures are \[-0.5\]"),
        (lambda: CollectRequest(options=COLLECT, out=Path(), minutes=0.0), "minutes is 0.0"),
        (lambda: RunRequest(collect=COLLECT, out=Path(), minutes=-1.0), "minutes is -1.0"),
        (lambda: PromptChoice(held_out=-1), "held_out is -1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask()
