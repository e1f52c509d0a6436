"""Which ingress an engine goes to, without Ray."""

from minisgl.ray.whereabouts import SETTLE_S, IngressChooser, Whereabouts

OLD = Whereabouts("tcp://10.0.0.1:1", "first", 100.0)
YOUNG = Whereabouts("tcp://10.0.0.2:2", "second", 200.0)


def test_an_engine_goes_to_the_first_ingress_at_once_and_stays() -> None:
    chooser = IngressChooser()
    assert chooser.next(OLD, in_service=False, now_s=0) == OLD
    assert chooser.next(OLD, in_service=False, now_s=1) is None
    assert chooser.next(OLD, in_service=True, now_s=100) is None


def test_an_engine_in_service_waits_before_it_goes_to_a_younger_one() -> None:
    chooser = IngressChooser()
    chooser.next(OLD, in_service=False, now_s=0)
    assert chooser.next(YOUNG, in_service=True, now_s=10) is None
    assert chooser.next(OLD, in_service=True, now_s=11) is None  # either of the two may answer
    assert chooser.next(OLD, in_service=True, now_s=10 + SETTLE_S) == YOUNG
    assert chooser.next(OLD, in_service=True, now_s=20 + SETTLE_S) is None


def test_an_engine_without_service_goes_at_once() -> None:
    chooser = IngressChooser()
    chooser.next(OLD, in_service=False, now_s=0)
    assert chooser.next(YOUNG, in_service=False, now_s=10) == YOUNG
