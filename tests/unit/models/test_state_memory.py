"""Memory of recurrent states: written again once nothing holds it, and never before."""

from __future__ import annotations

from decodery.models.cache.account import resident_beside
from decodery.models.config import Mamba, ModelConfig
from decodery.models.native.stack import NativeStack
from decodery.models.native.state_memory import StateMemory
from drawn_models import after, made


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


def test_what_is_kept_for_states_to_come_is_counted_once_for_all_texts_of_a_model() -> None:
    mamba = Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4)
    model = made(
        ModelConfig(
            vocab_size=90, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24,
            max_positions=512, mamba=mamba, state_layers=(True, False),
        )
    )  # fmt: skip
    assert isinstance(model._stack, NativeStack) and model._stack.mixers is not None
    texts = [after(model, 20, *[1] * 40) for _ in range(2)]
    spare, states = model._stack.mixers._memory.bytes, sum(text.states.bytes for text in texts)
    # Its states are those of the first.
    texts.append(texts[0].fork())
    assert spare >= 4 * 4 * 18 * 12
    assert resident_beside(texts) == states + spare
    assert resident_beside(texts[2:]) == texts[2].states.bytes + spare
