"""The built-in instructions: frozen, fully identified, without times. Each class has a row in `recycle.ir.kinds`.

The text of an instruction is its repr, the file syntax and the form in errors. It extends the notation of
`torch.distributed.pipelining`:

    instruction = stage kind [ micro_batch ] [ "/" bucket ] [ "@" worker ] | "(" F-or-B ";" F-or-B ")"
    micro_batch = pipeline "." index      input may omit "pipeline." if there is one pipeline
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from recycle.errors import ScheduleError
from recycle.ir.kinds import (
    KIND_CLASSES as KIND_CLASSES,
    AsyncInstruction as AsyncInstruction,
    Compute as Compute,
    ComputePart as ComputePart,
    HostCopy as HostCopy,
    Instruction as Instruction,
    InstructionKind,
    Need,
    Origin,
    Part as Part,
    Receive as Receive,
    Send as Send,
    StagePart as StagePart,
    StageWide as StageWide,
    Transfer as Transfer,
    ValueKind,
    WaitSend as WaitSend,
    is_kind as is_kind,
    kind_of_token,
    make_instruction as make_instruction,
    reads_kinds,
    register,
)
from recycle.job.shape import MicroBatch, Worker

_ACTIVATION, _INPUT_GRADIENT, _WEIGHT_GRADIENT = ValueKind
_NEEDS_OF_BACKWARD = Need(_ACTIVATION, 0, Origin.STAGE), Need(_INPUT_GRADIENT, +1)


@register(
    InstructionKind(
        token="F",
        title="forward",
        needs=(Need(_ACTIVATION, -1),),
        produces=(_ACTIVATION,),
        required=True,
        seconds=("forward",),
        holds=True,
    )
)
class Forward(Compute):
    """`2F1.5`: stage 2's forward of micro-batch 5 of pipeline 1."""

    __slots__ = ()


@register(
    InstructionKind(
        token="B",
        title="backward (input and weight)",
        needs=_NEEDS_OF_BACKWARD,
        produces=(_INPUT_GRADIENT, _WEIGHT_GRADIENT),
        required=True,
        seconds=("backward_input", "backward_weight"),
        remakes=True,
        frees=lambda profile: 1.0,
    )
)
class Backward(Compute):
    """`2B1.5`: input and weight gradients in one instruction."""

    __slots__ = ()


@register(
    InstructionKind(
        token="I",
        title="backward for the input",
        needs=_NEEDS_OF_BACKWARD,
        produces=(_INPUT_GRADIENT,),
        required=True,
        seconds=("backward_input",),
        remakes=True,
        frees=lambda profile: 1 - profile.weight_stash,
    )
)
class BackwardInput(Compute):
    """`2I1.5`: the gradient of the stage's input, the only gradient that the previous stage waits for."""

    __slots__ = ()


@register(
    InstructionKind(
        token="W",
        title="backward for the weights",
        needs=(Need(_INPUT_GRADIENT, 0, Origin.STAGE),),
        produces=(_WEIGHT_GRADIENT,),
        required=True,
        seconds=("backward_weight",),
        frees=lambda profile: profile.weight_stash,
    )
)
class BackwardWeight(Compute):
    """`2W1.5`: the gradient of the stage's weights; may run any time before the stage's reduce."""

    __slots__ = ()


@register(
    InstructionKind(
        token=";",
        title="forward and backward, overlapped",
        required=True,
        holds=True,
        letter="F",
    )
)
@dataclass(frozen=True, slots=True, repr=False)
class OverlappedPair(Instruction):
    """`(2F1.5;2B1.3)`: one forward and one whole backward at the same time (DualPipe), printed with the forward first.

    Needs, products and freed memory are the sum of both halves. The duration is the profile's `overlapped_pair`, or the
    sum of the halves if the profile has none.
    """

    forward: Forward
    backward: Backward

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


def _transfer(token: str, title: str, need: Need) -> InstructionKind:
    return InstructionKind(token=token, title=title, needs=(need,), letter="")


@register(_transfer("SEND_F", "activation sent", Need(_ACTIVATION, 0, Origin.SAME_WORKER)))
class SendActivation(Send):
    """`2SEND_F1.5@0.3`: send stage 2's output of micro-batch 1.5 to worker 0.3."""

    __slots__ = ()


@register(_transfer("RECV_F", "activation awaited", Need(_ACTIVATION, -1)))
class RecvActivation(Receive):
    """`3RECV_F1.5@1.2`: receive stage 3's input of micro-batch 1.5 from worker 1.2."""

    __slots__ = ()


@register(_transfer("SEND_B", "gradient sent", Need(_INPUT_GRADIENT, 0, Origin.SAME_WORKER)))
class SendGradient(Send):
    """`3SEND_B1.5@1.2`: send stage 3's input gradient of micro-batch 1.5 to worker 1.2."""

    __slots__ = ()


