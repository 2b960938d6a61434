"""What a worker's process does to its garbage collector."""

import gc
import weakref

from eesd_dist.workers.process import freeze_heap


class _Cycle:
    def __init__(self) -> None:
        self.cycle = self


def test_what_is_frozen_is_collected_by_the_next_freeze_once_nothing_refers_to_it() -> None:
    value = _Cycle()
    alive = weakref.ref(value)
    try:
        freeze_heap()
        assert gc.get_freeze_count() > 10_000, "the modules of this process"
        del value
        gc.collect()
        assert alive() is not None
        freeze_heap()
        assert alive() is None
    finally:
        gc.unfreeze()
