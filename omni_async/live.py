"""The requests under way: which ids are taken, how many answers are to come, and what their streams report."""

import threading
from dataclasses import dataclass

from omni_async.errors import DuplicateRequest, QueueFull
from omni_async.mailbox import Mailbox
from omni_async.options import EngineOptions
from omni_async.stage import Stage


class LiveRequests:
    """Requests by id, from their submission to their end; its methods may be called on any thread."""

    def __init__(self, options: EngineOptions) -> None:
        self._max_slots = options.max_slots
        self._max_waiting = options.max_waiting
        # Reentrant: amid any of these the garbage collector may close a reader that its dead loop left behind, and the
        # reader's `async with` then removes its request on this very thread.
        self._lock = threading.RLock()
        self._by_id: dict[str, Mailbox] = {}
        self.num_answers = 0
        """Under way or waiting, of all requests."""

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, mailbox: Mailbox) -> None:
        """Take a request in.

        Raises:
            DuplicateRequest: a live request has the same id.
            QueueFull: too many answers are under way or waiting.
        """
        limit = self._max_slots + self._max_waiting
        count = len(mailbox.outlets)
        with self._lock:
            if mailbox.request_id in self._by_id:
                raise DuplicateRequest(f"request id {mailbox.request_id!r} belongs to a request that is still live")
            if self.num_answers + count > limit:
                raise QueueFull(
                    f"{self.num_answers} answers are under way or waiting; {count} more are above the limit of {limit} "
                    f"(max_slots {self._max_slots} + max_waiting {self._max_waiting})"
                )
            self._by_id[mailbox.request_id] = mailbox
            self.num_answers += count

    def remove(self, mailbox: Mailbox) -> None:
        """Let the id be used again; later calls for the same request change nothing."""
        with self._lock:
            if self._by_id.get(mailbox.request_id) is mailbox:
                del self._by_id[mailbox.request_id]
                self.num_answers -= len(mailbox.outlets)

    def find(self, request_id: str) -> Mailbox | None:
        """The live request with this id."""
        with self._lock:
            return self._by_id.get(request_id)

    def take_all(self) -> list[Mailbox]:
        """Remove every request."""
        with self._lock:
            mailboxes = list(self._by_id.values())
            self._by_id.clear()
            self.num_answers = 0
        return mailboxes


@dataclass(frozen=True, slots=True)
class StageDesk:
    """Where the streams of a stage's requests report; see `omni_async.stream.Desk`."""

    stage: Stage
    live: LiveRequests

    def leave(self, mailbox: Mailbox) -> None:
        """The caller of a stream has left it."""
        self.live.remove(mailbox)
        self.abandon(mailbox)

    def abandon(self, mailbox: Mailbox) -> None:
        """The same from a finaliser: takes no lock, touches no event loop."""
        if not mailbox.ended:
            self.stage.cancel(mailbox, "abort")

    def wake(self) -> None:
        """A held request may go on."""
        self.stage.wake()
