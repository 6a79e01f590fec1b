"""The gradients of weights as a backward makes them: added to the sums, and to the checksums of watched micro-batches.

They come from the store of delayed weight gradients, from layers that delay their own, and from autograd's hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Literal

import torch

from recycle.exec.model.checksum import ChecksumBuilder, word_count
from recycle.exec.model.state.accumulate import ExactSum
from recycle.exec.model.state.gradient_sums import GradientSums

Half = Literal["I", "W"]


class IncomingGradients:
    """Takes the gradients of a stage's parameters.

    Args:
        sums: that they are added to.
        parameters: of the stage, in the order in which checksums count their words.
        summed: those whose gradients tensor ranks sum first.

    Attributes:
        making: takes checksums of what the backward under way makes; None where nobody wants them.
        placed: parameter -> the half of the backward that gave its gradient last.
    """

    def __init__(
        self,
        sums: GradientSums,
        parameters: Sequence[torch.nn.Parameter],
        summed: Collection[torch.nn.Parameter],
    ) -> None:
        self._sums, self._summed = sums, summed
        counts = [word_count(parameter) for parameter in parameters]
        self._first_word: dict[torch.Tensor, int] = dict(zip(parameters, accumulate(counts, initial=0), strict=False))
        self.placed: dict[torch.Tensor, Half] = {}
        self.reset()
        for parameter in parameters:
            # Fires for what autograd computes in I: norms, embeddings, biases outside the linear layers.
            parameter.register_post_accumulate_grad_hook(self._take_from_autograd)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """No backward is under way, also where the last one was interrupted."""
        self.making: ChecksumBuilder | None = None
        self._half: Half | None = None
        self._is_scratch = False

    @contextmanager
    def of(self, making: ChecksumBuilder | None, half: Half | None) -> Iterator[None]:
        """The gradients that come up inside are of one micro-batch.

        Args:
            making: takes their checksums.
            half: of the backward that is run; None for all of it.
        """
        self.making, self._half = making, half
        yield
        self.making = None

    @contextmanager
    def for_checksums_only(self, making: ChecksumBuilder) -> Iterator[None]:
        """The gradients that come up inside are for checksums alone."""
        self.making, self._half, self._is_scratch = making, None, True
        yield
        self.making, self._is_scratch = None, False

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient."""
        accumulator, position = self._sums.place_of(parameter)
        if parameter in self._summed:
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=get_tensor_model_parallel_group())
        if self.making is not None:
            self.making.weight_gradient(self._first_word[parameter], gradient)
        if not self._is_scratch:
            accumulator.add(position, gradient)
            self._note(parameter)

    def add_product(self, weight: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Take a matrix's gradient, which is the product of `rows`, transposed, and `inputs`."""
        accumulator, position = self._sums.place_of(weight)
        if self.making is not None:
            product = rows.t().matmul(inputs)
            self.making.weight_gradient(self._first_word[weight], product)
            if self._is_scratch:
                return
            if isinstance(accumulator, ExactSum):  # which would make it once more
                accumulator.add(position, product)
                self._note(weight)
                return
        accumulator.add_product(position, rows.t(), inputs)
        self._note(weight)

    def _note(self, parameter: torch.Tensor) -> None:
        if self._half is not None:
            self.placed[parameter] = self._half

    def _take_from_autograd(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        # The hook fires for a weight of the store too, with nothing in it.
        if gradient is not None:
            self.add(parameter, gradient)
