"""Ranks that hang, and processes that find one another after a restart."""

import threading
import time

import harness
import pytest
import ranks_faults
from torch.distributed import HashStore

from dayzero.runtime import flight_recorder, processes


def test_a_rank_that_hangs_is_named_and_so_is_the_collective():
    said = harness.run(ranks_faults.hang, 3, 1, timeout=30)
    assert said[1] == ""
    for text in (said[0], said[2]):
        assert "allreduce" in text.replace("_", "")
        assert "[[5, 3]] Float" in text
        assert "timed out" in text
        assert "ranks that did not come: 1" in text


def test_the_watchdog_of_nccl_is_read():
    log = (
        "rank 3: process 17\n[rank3]:[E1129 01:02:03.4 ProcessGroupNCCL.cpp:683] [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) "
        "ran for 600012 milliseconds before timing out.\n"
    )
    assert flight_recorder.nccl_timeout(log) == "allreduce of 4096 elements timed out after 600 s"
    assert flight_recorder.nccl_timeout("rank 3: process 17\n") == ""


def meet(store, ranks, timeout=10.0):
    """The names that ranks get which call at about the same time, each in a thread."""
    names = {}

    def join(rank):
        time.sleep(0.03 * ((7 * rank + 3) % 5))
        try:
            names[rank] = processes.incarnation(store, rank, len(ranks), timeout)
        except TimeoutError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_every_restart_gets_a_name_of_its_own_that_all_ranks_agree_on():
    """One store for all restarts, whatever each node counted, and whoever answered an offer that came to nothing."""
    store, seen = HashStore(), set()
    for world in (2, 4, 4, 3, 1, 4):
        names = meet(store, range(world))
        assert names.keys() == set(range(world))
        assert len(set(names.values())) == 1
        seen.add(names[0])
        store.set("offer", "of a rank 0 that died before it was confirmed")
    assert len(seen) == 6


def test_ranks_without_a_rank_0_give_up():
    (text,) = set(meet(HashStore(), [1], timeout=0.3).values())
    assert "rank 0 did not form a group" in text


@pytest.mark.parametrize(("text", "says"), [("Timed out waiting 3000ms for recv", True), ("out of memory", False)])
def test_what_a_timeout_looks_like(text, says):
    assert flight_recorder.timed_out(RuntimeError(text)) is says
    assert flight_recorder.is_collective_error(RuntimeError(text)) is says
    assert not flight_recorder.is_collective_error(ValueError(text))
