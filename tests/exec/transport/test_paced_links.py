"""Messages take as long as their link does, really and as they are told; what is held back is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.outgoing import LOST_SECONDS, PacedLinks
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, Send
from recycle.ir.lower import lower
from recycle.job.shape import Shape, Worker
from tests.exec.runs import job

PAIR = lower(one_f_one_b(Shape(1, 2, 4)))
FIRST, LAST = PAIR.live
LATE = 20.0
HOP = 0.05


@pytest.fixture
def transports() -> Iterator[dict[Worker, GlooTransport]]:
    """Both workers of a pipeline, in threads of this process, in iteration 0; the first one's link takes `HOP`."""
    made = {}
    store = HashStore()
    for role in PAIR.live:
        links = PacedLinks(role, lambda peer: HOP) if role == FIRST else PacedLinks(role)
        groups = GroupsOfGeneration("g", role, PAIR.live, {}, ((4,), torch.float32), over=threading.Event())
        made[role] = GlooTransport(TransportSettings(store, links=links), groups)
    with ThreadPoolExecutor(2) as both:
        list(both.map(GlooTransport.form, made.values(), timeout=LATE))
    for role, transport in made.items():
        transport.begin(PAIR.program(role), 0)
    yield made
    for transport in made.values():
        transport.close()


def messages(transports: dict[Worker, GlooTransport]) -> Iterator[float]:
    """Send all messages of the iteration at once; seconds until each is there."""
    began = time.monotonic()
    for place, send in enumerate(one for one in PAIR.program(FIRST) if isinstance(one, Send)):
        transports[FIRST].send(send, torch.full((4,), float(place)))
    for place, receive in enumerate(one for one in PAIR.program(LAST) if isinstance(one, Receive)):
        assert float(transports[LAST].receive(receive)()[0]) == place
        yield time.monotonic() - began


def test_a_lane_carries_one_message_at_a_time_each_for_as_long_as_its_link_takes(
    transports: dict[Worker, GlooTransport],
) -> None:
    arrived = list(messages(transports))
    assert all(seconds >= (place + 1) * HOP for place, seconds in enumerate(arrived))
    deadline = time.monotonic() + LATE
    told = transports[FIRST].messaged()
    while sum(one.sent for one in told) < 4:
        assert time.monotonic() < deadline
        told += transports[FIRST].messaged()
    assert {one.process for one in told} == {LAST}
    assert all(HOP <= one.seconds <= arrived[-1] for one in told)
    (waited,) = transports[LAST].messaged()
    assert (waited.process, waited.sent) == (FIRST, 0)
    assert HOP <= waited.waited <= arrived[-1]
    assert transports[LAST].messaged() == []


def test_a_message_that_is_held_back_when_its_generation_ends_is_not_sent(
    transports: dict[Worker, GlooTransport],
) -> None:
    transports[FIRST].send(next(one for one in PAIR.program(FIRST) if isinstance(one, Send)), torch.zeros(4))
    transports[FIRST]._over.set()
    with pytest.raises(TransportError, match="the generation is over"):
        transports[FIRST].begin(PAIR.program(FIRST), 2)  # waits for what was sent two iterations ago


def test_links_are_slow_for_an_iteration_between_two_workers_in_both_directions() -> None:
    emulated = job(2, 2, 2, times={"link": 0.5}, model={"seconds_per_unit": 0.01})
    here, there, other = Worker(1, 0), Worker(1, 1), Worker(0, 1)
    for process, peer in ((here, there), (there, here)):
        paced, real = PacedLinks.of(emulated, process), PacedLinks.of(job(2, 2, 2, kind="gpt"), process)
        for links in (paced, real):
            links.begin()
            links.slow_down(here, there, 4.0)
        assert (paced.hold(peer, usual=0.001), paced.hold(other, usual=0.001)) == (0.02, 0.005)
        assert (real.hold(peer, usual=0.001), real.hold(other, usual=0.001)) == (pytest.approx(0.003), 0.0)
        paced.begin()
        assert paced.hold(peer, usual=0.001) == 0.005


def test_a_flaky_link_holds_back_the_share_of_messages_that_it_is_told_to() -> None:
    links, peer = PacedLinks(Worker(0, 0)), Worker(0, 1)
    links.make_flaky(Worker(0, 0), peer, 0.25, "seed")
    held = [links.hold(peer, usual=0.001) for _ in range(400)]
    assert set(held) == {0.0, LOST_SECONDS}
    assert 70 <= sum(seconds > 0 for seconds in held) <= 130
    assert links.hold(Worker(1, 1), usual=0.001) == 0.0
