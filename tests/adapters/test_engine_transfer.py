"""Which directory an engine is told to load: a delta only over exactly its base, a copy in memory only of the same weights."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.transfer import Had, Transfers, way_of
from headway.errors import EngineFailed, EngineSilent, EngineUnreachable
from headway.formats.delta import TENSORS, write_delta
from headway.formats.offers import DeltaOffer, MemoryOffer
from headway.types import Checkpoint

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.norm.weight")


def directory_of(root: Path, version: int) -> Path:
    return root / "weights" / f"{version:08d}"


def publish(root: Path, version: int, *changed: str, offers=()) -> Checkpoint:
    """Make a version that differs from the one before in the tensors named."""
    directory = directory_of(root, version)
    directory.mkdir(parents=True)
    before = directory_of(root, version - 1) / TENSORS
    tensors = load_file(before) if version else {name: np.zeros((2, 3), np.float32) for name in NAMES}
    save_file({name: tensor + (version if name in changed else 0) for name, tensor in tensors.items()}, directory / TENSORS)
    return Checkpoint(version, f"ab12-{version}", str(directory), dict(offers))


def with_delta(root: Path, version: int, *changed: str) -> Checkpoint:
    checkpoint = publish(root, version, *changed)
    out = root / "deltas" / f"{version:08d}"
    base = version - 1
    written = write_delta(directory_of(root, base), directory_of(root, version), out, lineage="ab12", base_version=base, version=version)
    return Checkpoint(version, checkpoint.label, checkpoint.directory, {"delta": DeltaOffer(base, str(out), written.bytes)})


class Server:
    """A server that has what it loads: tensors over tensors, as one that looks at nothing. `refuses`: words in paths."""

    def __init__(self, *refuses: str, error: EngineFailed | None = None) -> None:
        self.refuses = refuses
        self.error = error or CallRefused("no", 400)
        self.loaded: list[Path] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.label = "default"

    async def load(self, checkpoint: Checkpoint) -> None:
        self.loaded.append(Path(checkpoint.directory))
        if any(word in checkpoint.directory for word in self.refuses):
            raise self.error
        self.tensors |= load_file(Path(checkpoint.directory) / TENSORS)

    async def sync(self, transfers: Transfers, checkpoint: Checkpoint) -> Path:
        """All three steps; return what was loaded last."""
        await transfers.choose(checkpoint, self.label)
        self.took = await transfers.bring(checkpoint, self.load)
        self.label = checkpoint.label
        transfers.serves(checkpoint)
        return self.loaded[-1]

    def has(self, checkpoint: Checkpoint) -> bool:
        wanted = load_file(Path(checkpoint.directory) / TENSORS)
        return all(np.array_equal(self.tensors[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def root(tmp_path):
    return tmp_path


@pytest.fixture
def transfers():
    return Transfers("engine-0", "delta")


async def test_versions_follow_each_other_by_deltas_after_the_first(root, transfers):
    server = Server()
    assert await server.sync(transfers, publish(root, 0)) == directory_of(root, 0)
    for version, name in enumerate([*NAMES, *NAMES], 1):
        checkpoint = with_delta(root, version, name)
        assert await server.sync(transfers, checkpoint) == root / "deltas" / f"{version:08d}"
        assert server.has(checkpoint)


async def test_an_engine_that_had_its_weights_when_it_was_taken_up_gets_deltas_too(root, transfers):
    first = publish(root, 0)
    server = Server()
    await server.load(first)
    server.label = first.label
    transfers.serves(first)
    checkpoint = with_delta(root, 1, NAMES[0])
    await server.sync(transfers, checkpoint)
    assert (server.loaded[-1].parent.name, server.has(checkpoint)) == ("deltas", True)


async def test_a_version_that_was_passed_over_makes_the_next_one_complete_and_the_one_after_a_delta(root, transfers):
    server = Server()
    await server.sync(transfers, publish(root, 0))
    with_delta(root, 1, NAMES[0])
    two, three = with_delta(root, 2, NAMES[1]), None
    assert await server.sync(transfers, two) == directory_of(root, 2)
    three = with_delta(root, 3, NAMES[1])
    assert await server.sync(transfers, three) == root / "deltas" / "00000003"
    assert server.has(three)


@pytest.mark.parametrize("label", ["default", "ab12-7", "cd34-0", "unknown"])
async def test_an_engine_that_says_that_it_serves_anything_but_the_base_gets_the_directory(root, transfers, label):
    server = Server()
    await server.sync(transfers, publish(root, 0))
    server.label = label
    assert await server.sync(transfers, with_delta(root, 1, NAMES[0])) == directory_of(root, 1)


async def test_an_engine_that_says_that_it_serves_the_base_and_was_not_given_it_here_gets_the_directory(root, transfers):
    publish(root, 0)
    server = Server()
    server.label = "ab12-0"
    assert await server.sync(transfers, with_delta(root, 1, NAMES[0])) == directory_of(root, 1)


async def test_after_a_failed_sync_the_directory_is_loaded_and_then_deltas_again(root, transfers):
    server = Server()
    await server.sync(transfers, publish(root, 0))
    one = with_delta(root, 1, NAMES[0])
    server.refuses = ("weights", "deltas")
    with pytest.raises(CallRefused):
        await server.sync(transfers, one)
    transfers.forget()
    server.refuses = ()
    assert await server.sync(transfers, one) == directory_of(root, 1)
    assert (await server.sync(transfers, with_delta(root, 2, NAMES[0]))).parent.name == "deltas"


def spoil_base(root):
    tensors = load_file(directory_of(root, 0) / TENSORS)
    save_file({name: tensor + 9 for name, tensor in tensors.items()}, directory_of(root, 0) / TENSORS)


def spoil_tensor(root):
    path = root / "deltas" / "00000001" / TENSORS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def spoil_version(root):
    path = root / "deltas" / "00000001" / "delta.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


def spoil_lineage(root):
    path = root / "deltas" / "00000001" / "delta.json"
    path.write_text(path.read_text().replace("ab12", "cd34"))


def spoil_names(root):
    tensors = load_file(directory_of(root, 1) / TENSORS)
    save_file(tensors | {"extra": np.zeros(1)}, directory_of(root, 1) / TENSORS)


def spoil_shape(root):
    tensors = load_file(directory_of(root, 1) / TENSORS)
    save_file({name: tensor.reshape(3, 2) for name, tensor in tensors.items()}, directory_of(root, 1) / TENSORS)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_base, "from other weights than these"),
        (spoil_tensor, "is not what delta.json says"),
        (spoil_version, "leads from ab12-0 to 2"),
        (spoil_lineage, "leads from cd34-0 to 1"),
        (spoil_names, "is of other tensors than"),
        (spoil_shape, "of another type or shape"),
        (lambda root: shutil.rmtree(root / "deltas" / "00000001"), "holds no delta.json"),
        (lambda root: (root / "deltas" / "00000001" / TENSORS).unlink(), "holds no *.safetensors"),
        (lambda root: (root / "deltas" / "00000001" / "delta.json").write_bytes(b"{"), "is damaged"),
    ],
)
async def test_a_delta_that_is_not_exact_is_told_of_and_the_directory_is_loaded(root, transfers, caplog, spoil, says):
    server = Server()
    await server.sync(transfers, publish(root, 0))
    one = with_delta(root, 1, NAMES[0])
    spoil(root)
    assert await server.sync(transfers, one) == directory_of(root, 1)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert says in warning


async def test_an_engine_that_refuses_a_delta_is_given_the_directory_in_the_same_sync(root, transfers, caplog):
    server = Server("deltas")
    await server.sync(transfers, publish(root, 0))
    one = with_delta(root, 1, NAMES[0])
    await server.sync(transfers, one)
    assert [path.parent.name for path in server.loaded] == ["weights", "deltas", "weights"]
    assert server.has(one)
    assert "loaded from its complete directory: no" in caplog.text


@pytest.mark.parametrize("error", [EngineUnreachable("gone"), EngineSilent("late")])
async def test_an_engine_that_is_lost_under_a_delta_is_not_asked_again(root, transfers, error):
    server = Server("deltas", error=error)
    await server.sync(transfers, publish(root, 0))
    with pytest.raises(type(error)):
        await server.sync(transfers, with_delta(root, 1, NAMES[0]))
    assert [path.parent.name for path in server.loaded] == ["weights", "deltas"]


async def test_what_was_loaded_and_how_many_bytes_it_took_is_logged(root, transfers, caplog):
    caplog.set_level(logging.INFO)
    server = Server()
    await server.sync(transfers, publish(root, 0))
    await server.sync(transfers, with_delta(root, 1, NAMES[0]))
    assert re.search(r"engine-0 has loaded ab12-0 from its directory, 0\.00 MB, in \d+\.\d+ s", caplog.text)
    assert re.search(r"engine-0 has loaded ab12-1 by what has changed since ab12-0, 0\.00 MB, in \d+\.\d+ s", caplog.text)


async def test_what_a_transfer_took_is_told_by_the_way_that_was_taken_in_the_end(root, transfers):
    def size(directory):
        return sum(tensor.nbytes for tensor in load_file(Path(directory) / TENSORS).values())

    server = Server()
    await server.sync(transfers, publish(root, 0))
    assert (server.took.way, server.took.bytes) == ("directory", size(directory_of(root, 0)))
    one = with_delta(root, 1, NAMES[0])
    await server.sync(transfers, one)
    assert (server.took.way, server.took.bytes) == ("delta", size(root / "deltas" / "00000001"))
    assert 0 < server.took.bytes < size(one.directory)
    server.refuses = ("deltas",)
    two = with_delta(root, 2, NAMES[1])
    await server.sync(transfers, two)
    assert (server.took.way, server.took.bytes) == ("directory", size(two.directory))
    assert server.took.seconds > 0
    memory = in_memory(root, 3)
    await server.sync(other := Transfers("engine-0", "memory"), memory)
    assert (server.took.way, server.took.bytes) == ("memory", size(memory.directory))
    assert other.may_offer(memory)


@pytest.mark.parametrize("wanted", ["directory", "memory", "lora"])
def test_a_delta_is_used_only_where_the_config_asks_for_it(root, wanted):
    offered = Checkpoint(1, "ab12-1", str(root), {"delta": DeltaOffer(0, "x", 1)})
    had = Had("ab12-0", root)
    assert way_of(offered, wanted, "ab12-0", had) == "directory"
    assert way_of(offered, "delta", "ab12-0", had) == "delta"
    assert way_of(offered, "delta", "ab12-0", None) == "directory"
    assert way_of(offered, "delta", "ab12-0", Had("ab12-1", root)) == "directory"


# ------------------------------------------------------------------------------------------------------------------------------- memory


def in_memory(root: Path, version: int) -> Checkpoint:
    checkpoint = publish(root, version, *NAMES)
    copy = root / "memory" / f"{version:08d}"
    shutil.copytree(checkpoint.directory, copy)
    return Checkpoint(version, checkpoint.label, checkpoint.directory, {"memory": MemoryOffer(str(copy))})


async def test_a_copy_in_memory_is_loaded_whatever_the_engine_serves(root):
    transfers, server = Transfers("engine-0", "memory"), Server()
    for version in range(3):
        checkpoint = in_memory(root, version)
        assert (await server.sync(transfers, checkpoint)).parent.name == "memory"
        assert server.has(checkpoint)
        server.label = "default"


@pytest.mark.parametrize("how", ["gone", "cut", "other tensors", "other shapes"])
async def test_a_copy_in_memory_that_is_not_the_checkpoints_is_not_loaded(root, caplog, how):
    transfers, server = Transfers("engine-0", "memory"), Server()
    checkpoint = in_memory(root, 0)
    file = root / "memory" / "00000000" / TENSORS
    match how:
        case "gone":
            shutil.rmtree(file.parent)
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "other tensors":
            save_file({"x": np.zeros(3)}, file)
        case "other shapes":
            save_file({name: tensor.reshape(3, 2) for name, tensor in load_file(file).items()}, file)
    assert await server.sync(transfers, checkpoint) == directory_of(root, 0)
    assert "from its complete directory" in caplog.text
