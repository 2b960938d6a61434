from dataclasses import replace

import pytest

from cluster.planning.heads import AcceptanceAt, Heads, MeasuredHead
from cluster.planning.shapes import Acceptance, Split

TRUNCATED = 8000


def _rates(heads: Heads, *layers: int, vocabulary: int | None = None) -> list[float]:
    splits = [Split(exit_layer=layer, draft_vocab_size=vocabulary) for layer in layers]
    return [heads.acceptance_of(split).rate for split in splits]


def _measured(vocabulary: int | None) -> MeasuredHead:
    return MeasuredHead(
        exit_layer=4,
        draft_vocab_size=vocabulary,
        acceptance=Acceptance(rate=0.6, survival=(0.8, 0.5), is_measured=True),
    )


def test_an_earlier_exit_is_assumed_to_be_accepted_less() -> None:
    rates = _rates(Heads(), 1, 2, 4, 8, 16, 40)
    assert rates == pytest.approx([0.6, 0.6333, 0.7, 0.7333, 0.8, 0.8], abs=1e-4)
    assert not Heads().acceptance_of(Split(exit_layer=1)).is_measured


def test_the_acceptance_between_two_exit_layers_is_interpolated() -> None:
    points = (
        AcceptanceAt(exit_layer=8, acceptance=0.9),
        AcceptanceAt(exit_layer=4, acceptance=0.5),
    )
    heads = Heads(assumed=points)
    assert _rates(heads, 1, 4, 6, 8, 20) == pytest.approx([0.5, 0.5, 0.7, 0.9, 0.9])
    assert _rates(heads, 8, vocabulary=TRUNCATED) == pytest.approx([0.9 * 0.95])


@pytest.mark.parametrize("vocabulary", [None, TRUNCATED])
def test_measured_survival_is_that_of_the_measured_head(vocabulary: int | None) -> None:
    head = _measured(vocabulary)
    heads = Heads(measured=head, coverage=0.9)
    full = Split(exit_layer=4)
    assert heads.acceptance_of(full) == head.acceptance
    acceptance = heads.acceptance_of(replace(full, draft_vocab_size=TRUNCATED))
    if vocabulary is not None:
        assert acceptance == head.acceptance
    else:
        assert acceptance.rate == pytest.approx(0.6 * 0.9)
        assert acceptance.survival == pytest.approx((0.8 * 0.9, 0.5 * 0.81))
        assert not acceptance.is_measured


def test_other_exit_layers_are_assumed_from_a_measured_head() -> None:
    heads = Heads(measured=_measured(None))
    # A third more is rejected at exit layer 1 than at 4, and a third less at 16.
    assert _rates(heads, 1, 4, 16) == pytest.approx([1 - 0.4 * 4 / 3, 0.6, 1 - 0.4 * 2 / 3])
    assert [heads.acceptance_of(Split(exit_layer=at)).is_measured for at in (1, 4)] == [False, True]
