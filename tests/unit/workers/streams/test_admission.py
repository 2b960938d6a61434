"""A suspect is in the engine alone, and every request gets there."""

from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.types import RequestId
from eesd_dist.workers.streams.admission import Admission

A, B, C, D = (RequestId(name) for name in "abcd")


def test_requests_without_a_suspect_enter_together_in_the_order_of_arrival() -> None:
    admission = Admission()
    for name in (B, A):
        admission.arrive(name, is_suspect=False)
    assert admission.num_waiting == 2
    assert admission.to_evict() == ()
    assert admission.admit() == (B, A)
    assert (admission.num_waiting, tuple(admission.inside)) == (0, (B, A))
    assert admission.admit() == ()


def test_a_suspect_waits_until_the_others_have_left_and_is_then_alone() -> None:
    admission = Admission()
    admission.arrive(A, is_suspect=False)
    admission.admit()
    assert not admission.has_suspect
    admission.arrive(B, is_suspect=True)
    admission.arrive(C, is_suspect=False)
    assert (admission.has_suspect, admission.needs_quiet, admission.admit()) == (True, False, ())
    assert admission.to_evict() == (A,)
    assert admission.leave(A)
    assert admission.needs_quiet
    assert admission.admit() == (B,)
    assert (admission.to_evict(), admission.needs_quiet, admission.admit()) == ((), False, ())


def test_a_cleared_suspect_lets_the_others_in_and_stays() -> None:
    admission = Admission()
    admission.arrive(A, is_suspect=True)
    admission.arrive(B, is_suspect=False)
    assert admission.admit() == (A,)
    admission.delivered(B)
    assert admission.admit() == (), "only its own token clears a suspect"
    admission.delivered(A)
    assert not admission.has_suspect
    assert admission.admit() == (B,)
    assert set(admission.inside) == {A, B}


def test_a_suspect_that_leaves_under_test_or_waiting_lets_the_others_in() -> None:
    for is_tested in (True, False):
        admission = Admission()
        admission.arrive(A, is_suspect=True)
        admission.arrive(C, is_suspect=False)
        if is_tested:
            admission.admit()
        assert admission.leave(A) == is_tested
        assert admission.admit() == (C,)
        assert not admission.leave(D)


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["arrive", "suspect", "leave"]))))
def test_at_most_one_suspect_is_inside_and_alone_and_no_request_starves(
    events: list[tuple[int, str]],
) -> None:
    """A world that does what admission asks: evicted requests come back, tokens clear suspects."""
    admission = Admission()
    untested: set[RequestId] = set()
    """Suspects without a token."""
    present: set[RequestId] = set()
    had_tokens: set[RequestId] = set()

    def turn() -> None:
        for name in admission.to_evict():
            assert admission.leave(name)
            admission.arrive(name, is_suspect=name in untested)
        admission.admit()
        inside = set(admission.inside)
        assert not inside & untested or len(inside) == 1
        assert admission.has_suspect == bool(untested & present)
        assert admission.num_waiting == len(present - inside - untested)

    def tokens() -> None:
        for name in tuple(admission.inside):
            admission.delivered(name)
            untested.discard(name)
            had_tokens.add(name)

    for number, event in events:
        name = RequestId(str(number))
        if event == "leave":
            was_inside = name in admission.inside
            assert admission.leave(name) == was_inside
            present.discard(name)
            untested.discard(name)
        elif name not in present and not (event == "suspect" and admission.has_suspect):
            admission.arrive(name, is_suspect=event == "suspect")
            present.add(name)
            had_tokens.discard(name)
            if event == "suspect":
                untested.add(name)
        turn()
        if number % 3 == 0:
            tokens()
            turn()
    for _ in range(len(untested) + 1):
        tokens()
        turn()
    tokens()
    assert present <= had_tokens
    assert set(admission.inside) == present
