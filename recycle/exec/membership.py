"""Membership: who is alive, which generation, which plan, what is committed. One register, changed by compare-and-set.

The protocol, on a store that the launcher owns and no worker can take down with it:

    register            the Record: generation, live set, roles, plan, last committed step, facts of that commit
    proposal/<g>        the Record that generation g begins with
    ack/<g>/<w>         worker w has left its old generation and is ready to form g
    form/<g>, run/<g>   "go" once all have acknowledged, and once all groups stand; "void" if g is over before that
    formed/<g>/<w>      "" when w's groups stand, else why not
    report/<g>/<n>/<w>  w's reduces of iteration n are complete: its stages' squared norms, its losses, its times
    commit/<g>/<n>      the Facts of iteration n, or "void": written once, after the register holds them
    undone/<n>/<w>      w has taken back its step of iteration n
    stop/<g>            generation g is over
    trouble/<g>         a worker's transport broke; somebody else may be the cause
    cut/<g>             two workers, of which the first found that the other does not answer on their connection
    ready/<w>/<i>       the i-th process of w has finished starting up
    beat/<w>            w's heartbeat with its progress
    fault/<i>           fault i of the run has reached its point
    struck/<i>          the launcher has struck it
    plan/<hash>         a plan file's text
    periods/<hash>      its period in each mode
    saved/<n>/<s>       stage s of the checkpoint of iteration n is written, or why not
    warning             what some worker could not do and could do without
    final/<w>           sha256 of the final state of w's stages
    over                a process has ended behind the last commit

With tensor parallelism, each process of a worker writes its own ack, formed, report, undone, ready, beat and final,
under its own name (members.py), and they count when all of the worker's have.
What workers write for the launcher is posted, which wakes it; heartbeats are not. What is committed and read by all
is deleted. Every key that a worker waits for is written in the end: a generation that ends turns what is still open
into "void".
What a timeout or a silence means is decided by the coordinator (coordinator.py) and nowhere else.
"""

from __future__ import annotations

import builtins
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from recycle.errors import RunError
from recycle.exec.members import split_member

GO, VOID = "go", "void"
Mode = Literal["staggered", "barrier"]
"""How the stages of an iteration step: each at once after its own reduce, to be validated by the commit; or all after
the commit."""
INTERRUPT_SECONDS = 0.02
KEPT = 0.9
"""Share of an operation's longest time that is kept when another of its kind ends."""


class Facts(Struct, frozen=True):
    """What the commit of an iteration fixes for everyone.

    Attributes:
        step: the iteration.
        loss: mean loss over its micro-batches.
        grad_norm: global norm of the mean gradient, before clipping.
        clip_factor: factor on the gradient; None when the step is skipped.
        mode: how it stepped.
        next_mode: how the next iteration steps, unless it is the first of a generation.
        recent: norms of the last iterations, this one included, that the next mode follows from; the oldest first.
        last: iteration after which all leave the generation. Said before any worker can have begun the one behind it.
        finished: this was the last iteration of the run.
        checkpoint: the state after this step is to be kept in a checkpoint.
    """

    step: int
    loss: float
    grad_norm: float
    clip_factor: float | None
    mode: Mode = "barrier"
    next_mode: Mode = "barrier"
    recent: list[float] = []
    last: int | None = None
    finished: bool = False
    checkpoint: bool = False


class Record(Struct, frozen=True):
    """The register. `roles` maps processes (by the position they started in) to positions of the plan.

    Attributes:
        joins: process that joins -> process it copies the stage's state from.
        committed: last committed iteration, -1 before the first.
        facts: of that commit.
        mode: of the iteration behind it.
    """

    generation: int
    live: list[str]
    roles: dict[str, str]
    plan: str
    committed: int = -1
    facts: Facts | None = None
    joins: dict[str, str] = {}
    mode: Mode = "barrier"


