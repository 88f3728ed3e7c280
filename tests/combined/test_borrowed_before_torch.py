"""An answer whose layers are lent before torch is there: its tokens are the plain model's, whenever a replica takes
over and whatever becomes of the lender. Tiny random weights, fp32."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from borrowing import TIMEOUTS, nothing_is_left
from dying_link import DyingLink
from loads import Held
from plain_tokens import check_greedy
from swarms import DEPTH

from firsttoken.engine.native.library import kernels
from firsttoken.lean.lean_config import OtherWay
from firsttoken.link.shaped import Link
from firsttoken.petals.message_headers import laid_out, told_step
from firsttoken.petals.server_call import ServerCall
from firsttoken.petals.timeouts import Timeouts
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.errors import LinkError, ModelError, RequestError, SwarmError
from firsttoken_extras.layer_borrowing.before_torch import EndsWeights, LentLayers, LentModel
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name
from firsttoken_extras.layer_borrowing.lender import Lender, Lending, NeighbourGone
from firsttoken_extras.layer_borrowing.torch_behind import BorrowedAnswer, OwnLayers

ANSWER, CONTEXT = 12, 64
Begin = Callable[..., "HeldAnswer"]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if kernels() is None:
        pytest.skip("there is no C++ compiler")


class HeldAnswer(BorrowedAnswer):
    """One whose replica is made when it may be."""

    def __init__(self, model: LentModel, link: Link) -> None:
        super().__init__(model, [link])
        self.go = threading.Event()

    def _make(self) -> OwnLayers:
        assert self.go.wait(60)
        return super()._make()

    def by_turns(self, prompt: list[int], before: int, count: int = ANSWER) -> list[int]:
        """So many tokens before torch, and the others of ``count`` by the replica."""
        answer = self.answer(prompt, count)
        said = [next(answer) for _ in range(before)]
        self.go.set()
        self.made()
        return [*said, *answer]


@pytest.fixture
def begin(ends_folder: Path, neighbour) -> Iterator[Begin]:
    with ExitStack() as held:

        def made(
            address: str = "", link: Link | None = None, timeouts: Timeouts = TIMEOUTS, model: str = ""
        ) -> HeldAnswer:
            manifest, link = read_manifest(ends_folder), link or Link()
            lender = Lender(address or neighbour.server.record.address, range(DEPTH))
            lent = LentLayers(Lending(lender, model or neighbours_name(ends_folder, manifest), 32, timeouts=timeouts))
            held.callback(lent.close)
            weights = EndsWeights(ends_folder, [link], dtype="float32", readers=1, threads=1)
            held.callback(weights.close)
            answer = HeldAnswer(LentModel(weights, lent, CONTEXT, threads=1), link)
            held.callback(answer.close)
            return answer

        yield made


def held_back(folder: Path, parts: int) -> Held:
    """A link that brings so many parts, and the others when it is let go."""
    return Held(sum(part.bytes for part in read_manifest(folder).stages[0].parts[:parts]))


@pytest.mark.parametrize("before", [1, 2, 7, ANSWER])
def test_a_replica_goes_on_with_the_lenders_session(begin, neighbour, asked, before) -> None:
    """Each token costs one message, with the prompt in the first: nothing is told again."""
    one, answer = asked(17, ANSWER), begin()
    assert check_greedy(answer.by_turns(one.prompt, before), one.plain) == ANSWER
    if before == ANSWER:
        assert answer.replica is None and answer.tokens is None
        answer.close()
    else:
        answer.replica.settle()
        assert answer.tokens == before and answer.replica.here == DEPTH
        assert len(answer.replica.lease._spans[0].sessions) == 1 and "all layers" in answer.replica.lease.gone
    nothing_is_left(neighbour.server)


def test_layers_that_come_while_the_replica_goes_on(begin, neighbour, ends_folder, asked) -> None:
    """Half of them are held back until it has said two tokens with the others."""
    one, link = asked(15, ANSWER), held_back(ends_folder, 1 + DEPTH // 2)
    answer = begin(link=link)
    tokens = answer.answer(one.prompt, ANSWER)
    said = [next(tokens) for _ in range(4)]
    answer.go.set()
    answer.made()
    while len(said) < 8:
        said.append(next(tokens))
    assert answer.tokens == 4 and answer.replica.lease.steps > 4
    link.go.set()
    assert check_greedy([*said, *tokens], one.plain) == ANSWER
    answer.replica.settle()
    nothing_is_left(neighbour.server)


def test_what_was_said_is_not_computed_again(begin, monkeypatch, ends_folder, asked) -> None:
    """Neither before the replica takes over nor when it does."""
    told: list[int] = []
    right = ServerCall.ask
    monkeypatch.setattr(
        ServerCall, "ask", lambda call, message, tokens: told.append(tokens) or right(call, message, tokens)
    )
    one, link = asked(17, ANSWER), held_back(ends_folder, 1)
    answer = begin(link=link)
    tokens = answer.answer(one.prompt, ANSWER)
    said = [next(tokens) for _ in range(5)]
    answer.go.set()
    answer.made()
    said += [next(tokens) for _ in range(3)]
    assert told == [17, *[1] * 7] and not answer.replica.here
    link.go.set()
    assert check_greedy([*said, *tokens], one.plain) == ANSWER
    assert set(told[8:]) <= {1}


@pytest.mark.parametrize("fault", ["kill", "cut"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_lender_that_is_lost_before_torch(begin, member, asked, fault, before) -> None:
    """The replica waits for its own layers, and goes on behind what was said."""
    one, lender = asked(14, ANSWER), member()
    answer = begin(lender.proxy.address, timeouts=Timeouts(step_s=5.0))
    tokens = answer.answer(one.prompt, ANSWER)
    said = [next(tokens) for _ in range(before)]
    getattr(lender, fault)()
    lender.gone = fault == "kill"
    answer.go.set()
    assert check_greedy([*said, *tokens], one.plain) == ANSWER
    assert answer.replica.here == DEPTH and answer.replica.lease.gone
    if fault == "cut":
        lender.heal()


def test_a_lender_that_is_lost_when_the_replica_takes_over(begin, member, asked) -> None:
    one, lender = asked(14, ANSWER), member()
    answer = begin(lender.proxy.address, timeouts=Timeouts(step_s=5.0))
    tokens = answer.answer(one.prompt, ANSWER)
    said = [next(tokens) for _ in range(3)]
    answer.go.set()
    answer.made()
    lender.kill()
    lender.gone = True
    assert check_greedy([*said, *tokens], one.plain) == ANSWER


@pytest.mark.parametrize(
    ("address", "model", "said"),
    [("127.0.0.1:9", "", "127.0.0.1:9: "), ("", "0" * 64, "another model|refuses|model")],
)
def test_a_lender_that_does_not_lend(begin, asked, address, model, said) -> None:
    """The answer is the own layers', and the lease says why."""
    one = asked(9, 4)
    answer = begin(address, model=model, timeouts=Timeouts(step_s=5.0))
    answer.go.set()
    assert check_greedy(list(answer.answer(one.prompt, 4)), one.plain) == 4
    assert answer.tokens == 0
    with pytest.raises(NeighbourGone, match=said):
        answer.model.lent.run(None, 0)


