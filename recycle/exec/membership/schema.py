"""Every key that a run keeps in its store: what its text means, who writes it, who follows it, how long it is kept.

Each key is a class, and its instances are the keys: `CommitKey(3, 17)` is the key of the commit of iteration 17 in
generation 3. The class says all that a store has to know, so that a new key is one class here and nothing elsewhere:

- the type of its value, which gives the text in the store (JSON; a text stays as it is, and of a generation record its
  exceptions are written);
- who writes it, and with that the folder it lies in. On etcd a client follows whole folders: agents follow `orders` and
  pass it on to their workers, whoever coordinates follows `posts` and `register` as well. On the launcher's store every
  write in `posts` wakes the launcher;
- how it may be written: a `Decision` only by compare-and-set, a `Note` by whoever is its writer, at any time;
- how long it is kept: a key with a field `generation` is deleted once a later generation runs (`Store.forget_before`),
  what else a comment says; all others are kept until the run ends.

With tensor parallelism each process of a worker writes keys of its own, under its own name (members.py), and they
count when all processes of the worker have written theirs. Every key that a worker waits for is written in the end: a
generation that ends turns each decision that is still open into "void".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, dataclass_transform, get_args, get_origin

import msgspec

from recycle.exec.membership.packed_record import PackedRecord, pack_record, unpack_record
from recycle.exec.protocol import (
    Commit,
    Copied,
    Evaluated,
    EvaluationReport,
    Formed,
    GenerationRecord,
    Heartbeat,
    Notice,
    Permission,
    Report,
    RunInfo,
    Saved,
    StartRequest,
)
from recycle.shape import Worker

Content = TypeVar("Content")


class Folder(StrEnum):
    """A part of the keys that is followed, or not, as a whole. On etcd, neighbours in this order are one range."""

    BEATS = "beats"
    """Read when somebody looks at them, in one request for all."""
    GROUPS = "groups"
    """What process groups form on; the keys below it are torch's."""
    ORDERS = "orders"
    POSTS = "posts"
    REGISTER = "register"
    """Written at every commit, and followed by nobody but whoever coordinates."""


class Writer(StrEnum):
    """Who writes a key."""

    COORDINATOR = "coordinator"
    AGENT = "agent"
    WORKER = "worker"


EVERYBODY = ""
"""In the place of a key's member: the keys of all members."""


def generation_folder(generation: int) -> str:
    """What the names of a generation's keys begin with in each folder; sorted as the generations are."""
    return f"generation{generation:08d}"


@dataclass_transform(frozen_default=True)
class Key(Generic[Content]):
    """A key of the store. Subclasses list its parts as fields.

    Class arguments:
        writer: who writes it.
        folder: where it lies; by default `orders` for what the coordinator writes and `posts` for all else.
    """

    folder: ClassVar[Folder]
    writer: ClassVar[Writer]
    _kind: ClassVar[str]
    _type: ClassVar[Any]
    _decoder: ClassVar[msgspec.json.Decoder[Any]]

    def __init_subclass__(cls, *, writer: Writer | None = None, folder: Folder | None = None) -> None:
        super().__init_subclass__()
        if writer is None:
            return  # Note and Decision
        cls.writer = writer
        cls.folder = folder or (Folder.ORDERS if writer is Writer.COORDINATOR else Folder.POSTS)
        cls._kind = cls.__name__.removesuffix("Key").lower()
        (base,) = (base for base in cls.__dict__["__orig_bases__"] if get_origin(base) is not None)
        (cls._type,) = get_args(base)
        cls._decoder = msgspec.json.Decoder(PackedRecord if cls._type is GenerationRecord else cls._type)
        dataclass(frozen=True)(cls)

    @property
    def name(self) -> str:
        """The key's name in the store, below the run's own prefix."""
        parts = dict(vars(self))
        generation = parts.pop("generation", None)
        within = [] if generation is None else [generation_folder(generation)]
        return "/".join([self.folder, *within, self._kind, *map(str, parts.values())])

    @classmethod
    def parent(cls) -> str:
        """The folder of the keys of this kind, one that has no generation."""
        return f"{cls.folder}/{cls._kind}"

    @classmethod
    def is_bundled(cls) -> bool:
        """Whether an agent may write the keys of all its processes in one (bundles.py)."""
        fields = cls.__annotations__
        return "member" in fields and ("generation" in fields or cls.folder is Folder.BEATS)

    def encode(self, value: Content) -> str:
        """The text in the store that stands for `value`; Python's JSON keeps NaN and infinity of bad gradients."""
        if isinstance(value, str) and self._type is str:
            return value
        written = pack_record(value) if isinstance(value, GenerationRecord) else value
        return json.dumps(msgspec.to_builtins(written, str_keys=True), separators=(",", ":"))

    def decode(self, text: str) -> Content:
        """The value that a text in the store stands for."""
        if self._type is str:
            return cast(Content, text)
        try:
            value = self._decoder.decode(text)
        except msgspec.DecodeError:  # of what Python's JSON has beyond the standard
            value = msgspec.convert(json.loads(text), self._decoder.type, str_keys=True)
        return cast(Content, unpack_record(value) if isinstance(value, PackedRecord) else value)