class Report(Struct, frozen=True):
    """A worker's part of a commit.

    Attributes:
        norms: squared gradient norm of each hosted stage, as floats whose exact sum it is. With tensor parallelism that
            of what this tensor rank alone holds.
        loss: its loss sum, last stage only.
        compute: `<stage><F|I|W|B>` -> (how many it ran, their seconds), without any wait for peers.
        replicated: likewise the squared norm of what all tensor ranks hold; without tensor parallelism nothing.
    """

    norms: dict[int, list[float]]
    loss: float | None
    compute: dict[str, tuple[int, float]] = {}
    replicated: dict[int, list[float]] = {}


class GenerationOver(Exception):
    """The generation ended while this worker waited for a decision; not an error."""


class Store(Protocol):
    """The few operations that membership needs. Texts only; every method raises RunError when the store is gone."""

    def set(self, key: str, text: str) -> None: ...

    def read(self, key: str) -> str | None:
        """The text of `key`, None when it was never written."""

    def compare_set(self, key: str, expected: str, text: str) -> bool:
        """Write `text` if `key` holds `expected` ("" also means never written); whether it now holds `text`."""

    def wait(self, key: str, seconds: float) -> str | None:
        """The text of `key` as soon as it is written; None when it is not within `seconds`."""

    def read_all(self, keys: list[str]) -> list[str | None]:
        """The text of each key."""

    def has_all(self, keys: list[str]) -> bool:
        """Whether every key was written."""

    def post(self, key: str, text: str) -> None:
        """Write `key` and wake whoever waits for posts."""

    def wait_for_post(self) -> bool:
        """Wait for the next post, in one thread only; False when there is none for some minutes."""

    def delete(self, keys: list[str]) -> None:
        """Forget keys that nobody will read again."""

    def first(self, key: str) -> bool:
        """True for the first caller with this key, False for every later one; the first also posts it."""

    def clone(self) -> Store:
        """Another client, for another thread."""

    def delete_groups(self, generation: int) -> None:
        """Forget what process groups of the generations before this one formed on."""

    def erase(self) -> None:
        """Forget the whole run."""

    def close(self) -> None:
        """Give back what this client and its clones hold; waits end with RunError."""

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        """Where connections made later go to, which a worker must not shut."""

    @property
    def torch_store(self) -> Any:
        """The torch store behind this client, for process groups to form on."""


class LauncherStore:
    """The default store: a torch TCPStore that lives in the launcher."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def host(cls) -> tuple[LauncherStore, int]:
        """Start the server in this process, on a free port of the loopback interface; returns (store, port).

        It listens on a socket of ours: torch's own would listen on all interfaces, and would look up the name of
        every client in the DNS, for which all clients wait.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        port = listener.getsockname()[1]
        descriptor = listener.detach()
        server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        return cls(server), port

    @classmethod
    def connect(cls, address: str, port: int, seconds: float = 30.0) -> LauncherStore:
        """A client of the launcher's server. Raises RunError when it does not answer."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            return cls(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds)))
        except RuntimeError as error:
            raise RunError(f"the launcher's store at {address}:{port} does not answer: {error}") from None

    def set(self, key: str, text: str) -> None:
        self._try(lambda: self._client.set(key, text))

    def read(self, key: str) -> str | None:
        if not self.has_all([key]):
            return None
        return self._text(self._try(lambda: self._client.get(key)))

    def compare_set(self, key: str, expected: str, text: str) -> bool:
        return self._text(self._try(lambda: self._client.compare_set(key, expected, text))) == text

    def wait(self, key: str, seconds: float) -> str | None:
        import torch.distributed as dist

        try:
            self._client.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None
        return self.read(key)

    def read_all(self, keys: list[str]) -> list[str | None]:
        if self.has_all(keys):
            return [self._text(raw) for raw in self._try(lambda: self._client.multi_get(keys))] if keys else []
        return [self.read(key) for key in keys]

    def has_all(self, keys: list[str]) -> bool:
        return bool(self._try(lambda: self._client.check(keys))) if keys else True

    def post(self, key: str, text: str) -> None:
        self.set(key, text)
        self._try(lambda: self._client.queue_push("posts", key))

    def wait_for_post(self) -> bool:
        import torch.distributed as dist

        try:
            self._client.queue_pop("posts")
        except dist.DistStoreError:
            return False
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None
        return True

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._try(partial(self._client.delete_key, key))

    def first(self, key: str) -> bool:
        if int(self._try(lambda: self._client.add(f"{key}/claims", 1))) > 1:
            return False
        self.post(key, "1")
        return True

    def clone(self) -> LauncherStore:
        return LauncherStore(self._try(self._client.clone))

    def delete_groups(self, generation: int) -> None:
        """They go with the server, too."""

    def erase(self) -> None:
        """It goes with the server."""

    def close(self) -> None:
        """The server goes with its last client of this process."""

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its connections are made before any group forms, once

    @property
    def torch_store(self) -> Any:
        return self._client

    @staticmethod
    def _text(raw: bytes) -> str:
        return raw.decode()

    @staticmethod
    def _try(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None


Message = TypeVar("Message", Record, Facts, Report)


def encode(message: Record | Facts | Report) -> str:
    """The text of a message. Python's JSON, because it keeps NaN and infinity, which a bad gradient is reported by."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True))