@register(_transfer("RECV_B", "gradient awaited", Need(_INPUT_GRADIENT, +1)))
class RecvGradient(Receive):
    """`2RECV_B1.5@0.3`: receive stage 2's output gradient of micro-batch 1.5 from worker 0.3."""

    __slots__ = ()


@register(
    InstructionKind(
        token="REDUCE_GRAD",
        title="reduction of the stage's gradients",
        implied=True,
        seconds=("reduce",),
        letter="R",
    )
)
class ReduceGradients(StageWide):
    """`2REDUCE_GRAD`: the sum of stage 2's gradients over all its live hosts.

    With several buckets: the sum of the last bucket, and the end of the sums that REDUCE_BUCKET began.
    """

    __slots__ = ()


@register(replace(BackwardWeight.row, token="W_PART", title="backward for the weights of a bucket", letter="W"))
class WeightPart(ComputePart):
    """`2W_PART1.5/0`: the gradient of the stage's weights in bucket 0."""

    __slots__ = ()


@register(
    InstructionKind(
        token="REDUCE_BUCKET",
        title="reduction of a bucket of the stage's gradients",
        seconds=("reduce",),
        letter="",
    )
)
class ReduceBucket(StagePart, AsyncInstruction):
    """`2REDUCE_BUCKET/0`: begin the sum of bucket 0 of stage 2's gradients over all its live hosts."""

    __slots__ = ()


@register(
    InstructionKind(
        token="STEP",
        title="optimizer step",
        follows=ReduceGradients,
        implied=True,
        seconds=("step",),
        letter="S",
    )
)
class OptimizerStep(StageWide):
    """`2STEP`: the optimizer step of stage 2."""

    __slots__ = ()


@register(
    InstructionKind(
        token="GATHER_PARAMS",
        title="parameters gathered from the owners of their shards",
        follows=OptimizerStep,
        seconds=("gather",),
        letter="G",
    )
)
class GatherParameters(StageWide):
    """`2GATHER_PARAMS`: with a sharded optimizer, gather stage 2's parameters from the hosts that stepped them."""

    __slots__ = ()


@register(
    InstructionKind(
        token="R",
        title="forward of the next stage, run again on its copy",
        needs=(Need(_ACTIVATION, -1, Origin.SAME_WORKER),),
        seconds=("redundant_forward",),
        holds=True,
        frees=lambda profile: 1 - profile.redundant_stash,
        released_by=(_INPUT_GRADIENT, -1),
    )
)
class RedundantForward(Compute):
    """`2R1.5`: rerun stage 2's forward of micro-batch 1.5 on the worker of stage 1, which holds a copy of stage 2.

    The result is kept for the backward that the copy would run if the worker of stage 2 died (Bamboo). Stage 1's
    backward of the same micro-batch frees it.
    """

    __slots__ = ()


@register(
    InstructionKind(
        token="REPLAY",
        title="forward and backward of a peer, run again to check it",
        needs=(Need(_ACTIVATION, -1), Need(_INPUT_GRADIENT, +1)),
        seconds=("forward", "backward_input", "backward_weight"),
        holds=True,
        frees=lambda profile: 1.0,
        letter="C",
    )
)
class Replay(Compute):
    """`2REPLAY1.5`: rerun stage 2's forward and backward of micro-batch 1.5 on a peer of the host.

    The results (output, input gradient, contribution to the weight gradients) are compared with the host's by checksums
    and dropped. Limits: a replay does not detect wrong inputs; the replay of their producer does.
    """

    __slots__ = ()


@register(
    InstructionKind(
        token="OFFLOAD",
        title="activation copied to the host",
        needs=(Need(_ACTIVATION, 0, Origin.STAGE),),
        seconds=("host_copy",),
        frees=lambda profile: 1.0,
        letter="",
    )
)
class Offload(HostCopy):
    """`2OFFLOAD1.5`: the activation that stage 2 keeps of micro-batch 1.5 has left the device.

    The copy begins when the forward has ended and the lane is free. The worker's next instruction waits for its end.
    """

    __slots__ = ()


@register(
    InstructionKind(
        token="RELOAD",
        title="activation copied back from the host",
        needs=(Need(_ACTIVATION, 0, Origin.STAGE),),
        follows=Offload,
        seconds=("host_copy",),
        holds=True,
        letter="",
    )
)
class Reload(HostCopy):
    """`2RELOAD1.5`: begin to copy the activation back; the backward for the input waits for the end of the copy."""

    __slots__ = ()


def _wait(token: str, title: str, value: ValueKind, send: type[Send]) -> InstructionKind:
    return InstructionKind(token=token, title=title, needs=(Need(value, 0, Origin.STAGE),), follows=send, letter="")


