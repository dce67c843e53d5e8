"""The generations that the fake engine has under way: found by name to be aborted, waited for, counted in the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.testing.engine.generation import Generation, Written


class LiveGenerations:
    """Generations by the names that they are aborted by. `sampled`: tokens of those that are over."""

    def __init__(self) -> None:
        self.sampled = 0
        self._by_name: dict[str, Generation] = {}

    @property
    def are_writing(self) -> bool:
        """Whether one has begun to write."""
        return any(generation.started for generation in self._by_name.values())

    async def run(self, name: str, generation: Generation, *, deaf: bool) -> Written:
        """Let a generation write to its end, under a name; `deaf`: also when the client has left."""
        self._by_name[name] = generation
        try:
            return await generation.run(deaf=deaf)
        finally:
            generation.when_over(lambda: self._over(name, generation))

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._by_name.values())

    def abort(self, names: Sequence[str] | None = None) -> None:
        """End those of these names with what they have written; None: all."""
        for name, generation in list(self._by_name.items()):
            if names is None or name in names:
                generation.abort()

    def die(self) -> None:
        """End all, and forget them."""
        self.abort()
        self._by_name.clear()

    def metrics(self, speaks: str) -> str:
        """Return the body of GET /metrics, by the names of the protocols that are spoken: "vllm", "sglang" or "both"."""
        waiting = sum(not generation.started for generation in self._by_name.values())
        running = len(self._by_name) - waiting
        values = {
            "vllm:generation_tokens_total": self.sampled,
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "sglang:generation_tokens_total": self.sampled,
            "sglang:num_running_reqs": running,
            "sglang:num_queue_reqs": waiting,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items() if speaks in {"both", name.partition(":")[0]})

    def _over(self, name: str, generation: Generation) -> None:
        self.sampled += len(generation.written.ids)
        if self._by_name.get(name) is generation:
            del self._by_name[name]
