"""An ingest server before a real gate, recorder and Ingest, and quick ways to talk to it."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp

from headway.adapters.ingest.server import IngestServer
from headway.events import GroupDropped, Published, Ready
from headway.flow.gate import CapacityGate
from headway.flow.ingest import Ingest
from headway.flow.payloads import Payloads
from headway.flow.recorder import Recorder
from headway.formats.offered import SampleLimits
from headway.rules.admission import GateLimits
from headway.settings import IngestSection
from headway.sim.journal import SimJournal

SAMPLE = {"token_ids": [1, 2, 3], "sampled_mask": [False, True, True], "logprobs": [0.0, -0.5, -1.0]}


def body(name="posted", **changes):
    return {"name": name, "rollouts": [{"reward": float(n), "samples": [SAMPLE]} for n in range(2)]} | changes


async def until(condition):
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 -- sockets tell nobody
            await asyncio.sleep(0)


async def _answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 100 " in head:
        return head + await _answer(reader)
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


class Service:
    """A server before a real gate, recorder and Ingest; the sink takes all but what is called unusable."""

    def __init__(self, directory, *, published=True, replayed_groups=2, host="127.0.0.1", port=0, **limits_of_server):
        self.journal = SimJournal()
        self.recorder = Recorder(self.journal)
        self.ledger = self.recorder.watch.now
        limits = GateLimits(groups_per_batch=4, group_size=2, max_concurrent=8, steps_ahead=0.0, steps=9, replayed_groups=replayed_groups)
        gate = CapacityGate(limits, watch=self.recorder.watch, record=self.recorder.record, clock=self.clock)
        payloads = Payloads(
            commit=self.recorder.commit, read=self.journal.read, watch=self.recorder.watch, max_held_bytes=2**20, clock=self.clock
        )
        self.ingest = Ingest(
            place=gate.admit_replayed,
            commit=payloads.commit,
            take=self.take,
            watch=self.recorder.watch,
            wait_seconds=0.05,
        )
        self.address_file = directory / "ingest.json"
        self.server = IngestServer(
            IngestSection(host=host, port=port, max_request_bytes=4096),
            ingest=self.ingest,
            limits=SampleLimits(tokens=100, vocabulary=50),
            address_file=self.address_file,
            clock=self.clock,
            **limits_of_server,
        )
        self.taken = []
        if published:
            self.recorder.record(Published(0.0, 0, ("e",)))

    def clock(self):
        return 1.5

    def take(self, finished):
        name, number = finished.admission.prompt.id, finished.admission.group
        self.taken.append(name)
        self.recorder.record(GroupDropped(0.0, number, "filtered", "", 0) if name == "unusable" else Ready(0.0, number, False))

    @property
    def address(self):
        return json.loads(self.address_file.read_bytes())

    @asynccontextmanager
    async def listening(self):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(service()) for service in (self.recorder.run, self.ingest.run, self.server.run)]
            await until(self.address_file.exists)
            yield self
            for task in running:
                task.cancel()

    @asynccontextmanager
    async def client(self, **headers):
        address = self.address
        given = {"Authorization": f"Bearer {address['token']}", **headers}
        async with aiohttp.ClientSession(address["url"], headers={k: v for k, v in given.items() if v is not None}) as session:
            yield session

    async def post(self, value=None, *, data=None, content_type="application/json", **headers):
        """Post once; return (status, answer, headers)."""
        async with self.client(**{"Content-Type": content_type, **headers}) as session:
            sent = json.dumps(value).encode() if data is None else data
            async with session.post("/v1/rollouts", data=sent) as answer:
                return answer.status, await answer.json(), answer.headers

    async def raw(self, *pieces, token=None, lines=()):
        """Send a head and then pieces as they are; return the answer as it comes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.address["url"].rpartition(":")[2]))
        head = ["POST /v1/rollouts HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close", *lines]
        if token is not None:
            head.append(f"Authorization: Bearer {token}")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return await _answer(reader)
        finally:
            writer.close()
            await writer.wait_closed()