class Note(Key[Content]):
    """A key that its writer may write at any time."""


class Decision(Key[Content]):
    """A key that is written by compare-and-set only: of two who decide at once, one learns that it was second."""


# The run.


class RegisterKey(Decision[GenerationRecord], writer=Writer.COORDINATOR, folder=Folder.REGISTER):
    """The one register: the current generation and the last committed step."""


class BegunKey(Note[int], writer=Writer.COORDINATOR):
    """The generation that was proposed last, so that nobody waits for one before it. Says nothing that counts."""


class RunKey(Decision[RunInfo], writer=Writer.AGENT, folder=Folder.ORDERS):
    """What all agents of a run agree on; the first agent writes it."""


class CoordinatorKey(Decision[str], writer=Writer.AGENT, folder=Folder.ORDERS):
    """The agent that coordinates; vanishes with that agent's lease."""


class OutcomeKey(Note[str], writer=Writer.COORDINATOR):
    """Why the run cannot go on; empty when it has ended well, `ENDED_EARLY` when it was told to end: all agents may
    leave then."""


class OverKey(Note[bool], writer=Writer.COORDINATOR):
    """A process has ended after the last commit. Its writer sees afterwards what others wrote before."""


# A generation; all of these are deleted once a later one runs.


class ProposalKey(Decision[GenerationRecord], writer=Writer.COORDINATOR):
    """What the generation begins with."""

    generation: int


class PlanKey(Note[str], writer=Writer.COORDINATOR):
    """The generation's plan file, packed (plan_files.py); written only where the run directory does not hold it."""

    generation: int


class AcknowledgedKey(Note[bool], writer=Writer.WORKER):
    """The process has left its last generation and is ready to form this one; whether it took back a step for that."""

    generation: int
    member: str


class PermissionKey(Decision[Permission], writer=Writer.COORDINATOR):
    """The generation may form its groups, once all have acknowledged, or run, once the groups of all stand."""

    generation: int
    what: Literal["form", "run"]


class FormedKey(Note[Formed], writer=Writer.WORKER):
    """Whether the groups of the process stand."""

    generation: int
    member: str


class StaleKey(Note[bool], writer=Writer.WORKER):
    """Live parameters of some process are not those of the committed iteration; written before it acknowledges."""

    generation: int


class CopiedKey(Note[list[Copied]], writer=Writer.WORKER):
    """What the process has copied so far of what its generation has copied while it runs."""

    generation: int
    member: str


class ReportKey(Note[Report], writer=Writer.WORKER):
    """The process has all its gradient sums of iteration `step`. Deleted with the commit."""

    generation: int
    step: int
    member: str


class CommitKey(Decision[Commit | Literal["void"]], writer=Writer.COORDINATOR):
    """The commit of iteration `step`, written after the register holds it. Deleted two commits later."""

    generation: int
    step: int