def decode(text: str, kind: type[Message]) -> Message:
    """The message that `encode` wrote."""
    return msgspec.convert(json.loads(text), type=kind, str_keys=True)


class Progress:
    """What the heartbeat tells: how far the worker is, what it does, and whether it waits for somebody else.

    Times of one kind of operation are kept as the longest lately: each that ends lets a tenth of it be forgotten.
    """

    def __init__(self) -> None:
        self.count = 0
        self.waiting = True
        self.doing = "start"
        self._longest: dict[str, float] = {}
        self._usual: float | None = None
        self._worked, self._since = 0.0, time.monotonic()

    def begins(self, doing: str, warms_up: bool = True) -> None:
        """The main thread is at an operation of this kind, a word without spaces.

        Args:
            warms_up: the first of its kind may compile or load something; else it takes about as long as any other.
        """
        self.doing, self.waiting = doing, False
        self._usual = None if warms_up else max(self._longest.values(), default=None)
        self._worked, self._since = 0.0, time.monotonic()
        self.count += 1

    def ended(self) -> None:
        """The operation is done, and its time, without its waits, is what the next of its kind is held against."""
        self.set_waiting(False)
        self._longest[self.doing] = max(self._worked, KEPT * self._longest.get(self.doing, 0.0))

    def set_waiting(self, waiting: bool) -> None:
        now = time.monotonic()
        if not self.waiting:
            self._worked += now - self._since
        self.waiting, self._since = waiting, now
        self.count += 1

    def text(self, beats: int) -> str:
        longest = self._longest.get(self.doing, self._usual)
        state = "waiting" if self.waiting else "working"
        return f"{beats} {self.count} {state} {self.doing} {'new' if longest is None else f'{longest:.2g}'}"


