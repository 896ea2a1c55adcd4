"""What rank 0 makes of the ranks' reports."""

import pytest

from sok_like.runtime.ranks import stall_verdict
from sok_like.runtime.ranks.stall_verdict import Judge

ENDED = "has finished its steps"


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(stall_verdict.time, "monotonic", lambda: Clock.now)
    return Clock


def report(what="", seconds=0.0, ended="", number=7, **more):
    return {"what": what, "seconds": seconds, "ended": ended, "number": number, **more}


def hear(judge, *reports):
    for rank, each in enumerate(reports):
        judge.hear(rank, each)
    return judge.verdict()


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(clock):
    judge = Judge(3, 10)
    assert hear(judge, report("users_keys", 9), report(), report("users_keys", 8)) == ""
    verdict = hear(judge, report("users_keys", 11), report(), report("users_keys", 10))
    assert verdict == (
        "the exchange 'users_keys': ranks 0, 2 reached it and waited for 11 s; "
        "rank 1 did not reach it and is in no exchange"
    )


def test_a_rank_that_has_ended_is_waited_for_no_longer(clock):
    judge, gone = Judge(2, 10), report(ended=ENDED, number=6)
    assert hear(judge, report("users_keys", 1), gone) == ""
    assert "rank 1 has finished its steps" in hear(judge, report("users_keys", 2), gone)


def test_a_rank_late_in_noticing_that_the_last_exchange_is_over_gets_time(clock):
    judge, gone = Judge(2, 100), report(ended=ENDED)
    assert hear(judge, report("users_keys", 15), gone) == ""
    assert "rank 1 has finished its steps" in hear(judge, report("users_keys", 25), gone)


def test_a_rank_without_a_word(clock):
    judge = Judge(2, 10)
    judge.hear(0, report("users_keys", 2))
    judge.lose(1)
    assert "rank 1 has ended without a message" in judge.verdict()
    assert not judge.word()["over"]


def test_ranks_that_leave_are_named(clock):
    judge = Judge(3, 10)
    hear(judge, report("users_keys", 1), report(ended=ENDED), report(ended=ENDED))
    assert judge.word()["waited_for"] and judge.word()["left"] == ""
    judge.hear(1, report(ended=ENDED, leaves=True))
    assert judge.word()["left"] == "rank 1 has finished its steps"
    judge.lose(2)
    assert judge.word()["left"] == "rank 1 has finished its steps; rank 2 has finished its steps"


def test_all_have_stopped_when_each_has_said_so_or_left(clock):
    judge = Judge(3, 10)
    hear(judge, report(stopped=True), report("users_keys"), report(stopped=True))
    assert not judge.word()["stopped"]
    judge.hear(1, report(stopped=True))
    assert judge.word()["stopped"]
    judge.hear(0, report("users_keys"))
    judge.lose(0)
    assert judge.word()["stopped"]


def test_ranks_that_wait_for_different_things(clock):
    judge = Judge(2, 100)
    assert hear(judge, report("a_keys", 1), report("b_keys", 5)) == ""
    verdict = hear(judge, report("a_keys", 2), report("b_keys", 6))
    for words in ("'b_keys': rank 1 reached it", "rank 0 is in the exchange 'a_keys'"):
        assert words in verdict


def test_a_rank_that_answers_no_more(clock):
    judge = Judge(2, 10)
    judge.hear(1, report())
    clock.now += 20
    judge.hear(0, report("users_keys", 12))
    assert judge.verdict().endswith(
        "rank 1 has not answered for 20 s; its last report: in no exchange"
    )
    assert judge.word()["stopped"] is False
    judge.hear(0, report(stopped=True))
    assert judge.word()["stopped"]  # nobody waits for the silent one


def test_a_silent_rank_is_not_counted_among_those_that_came(clock):
    judge = Judge(2, 10)
    hear(judge, report("users_keys", 8), report("users_keys", 8))
    for _ in range(4):  # it may be late, so time passes until it is known to be silent
        clock.now += 1
        judge.hear(0, report("users_keys", clock.now - 992))
        assert clock.now < 1002 or judge.verdict() == ""
    clock.now += 2
    judge.hear(0, report("users_keys", clock.now - 992))
    assert judge.verdict() == (
        "the exchange 'users_keys': rank 0 reached it and waited for 14 s; "
        "rank 1 has not answered for 6 s; its last report: in the exchange 'users_keys'"
    )


def test_silence_ends_nothing_before_a_wait_is_too_long(clock):
    judge = Judge(2, 10)
    hear(judge, report("users_keys", 1), report("users_keys", 1))
    clock.now += 100  # rank 1 computes, and holds Python's lock
    judge.hear(0, report("users_keys", 9))
    assert judge.verdict() == ""
    # It matters at the program's end.
    assert judge.word()["silent"] == "rank 1 has not answered for 100 s"
    judge.lose(1)
    assert judge.word()["silent"] == ""


def test_a_rank_that_never_reported_is_said_to(clock):
    judge = Judge(2, 10)
    clock.now += 20
    judge.hear(0, report("users_keys", 12))
    assert judge.verdict().endswith("rank 1 has never reported") and judge.word()["silent"] == ""


def test_a_pause_of_the_judge_does_not_count(clock):
    judge = Judge(2, 10)
    hear(judge, report("users_keys", 5), report())
    clock.now += 100
    judge.forgive(100)
    assert judge.verdict() == ""
    clock.now += 3
    judge.hear(1, report())
    assert judge.verdict() == ""
    clock.now += 3
    judge.hear(1, report())
    verdict = hear(judge, report("users_keys", 11), report())
    assert "rank 0 reached it and waited for 11 s" in verdict


def test_all_came_and_it_takes_long(clock):
    verdict = hear(Judge(2, 10), report("users_rows", 11), report("users_rows", 11))
    assert "all ranks are in it" in verdict


def test_all_have_ended(clock):
    judge = Judge(2, 10)
    hear(judge, report(ended=ENDED), report(ended=ENDED))
    assert judge.word()["over"] and judge.verdict() == ""
