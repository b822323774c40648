"""What `auto` keeps in a folder: what later processes begin with, for whom, how much, and damaged files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.load import LoadedModel
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CopyRates, SuccessorRates
from decodery.speculative.stores.kept import FILES, TOKENS, KeptTexts, keep_all
from decodery.step.drafter_memory import Memory
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer
from tiny_models import tiny_loaded

PROMPT, NEW = [256, 65, 66], 40


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


def write(target: LoadedModel, folder: Path | None, owner: str = "", prompt: list[int] = PROMPT) -> Sequence:
    """A text of what might be another process: nothing but the folder is remembered."""
    engine = Engine(target.model, memory=Memory(), pass_seconds=lambda context: 1 + 0.01 * np.arange(512))
    drafter = Auto(warm=None, keep=None if folder is None else str(folder))
    seq = engine.submit(Request(prompt, max_new_tokens=NEW, drafter=drafter, cache_namespace=owner))
    engine.run([seq])
    keep_all()
    return seq


def accepted(seq: Sequence) -> int:
    return sum(step.accepted for step in seq.trace.steps)


def test_a_later_process_begins_with_what_was_learned(target: LoadedModel, tmp_path: Path) -> None:
    cold, first = write(target, None), write(target, tmp_path)
    again = write(target, tmp_path)
    assert cold.generated == first.generated == again.generated
    assert accepted(first) == accepted(cold) < accepted(again)
    # The same text again is copied, and takes less than half of the passes.
    assert len(again.trace.decoding) < len(cold.trace.decoding) / 2


def test_owners_and_models_share_nothing(target: LoadedModel, tmp_path: Path) -> None:
    cold = write(target, tmp_path, "one")
    assert accepted(write(target, tmp_path, "another")) == accepted(cold) < accepted(write(target, tmp_path, "one"))
    assert len(list(tmp_path.glob("*.tables"))) == 2
    assert b"one" not in {part.name.encode() for part in tmp_path.iterdir()}
    (file, _) = sorted(tmp_path.glob("*.tables"))
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(SettingsError, match="content is known"):
        Engine(tiny_transformer()).submit(Request([1], drafter=Auto(warm=None, keep=str(tmp_path))))


@pytest.mark.parametrize("place", [20, 5000, -1])
def test_a_damaged_file_is_begun_anew(target: LoadedModel, tmp_path: Path, place: int) -> None:
    cold = write(target, tmp_path)
    (file,) = tmp_path.glob("*.tables")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged"):
        found = write(target, tmp_path)
    assert found.generated == cold.generated and accepted(found) == accepted(cold)
    assert accepted(write(target, tmp_path)) > accepted(cold)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        write(target, tmp_path)


def test_a_file_and_a_folder_are_bounded(target: LoadedModel, tmp_path: Path) -> None:
    texts = KeptTexts((3,), tmp_path / "a.tables", bytes(32))
    texts.restore(range(TOKENS))
    texts.add(range(100))
    assert len(texts.tokens) <= TOKENS and texts.tokens[-2] == 99
    for number in range(FILES + 3):
        (tmp_path / f"{number}.tables").write_bytes(b"")
    write(target, tmp_path)
    assert len(list(tmp_path.glob("*.tables"))) == FILES
    assert accepted(write(target, tmp_path)) > 0


def test_copies_are_not_kept(tmp_path: Path) -> None:
    texts = KeptTexts((3,), tmp_path / "a.tables", bytes(32))
    texts.add([1, 2, 3])
    texts.tables = Contexts((2,), 2), SuccessorRates(1, 2), texts, CopyRates()
    copied = deepcopy(texts)
    copied.add([4])
    copied.write()
    assert not (tmp_path / "a.tables").exists() and texts.tokens[:3] == [1, 2, 3] and 4 not in texts.tokens
    texts.write()
    assert (tmp_path / "a.tables").exists()


def test_a_folder_that_cannot_be_written_to_is_a_warning_at_the_end(target: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    write(target, folder)
    (file,) = folder.glob("*.tables")
    file.unlink()
    file.mkdir()
    (file / "in the way").write_text("")
    texts = KeptTexts((12, 8, 5, 3), file, bytes(32))
    seq = Engine(target.model, memory=Memory()).submit(Request(PROMPT, drafter=Auto(warm=None)))
    memory = seq.states[seq.request.drafter].memory
    texts.tables = memory.contexts, memory.rates, texts, memory.trusted
    with pytest.warns(UserWarning, match="is not kept"):
        texts.write()


ENDING = """
from pathlib import Path
from threading import Timer
from decodery.speculative.stores import kept
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CopyRates, SuccessorRates
texts = kept.KeptTexts((3,), Path({path!r}), bytes(32))
texts.tables = Contexts((2,), 2), SuccessorRates(1, 2), texts, CopyRates()
kept._writing.acquire()
timer = Timer(0.3, kept._writing.release)
timer.daemon = True
timer.start()
texts.add(range(5000))
"""


def test_a_process_that_ends_finishes_what_it_is_writing(tmp_path: Path) -> None:
    path = tmp_path / "a.tables"
    subprocess.run([sys.executable, "-c", ENDING.format(path=str(path))], check=True)
    assert path.stat().st_size > 4 * 5000


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_kept import write, tiny_loaded
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CopyRates, SuccessorRates
from decodery.speculative.stores.kept import _open
folder, target = Path({folder!r}), tiny_loaded()
write(target, folder)
print("written", flush=True)
(own,) = [each for each in _open]
while True:
    own.write()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_file(target: LoadedModel, tmp_path: Path) -> None:
    program = PROGRAM.format(path=[str(Path(__file__).parent), *sys.path], folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"written\n"
        time.sleep(0.2)
        running.send_signal(signal.SIGKILL)
    cold, found = write(target, None), write(target, tmp_path)
    assert found.generated == cold.generated and accepted(found) > accepted(cold)