class EvaluationReportKey(Note[EvaluationReport], writer=Writer.WORKER):
    """The process has run its part of the evaluation after iteration `step`. Deleted with the result."""

    generation: int
    step: int
    member: str


class EvaluatedKey(Decision[Evaluated | Literal["void"]], writer=Writer.COORDINATOR):
    """The result of the evaluation after iteration `step`, written after the register holds it. The next deletes it."""

    generation: int
    step: int


class StopKey(Note[bool], writer=Writer.COORDINATOR):
    """The generation is over."""

    generation: int


class TroubleKey(Note[str], writer=Writer.WORKER):
    """The transport of some process broke; somebody else may be the cause."""

    generation: int


class CutKey(Decision[list[str]], writer=Writer.WORKER):
    """Two workers, of which the first found that the other does not answer on their connection."""

    generation: int


# Processes.


class ReadyKey(Note[bool], writer=Writer.WORKER):
    """This process of a worker has started up. Deleted once a generation runs that the worker joined."""

    member: str
    incarnation: int


class HeartbeatKey(Note[Heartbeat], writer=Writer.WORKER, folder=Folder.BEATS):
    """The heartbeat of a process; read by whoever looks for silence, followed by nobody."""

    member: str


class NoticesKey(Decision[dict[str, Notice]], writer=Writer.WORKER):
    """The workers that were told to leave, and what has come of that (departures.py)."""


class LeaveKey(Note[bool], writer=Writer.COORDINATOR):
    """This process of the worker takes no part any more, and may end."""

    worker: Worker
    incarnation: int


class SavedKey(Note[Saved], writer=Writer.WORKER):
    """A part of the checkpoint of iteration `step` is written, or why not. Deleted when a later one is complete."""

    step: int
    stage: int
    tensor_rank: int = 0


GIVEN = "given"
"""The stages that processes start with, in names of keys."""


class StateLayoutKey(Note[list[tuple[str, int, int, int]]], writer=Writer.WORKER):
    """Where the tensors of what hosts compare lie, as `checksum.StateTensor`s, for events that name one; by the numbers
    of `Stage.compared`. `layout` is the plan that it is a stage of, as `Holdings.layout` has it, and `GIVEN` where that
    is empty."""

    number: int
    tensor_rank: int = 0
    layout: str = GIVEN


class FinalKey(Note[dict[int, str]], writer=Writer.WORKER):
    """sha256 of the final state of each stage of the process."""

    member: str


class WarningKey(Decision[str], writer=Writer.WORKER):
    """What some worker could not do and training could do without; only the first is kept."""


# Faults that are injected.


class ReachedKey(Decision[str], writer=Writer.WORKER):
    """The fault of this number has reached its point; holds who was first."""

    fault: int


class StrikeKey(Note[bool], writer=Writer.COORDINATOR):
    """The event of the fault of this number is written; all processes of a pair that it strikes shall strike now."""

    fault: int


class CutEndsKey(Note[list[str]], writer=Writer.WORKER):
    """The process's ends of its connections, for the fault of this number, which cuts those to another worker."""

    fault: int
    member: str


# Processes on other nodes.


class AgentKey(Decision[str], writer=Writer.AGENT):
    """The agent of a node, a session that changes with every agent process; vanishes with that agent's lease."""

    node: int


class GoneKey(Decision[bool], writer=Writer.COORDINATOR):
    """The agent with this session is given up, and all its workers: it did not come back after its lease had ended."""

    node: int
    session: str


class StartRequestKey(Note[StartRequest], writer=Writer.COORDINATOR):
    """Which process of the worker its agent shall start."""

    worker: Worker


class KillRequestKey(Note[int], writer=Writer.COORDINATOR):
    """The incarnation up to which every process of the worker shall be dead."""

    worker: Worker


class EndedKey(Note[tuple[int, str]], writer=Writer.AGENT):
    """The incarnation of the worker's process that ended last, and how it ended."""

    worker: Worker


class PlacesKey(Note[dict[str, str]], writer=Writer.COORDINATOR):
    """Position -> position whose place on the nodes it has, where the two differ."""