class Member:
    """A worker's side of membership.

    Args:
        store: the main thread's client; heartbeat and watch get clones.
        name: of this process, by the position it started in: `k.r`, see members.py.
        heartbeat: seconds between beats.
        interrupt: called from the watch thread while the current generation is over; wakes the main thread.
        lost: called with the reason when the store does not answer any more: without it a worker has no purpose.
        generation: the last one before this worker; a run that is resumed counts on from its earlier ones.

    Attributes:
        worker: of this process, `k.r`.
        over: set while the current generation is over.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        heartbeat: float,
        interrupt: Callable[[], None],
        lost: Callable[[str], None],
        generation: int = 0,
    ) -> None:
        self.store, self.name, self.progress = store, name, Progress()
        self.worker, _ = split_member(name)
        self._interrupt, self._lost = interrupt, lost
        self._lock = threading.Lock()
        self._generation = self._first = generation
        self.over = threading.Event()
        for target, client in ((self._beat, store.clone()), (self._watch, store.clone())):
            threading.Thread(target=self._until_lost, args=(target, client, heartbeat), daemon=True).start()

    def ready(self, incarnation: int) -> None:
        """Start-up of this position's `incarnation`-th process is done."""
        self.store.post(f"ready/{self.name}/{incarnation}", "1")

    def next_record(self) -> Record:
        """Wait for the next generation that this worker has a part in and that is not over yet."""
        self.progress.begins("settle")
        self.progress.set_waiting(True)
        while True:
            text = self.store.wait(f"proposal/{self._generation + 1}", 3600.0)
            if text is None:
                continue
            with self._lock:
                self._generation += 1
                self.over.clear()
            record = decode(text, Record)
            if self.worker in record.live and not self.store.has_all([f"stop/{self._generation}"]):
                self.progress.set_waiting(False)
                return record

    def undone(self, step: int) -> None:
        """This worker has taken back its step of an iteration that was not committed."""
        self.store.set(f"undone/{step}/{self.name}", "1")

    def acknowledge(self) -> None:
        self.store.post(f"ack/{self._generation}/{self.name}", "1")

    def formed(self, error: str = "") -> None:
        """The groups stand, or why they do not."""
        self.store.post(f"formed/{self._generation}/{self.name}", error)

    def permitted(self, what: str) -> bool:
        """Wait until the generation may "form" or "run"; False when it is over instead."""
        self.progress.set_waiting(True)
        answer = None
        while answer is None:
            answer = self.store.wait(f"{what}/{self._generation}", 3600.0)
        self.progress.set_waiting(False)
        return answer == GO

    def report(self, step: int, report: Report) -> None:
        self.store.post(f"report/{self._generation}/{step}/{self.name}", encode(report))

    def decision(self, step: int) -> Facts:
        """Wait for the commit of `step`. Raises GenerationOver when the generation ends without it."""
        self.progress.set_waiting(True)
        text = None
        while text is None:
            text = self.store.wait(f"commit/{self._generation}/{step}", 3600.0)
        self.progress.set_waiting(False)
        if text == VOID:
            raise GenerationOver
        return decode(text, Facts)

    def trouble(self, message: str) -> None:
        """The transport broke here."""
        self.store.post(f"trouble/{self._generation}", f"worker {self.name}: {message}")

    def cut_off(self, peer: str) -> None:
        """A live connection to `peer` does not answer. The first pair that is told stands."""
        if self.store.compare_set(f"cut/{self._generation}", "", f"{self.worker} {peer}"):
            self.store.post(f"trouble/{self._generation}", f"worker {self.name}: worker {peer} does not answer")

    def warn(self, message: str) -> None:
        """Something failed here that training can do without; only the first such message of a run is kept."""
        if self.store.compare_set("warning", "", message):
            self.store.post("warned", "1")

    def leave_digests(self, digests: dict[int, str]) -> None:
        """The run is over: sha256 of each hosted stage's final state."""
        self.store.post(f"final/{self.name}", msgspec.json.encode(digests).decode())

    def plan(self, digest: str) -> str:
        """The text of a plan file."""
        text = self.store.wait(f"plan/{digest}", 60.0)
        if text is None:
            raise RunError(f"worker {self.name}: plan {digest} is not in the store")
        return text

    def _beat(self, store: Store, heartbeat: float) -> None:
        beats = 0
        while True:
            store.set(f"beat/{self.name}", self.progress.text(beats))
            beats += 1
            time.sleep(heartbeat)

    def _watch(self, store: Store, _: float) -> None:
        """Interrupt the main thread when its generation stops, again and again until it has left it.

        Once is not enough: it may be about to open a connection or to wait on one. The lock keeps interrupts out of
        the next generation.
        """
        watched = self._first + 1
        while True:
            if store.wait(f"stop/{watched}", 3600.0) is None:
                continue
            while self._interrupt_in(watched):
                time.sleep(INTERRUPT_SECONDS)
            watched += 1

    def _interrupt_in(self, generation: int) -> bool:
        with self._lock:
            if self._generation == generation:
                self.over.set()
                self._interrupt()
            return self._generation <= generation

    def _until_lost(self, target: Callable[[Store, float], None], store: Store, heartbeat: float) -> None:
        try:
            target(store, heartbeat)
        except RunError as error:
            self._lost(str(error))
