"""What a host of a stage holds where the optimizer's state is sharded: all live parameters, the state of some shards.

Sum of gradients and live parameters are flat tensors of one layout, and a shard is a range of both: from where one of
the blocks begins that norms are made of up to where another does. The state of a shard is a tensor of its own for each
moment, made when the worker comes to own the shard and let go of when it owns it no more. After a step the parameters
of shards that others own come from them (`GATHER_PARAMS`), and likewise at the beginning of each generation: so a step
that is taken back is taken back on the owned shards alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch


class Shard(Protocol):
    """The state of one shard; `before` is always laid out as `state_tensors`."""

    def state_tensors(self) -> list[torch.Tensor]:
        """All that a new owner must copy: the live tensors, in fixed order."""

    def step(self, iteration: int, clip_factor: float, before: Sequence[torch.Tensor] | None, kept: int) -> None:
        """As `Stage.step`, of which `kept` elements are in `before` already."""

    def keep(self, before: Sequence[torch.Tensor], start: int) -> int:
        """As `Stage.keep`, in elements."""

    def publish(self) -> None:
        """Write the live parameters that follow from the state."""

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Stage.named_state`; of a parameter that other shards have a part of, its part (`piece_name`)."""


class SumBuffer(NamedTuple):
    """A buffer of sums of gradients, and the range of the stage's parameters that it is of.

    Attributes:
        begin: of the range.
        size: its elements.
        buffer: flat [at least size]; what lies behind goes with the shard that has the range's last element.
        is_apart: whether it is summed over its hosts by itself, so that all of it is on each.
        is_own: whether it is that of the stage's own parameters, which is summed in buckets.
    """

    begin: int
    size: int
    buffer: torch.Tensor
    is_apart: bool = False
    is_own: bool = True

    def part(self, begin: int, end: int, first: int = 0, last: int | None = None) -> torch.Tensor:
        """The part of a range of the stage's parameters, as far as it lies between two elements of the buffer."""
        low, high = (min(max(0, bound - self.begin), self.size) for bound in (begin, end))
        if low < high == self.size:
            high = self.buffer.numel()
        low, high = max(low, first), high if last is None else min(high, last)
        return self.buffer[low : max(low, high)]