@register(_wait("WAIT_SEND_F", "arrival of a sent activation awaited", _ACTIVATION, SendActivation))
class WaitSendActivation(WaitSend):
    """`2WAIT_SEND_F1.5`: wait until stage 2's output of micro-batch 1.5 has arrived at its receivers."""

    __slots__ = ()


@register(_wait("WAIT_SEND_B", "arrival of a sent gradient awaited", _INPUT_GRADIENT, SendGradient))
class WaitSendGradient(WaitSend):
    """`2WAIT_SEND_B1.5`: wait until stage 2's input gradient of micro-batch 1.5 has arrived at its receivers."""

    __slots__ = ()


CARRIERS: dict[ValueKind, tuple[type[Send], type[Receive]]] = {
    _ACTIVATION: (SendActivation, RecvActivation),
    _INPUT_GRADIENT: (SendGradient, RecvGradient),
}
"""The send and the receive that carry each value to another worker."""


def paired(halves: Iterable[Instruction | str]) -> OverlappedPair | None:
    """Return the pair of one F and one B, in either order; None for other halves."""
    match sorted(halves, key=lambda half: not isinstance(half, Forward)):
        case [Forward() as forward, Backward() as backward]:
            return OverlappedPair(forward, backward)
    return None


def computes(program: Iterable[Instruction | str]) -> Iterator[Compute]:
    """Yield the computes of a program, with overlapped pairs split."""
    for instruction in program:
        if isinstance(instruction, OverlappedPair):
            yield from (instruction.forward, instruction.backward)
        elif isinstance(instruction, Compute) and not isinstance(instruction, WaitSend):
            yield instruction


@reads_kinds
def _plain() -> re.Pattern[str]:
    tokens = "|".join(sorted((cls.token for cls in KIND_CLASSES if cls is not OverlappedPair), key=len, reverse=True))
    return re.compile(rf"([0-9]+)({tokens})(?:(?:([0-9]+)\.)?([0-9]+))?(?:/([0-9]+))?(?:@([0-9]+)\.([0-9]+))?")


_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)")
DIGITS = 9
_TOO_LONG = re.compile(rf"[0-9]{{{DIGITS + 1}}}")


def parse_instruction(text: str, one_pipeline: bool = False) -> Instruction:
    """Parse one instruction, such as `2F1.5`, `3RECV_F1.5@1.2`, `2STEP` or `(2F1.5;2B1.3)`.

    With `one_pipeline`, `2F5` means `2F0.5`. Raises ScheduleError if the text is not an instruction.
    """
    match = _plain().fullmatch(text)
    if match is None:
        return _parse_pair(text, one_pipeline)
    if _TOO_LONG.search(text):
        raise ScheduleError(f"{text[:40]!r}: a number has more than {DIGITS} digits")
    cls, stage = kind_of_token(match[2]), int(match[1])
    bucket = "" if match[5] is None else f"/{match[5]}"
    if issubclass(cls, StageWide) and (match[4] is not None or match[6] is not None):
        raise ScheduleError(
            f"{text!r}: {cls.token} takes no micro-batch and no worker, write {stage}{cls.token}{bucket}"
        )
    if bucket and not issubclass(cls, Part):
        raise ScheduleError(f"{text!r}: {cls.token} takes no bucket")
    if match[6] is not None and not issubclass(cls, Transfer):
        raise ScheduleError(f"{text!r}: {cls.token} is local and takes no @worker")
    if match[4] is None and not issubclass(cls, StageWide):
        raise ScheduleError(f"{text!r}: the micro-batch is missing, write for example {stage}{cls.token}0.1")
    if match[4] is not None and match[3] is None and not one_pipeline:
        raise ScheduleError(
            f"{text!r}: the pipeline of the micro-batch is missing, write for example {stage}{cls.token}0.{match[4]}"
        )
    if not bucket and issubclass(cls, Part):
        raise ScheduleError(f"{text!r}: the bucket is missing, write for example {text}/0")
    if match[6] is None and issubclass(cls, Transfer):
        raise ScheduleError(f"{text!r}: the other worker is missing, write for example {text}@0.1")
    micro_batch = MicroBatch(int(match[3] or 0), int(match[4] or 0))
    peer = Worker(int(match[6]), int(match[7])) if match[6] else None
    return make_instruction(cls, stage=stage, micro_batch=micro_batch, peer=peer, bucket=int(match[5] or 0))


def _parse_pair(text: str, one_pipeline: bool) -> OverlappedPair:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an instruction: expected for example 2F1.5, 2SEND_F1.5@0.3 or 2STEP")
    pair = paired(parse_instruction(part, one_pipeline) for part in match.groups())
    if pair is None:
        raise ScheduleError(f"{text!r}: an overlapped pair is one F and one B, for example (2F1.5;2B1.3)")
    return pair
