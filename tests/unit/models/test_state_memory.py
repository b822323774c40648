"""Memory of recurrent states: written again once nothing holds it, and never before."""

from __future__ import annotations

from decodery.models.native.state_memory import StateMemory


def test_memory_is_used_again_once_nothing_holds_it() -> None:
    memory = StateMemory(1000)
    first = memory.take()
    place, part = first.data_ptr(), first.fill_(3.0)[10:20]
    del first
    # A part of it is still held.
    other = memory.take()
    assert other.data_ptr() != place and other.shape == (1000,)
    other.fill_(5.0)
    assert (part == 3.0).all()
    del part
    assert memory.take().data_ptr() == place
    many = [memory.take() for _ in range(5)]
    many.clear()
    assert len(memory._spare) == 2
