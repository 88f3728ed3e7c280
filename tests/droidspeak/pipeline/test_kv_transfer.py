"""Pieces come whole, in order and of the right bytes, or the one who waits is told."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import torch
from dying_link import DyingLink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.pipeline.kv_transfer import Buffers, Transfer
from firsttoken.droidspeak.tensor_bytes import CachePiece, bytes_of
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.study.errors import LinkError, RequestError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
SLOW = LinkConfig(gbit_per_s=0.002)  # what these tests store takes 4.6 s, a chunk 0.26 s


def written(folder: Path, tensors: dict[str, torch.Tensor], gap: int = 3) -> dict[str, CachePiece]:
    """The tensors in files "0" and "1" by turns, ``gap`` bytes before each."""
    pieces, sizes = {}, {folder / "0": 0, folder / "1": 0}
    for path in sizes:
        path.write_bytes(b"")
    for turn, (name, tensor) in enumerate(tensors.items()):
        path = folder / str(turn % 2)
        with path.open("ab") as file:
            file.write(b"x" * gap + bytes_of(tensor))
        digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
        pieces[name] = CachePiece(name, path, sizes[path] + gap, tuple(tensor.shape), tensor.dtype, digest)
        sizes[path] += gap + tensor.nbytes
    return pieces


def transfers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kv-transfer"]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, CachePiece]]:
    tensors = {f"layer.{i}": torch.randn(2, 1, 3, 1000 + i, 16) for i in range(3)}
    return tensors, written(tmp_path, tensors)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), gap=st.sampled_from([0, 1, 8]))
def test_every_piece_is_what_was_stored(tmp_path: Path, data: st.DataObject, gap: int) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5))
    tensors = {
        str(i): torch.randint(-99, 99, shape).to(data.draw(st.sampled_from(DTYPES))) for i, shape in enumerate(shapes)
    }
    pieces = written(tmp_path, tensors, gap)
    order = data.draw(st.permutations(list(tensors)))
    asked = data.draw(st.permutations(list(tensors)))
    with Transfer([pieces[name] for name in order], Link(), Buffers(pieces.values())) as transfer:
        for name in asked:
            assert torch.equal(transfer.wait(name), tensors[name])
    arrivals = [transfer.arrival_s(name) for name in order]
    assert arrivals == sorted(arrivals)
    assert transfer.bytes_moved == sum(tensor.nbytes for tensor in tensors.values())
    assert not transfers_alive()


def test_a_shaped_link_with_latency_brings_the_same_bytes(stored) -> None:
    tensors, pieces = stored
    link = Link(LinkConfig(gbit_per_s=4, latency_ms=1))
    with Transfer(list(pieces.values()), link, Buffers(pieces.values())) as transfer:
        assert all(torch.equal(transfer.wait(name), tensor) for name, tensor in tensors.items())
    assert link.bytes_moved == transfer.bytes_moved == sum(tensor.nbytes for tensor in tensors.values())


def test_what_came_before_the_link_died_is_there_and_the_rest_is_refused(stored) -> None:
    tensors, pieces = stored
    link = DyingLink(tensors["layer.0"].nbytes + 10)
    with Transfer(list(pieces.values()), link, Buffers(pieces.values())) as transfer:
        for _ in range(2):
            with pytest.raises(LinkError, match=r"layer.1 did not arrive: the link died after \d+ bytes"):
                transfer.wait("layer.1")
        assert torch.equal(transfer.wait("layer.0"), tensors["layer.0"])
    assert transfer.bytes_moved == tensors["layer.0"].nbytes
    assert not transfers_alive()


def test_bytes_of_another_sha256_are_refused(stored) -> None:
    tensors, pieces = stored
    path, at = pieces["layer.1"].path, pieces["layer.1"].offset
    raw = bytearray(path.read_bytes())
    raw[at + 5000] ^= 1
    path.write_bytes(raw)
    with Transfer(list(pieces.values()), Link(), Buffers(pieces.values())) as transfer:
        with pytest.raises(LinkError, match=r"layer.1 did not arrive: its sha256 is not that of what was stored"):
            transfer.wait("layer.1")
        assert torch.equal(transfer.wait("layer.0"), tensors["layer.0"])


def test_a_file_that_is_torn_or_gone_breaks_the_transfer_off(stored) -> None:
    _, pieces = stored
    path = pieces["layer.2"].path
    path.write_bytes(path.read_bytes()[:-1])
    with (
        Transfer([pieces["layer.2"]], Link(), Buffers(pieces.values())) as transfer,
        pytest.raises(LinkError, match=r"layer.2 did not arrive: the file ended 1 bytes early"),
    ):
        transfer.wait("layer.2")
    path.unlink()
    with (
        Transfer([pieces["layer.2"]], Link(), Buffers(pieces.values())) as transfer,
        pytest.raises(LinkError, match="No such file"),
    ):
        transfer.wait("layer.2")


@pytest.mark.parametrize("config", [SLOW, LinkConfig(latency_ms=3_600_000)], ids=["slow", "latency of an hour"])
def test_leaving_the_block_ends_the_thread_and_frees_a_waiter(stored, config: LinkConfig) -> None:
    _, pieces = stored
    reasons = []

    def wait(transfer: Transfer) -> None:
        try:
            transfer.wait("layer.2")
        except LinkError as error:
            reasons.append(str(error))

    with (
        pytest.raises(KeyError, match="of the user"),
        Transfer(list(pieces.values()), Link(config), Buffers(pieces.values())) as transfer,
    ):
        waiter = threading.Thread(target=wait, args=[transfer])
        waiter.start()
        raise KeyError("of the user")
    waiter.join()
    assert reasons == ["layer.2 did not arrive: the transfer was cancelled"]
    assert not transfers_alive()


def test_buffers_of_other_pieces_are_refused(stored) -> None:
    _, pieces = stored
    with pytest.raises(RequestError, match=r"no buffer of its shape for layer.1"):
        Transfer(list(pieces.values()), Link(), Buffers([pieces["layer.0"], pieces["layer.2"]]))