class Shards:
    """The shards of one stage on one of its hosts.

    Args:
        first: number of the stage's first shard in the whole model.
        bounds: elements at which the shards begin, and the end of the last: [count + 1]. Where shards are of units,
            those of one unit lie behind those of another.
        weights: the live parameters, flat [bounds[-1]].
        sums: of the gradients.
        make: the initial state of the shard at a place.
        norms: the squared norms that a range of the summed gradients gives, as `Stage.gradient_norms_squared`.
        settled: called when no shard is made of the initial state any more.
        common: places in `norms` of a range that all tensor ranks of a worker have alike.

    Attributes:
        settled: as given.
        owned: place in the stage -> the state of a shard that this worker holds, in order.
        incomplete: numbers of those that the worker is still copying. They are stepped with the others, so what has
            come of them goes on; what has not come yet is of no meaning.
    """

    def __init__(
        self,
        first: int,
        bounds: Sequence[int],
        weights: torch.Tensor,
        sums: Sequence[SumBuffer],
        make: Callable[[int], Shard],
        norms: Callable[[int, int], list[float]],
        settled: Callable[[], None] = lambda: None,
        common: Callable[[int, int], Collection[int]] = lambda begin, end: (),
    ) -> None:
        self._first, self._bounds, self._make, self._norms = first, list(bounds), make, norms
        self._weights, self._sums, self.settled, self._common = weights, list(sums), settled, common
        self.owned: dict[int, Shard] = {}
        self.incomplete: frozenset[int] = frozenset()

    @property
    def all_numbers(self) -> range:
        """Of the stage's shards in the whole model, whoever owns them."""
        return range(self._first, self._first + len(self._bounds) - 1)

    @property
    def numbers(self) -> list[int]:
        """Of the owned shards in the whole model."""
        return [self._first + place for place in self.owned]

    @property
    def live(self) -> torch.Tensor:
        """The live parameters of all shards, flat."""
        return self._weights

    def own(self, numbers: Collection[int]) -> None:
        """Hold the state of these shards of the stage too; of a new one the initial state."""
        new = {number - self._first for number in numbers} - self.owned.keys()
        self.owned = dict(sorted({**self.owned, **{place: self._make(place) for place in sorted(new)}}.items()))

    def keep_only(self, numbers: Collection[int]) -> None:
        """Free all other shards."""
        self.owned = {place: shard for place, shard in self.owned.items() if self._first + place in numbers}

    def shard(self, number: int) -> Shard:
        """The state of an owned shard."""
        return self.owned[number - self._first]

    def tensors(self, number: int) -> list[torch.Tensor]:
        """Its live tensors."""
        return self.shard(number).state_tensors()

    def apart(self, number: int) -> list[torch.Tensor]:
        """The state of an owned shard without live parameters, which gathers bring, flat.

        In an order in which it may be copied in pieces between steps: those of an element that its others follow from
        come first, the step counts before the moments and these before the parameters.
        """
        live = self._weights.untyped_storage().data_ptr()
        apart = [one for one in self.tensors(number) if one.untyped_storage().data_ptr() != live]
        return [one.detach().view(-1) for one in reversed(apart) if one.numel()]

    def gradients(self, begin: int = 0, end: int | None = None) -> list[list[torch.Tensor]]:
        """Of each buffer of sums that the stage's hosts reduce the parts of all shards, in order.

        Args:
            begin, end: elements of the stage's own sums between which a bucket lies; other buffers are in the last one.
        """
        own = next(one for one in self._sums if one.is_own)
        found = [[own.part(*bounds, begin, end) for bounds in pairwise(self._bounds)]]
        if end in (None, own.buffer.numel()):
            others = [one for one in self._sums if not (one.is_own or one.is_apart)]
            found += [[one.part(*bounds) for bounds in pairwise(self._bounds)] for one in others]
        return found

    def reduced(self) -> list[torch.Tensor]:
        """The sums of the owned shards, in order."""
        return [part for place in self.owned for part in self._summed(place)]

    def _summed(self, place: int) -> list[torch.Tensor]:
        return [buffer.part(*self._bounds[place : place + 2]) for buffer in self._sums]

    def moments(self) -> list[torch.Tensor]:
        """The first moments of the owned shards: what comes second in their state."""
        return [shard.state_tensors()[1] for shard in self.owned.values()]

    def weights(self) -> list[torch.Tensor]:
        """The live parameters of all shards, in order."""
        return self._parts(self._weights)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[begin:end] for begin, end in pairwise(self._bounds)]

    def norms_squared(self) -> dict[int, list[float]]:
        """Number of each owned shard -> the squared norms of its summed gradients."""
        return {self._first + place: self._norms(self._bounds[place], self._bounds[place + 1]) for place in self.owned}

    def replicated(self) -> dict[int, Collection[int]]:
        """Number of each owned shard -> places in its squared norms that all tensor ranks of a worker have alike."""
        return {self._first + place: self._common(*self._bounds[place : place + 2]) for place in self.owned}

    def checksums(self) -> dict[int, int]:
        """Number of each owned shard -> the sum, modulo 2^64, of its summed gradients read as whole numbers."""
        return {
            self._first + place: sum(int(part.view(torch.int64).sum().item()) for part in self._summed(place))
            % (1 << 64)
            for place in self.owned
        }

    def digests(self) -> dict[int, str]:
        """Number of each owned shard that is complete -> sha256 over its state, as hexadecimal text."""
        return {self._first + place: digest(shard.state_tensors()) for place, shard in self._complete()}

    def publish(self) -> None:
        """Write the live parameters of the owned shards that are complete."""
        for _, shard in self._complete():
            shard.publish()

    def _complete(self) -> list[tuple[int, Shard]]:
        return [(place, shard) for place, shard in self.owned.items() if self._first + place not in self.incomplete]

    def state_tensors(self) -> list[torch.Tensor]:
        """The live tensors of the owned shards, one shard behind the other."""
        return [tensor for shard in self.owned.values() for tensor in shard.state_tensors()]

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """`named` of all owned shards, of tensors laid out as `state_tensors`."""
        named: dict[str, torch.Tensor] = {}
        for _, shard, mine in self._split(tensors):
            assert mine is not None
            named |= shard.named_state(mine)
        return named

    def step(
        self, iteration: int, clip_factor: float, before: Sequence[torch.Tensor] | None = None, kept: int = 0
    ) -> None:
        """As `Stage.step`; the owned shards alone."""
        for size, shard, mine in self._split(before):
            shard.step(iteration, clip_factor, mine, min(max(0, kept), size))
            kept -= size

    def keep(self, before: Sequence[torch.Tensor], start: int) -> int:
        """As `Stage.keep`; pieces count in elements of the owned shards, one behind the other.

        It goes no further than to a shard that is incomplete: what comes of it until the step has to be kept too.
        """
        offset = 0
        for number, (size, shard, mine) in zip(self.numbers, self._split(before), strict=True):
            if number in self.incomplete:
                return start
            if mine is not None and start < offset + size:
                return offset + shard.keep(mine, start - offset)
            offset += size
        return start

    def _split(
        self, tensors: Sequence[torch.Tensor] | None
    ) -> Iterator[tuple[int, Shard, Sequence[torch.Tensor] | None]]:
        """(elements, owned shard, its part of tensors laid out as `state_tensors`)."""
        begin = 0
        for place, shard in self.owned.items():
            end = begin + len(shard.state_tensors())
            yield (
                self._bounds[place + 1] - self._bounds[place],
                shard,
                None if tensors is None else tensors[begin:end],
            )
            begin = end


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """sha256 over tensors, as hexadecimal text."""
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
