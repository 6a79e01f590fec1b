"""The receives of a program, of which the next few are posted before it comes to them.

They are posted in the program's order, all lanes together, so a sender finds its receive there and memory for messages
stays bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from recycle.exec.transport.base import Pending
from recycle.ir.instruction import Instruction, Receive, Transfer


class PostedReceives:
    """Receives of one program.

    Args:
        post: posts a receive; what it returns waits for the message.
        ahead: how many may be posted that the program has not come to.
        may_join: whether a receive may be posted ahead beside those that are.
    """

    def __init__(
        self,
        post: Callable[[Transfer], Pending],
        ahead: Callable[[], int],
        may_join: Callable[[Transfer, Collection[Transfer]], bool] = lambda receive, posted: True,
    ) -> None:
        self._post, self._ahead, self._may_join = post, ahead, may_join
        self._unposted: deque[Receive] = deque()
        self._posted: dict[Transfer, Pending] = {}

    def begin(self, program: Sequence[Instruction]) -> None:
        """The receives are those of `program` from here on."""
        self._unposted = deque(one for one in program if isinstance(one, Receive))
        self._posted = {}
        self._post_ahead()

    def take(self, instruction: Transfer) -> Pending:
        """The receive that the program comes to, posted at the latest now."""
        while instruction not in self._posted:
            self._post_next()
        pending = self._posted.pop(instruction)
        self._post_ahead()
        return pending

    def clear(self) -> None:
        """Forget the receives that are posted, and post no other."""
        self._posted = {}
        self._unposted.clear()

    def _post_ahead(self) -> None:
        while (
            self._unposted
            and len(self._posted) < self._ahead()
            and self._may_join(self._unposted[0], self._posted.keys())
        ):
            self._post_next()

    def _post_next(self) -> None:
        instruction = self._unposted.popleft()
        self._posted[instruction] = self._post(instruction)