LIES = {  # dtype, shape, and the numbers that come
    "another width": ("F32", (1, 16), [0.0] * 16, "is no float32 states"),
    "fewer numbers than it says": ("F32", (1, 32), [0.0] * 16, "is no float32 states"),
    "another dtype": ("F16", (1, 64), [0.0] * 32, "is no float32 states"),
    "too large": ("F32", (1, 32), [3e38] * 32, "beyond 16,777,216"),
    "no number": ("F32", (1, 32), [float("nan")] * 32, "NaN or infinity"),
    "no message": ("", (), [], "is no float32 states"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_cannot_be_one(begin, monkeypatch, lie) -> None:
    dtype, shape, numbers, said = LIES[lie]
    data = np.array(numbers, np.float32).data
    told = laid_out(data, dtype, shape, {"step": told_step()}) if dtype else b"\x10" + bytes(7) + b"{}"

    async def answered(call: ServerCall, message: bytes, tokens: int) -> bytes:
        return told

    answer = begin()
    with monkeypatch.context() as patched:
        patched.setattr(ServerCall, "ask", answered)
        with pytest.raises(NeighbourGone, match=said):
            answer.model.next_token([3])
    with pytest.raises(NeighbourGone, match=said):
        answer.model.next_token([3])


def test_a_link_that_dies_before_the_ends_are_here(begin, asked) -> None:
    answer = begin(link=DyingLink(100))
    with pytest.raises(LinkError, match="the link died"):
        answer.model.next_token(asked(9, 4).prompt)


def test_what_needs_torch_is_known_before_anything_is_read(ends_folder) -> None:
    with pytest.raises(OtherWay, match="float32 weights are not computed in bfloat16 here"):
        EndsWeights(ends_folder, [Link()], dtype="bfloat16")


def test_what_cannot_be_asked(begin, ends_folder, tmp_path) -> None:
    with pytest.raises(SwarmError, match="give --tls-ca"):
        begin("192.0.2.1:4000")
    answer = begin()
    with pytest.raises(RequestError, match="at least 1 token, not 0"):
        next(answer.answer([3], 0))
    with pytest.raises(RequestError, match="holds no token id"):
        next(answer.answer([256], 1))
    with pytest.raises(ModelError):
        EndsWeights(tmp_path, [Link()])
    some = Lending(Lender("127.0.0.1:9", range(1, DEPTH)), "model", 32)
    with pytest.raises(SwarmError, match="0"):
        LentModel(answer.model.weights, LentLayers(some), CONTEXT)


def test_the_first_token_finds_no_torch(ends_folder, neighbour, asked) -> None:
    one = asked(17, ANSWER)
    code = f"""
import json, sys
from pathlib import Path
from firsttoken.link.shaped import Link
from firsttoken_extras.layer_borrowing.before_torch import EndsWeights, LentLayers, LentModel
from firsttoken_extras.layer_borrowing.lender import Lender, Lending
from firsttoken_extras.layer_borrowing.torch_behind import BorrowedAnswer
folder, link = Path({str(ends_folder)!r}), Link()
lent = LentLayers(Lending(Lender({neighbour.server.record.address!r}, range({DEPTH})), {neighbour.model!r}, 32))
weights = EndsWeights(folder, [link], dtype="float32", threads=1)
answer = BorrowedAnswer(LentModel(weights, lent, {CONTEXT}, threads=1), [link])
tokens = answer.answer({one.prompt}, {ANSWER})
first = next(tokens)
there = [one for one in ("torch", "transformers", "safetensors") if one in sys.modules]
said = [first, *tokens]
if answer.replica is not None:
    answer.replica.settle()
answer.close()
print(json.dumps([there, said]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    there, said = json.loads(done.stdout.strip().splitlines()[-1])
    assert there == [], done.stderr
    assert check_greedy(said, one.plain) == ANSWER
    nothing_is_left(neighbour.server)
