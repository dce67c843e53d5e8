"""Prompt sources: what is read, in which order, under which ids, and what is refused."""

import asyncio
import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.adapters.prompts import open_source
from headway.errors import ConfigError, PromptError
from headway.settings import PromptsSection
from headway.types import DataPosition, Prompt


def source(base: Path, name: str, *, seed: int = 0, **options):
    return open_source(PromptsSection(source=name, **options), base, seed)


async def take(prompts, count: int) -> list[Prompt]:
    taken: list[Prompt] = []
    async for prompt in prompts:
        taken.append(prompt)
        if len(taken) == count:
            break
    return taken


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def write_jsonl(base: Path, rows, name: str = "prompts.jsonl") -> None:
    (base / name).write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"\n")


def write_module(base: Path, name: str, code: str) -> None:
    (base / f"{name}.py").write_text(code)


async def test_each_epoch_is_shuffled_anew_and_every_run_alike(tmp_path):
    write_jsonl(tmp_path, [{"id": f"p{number}"} for number in range(8)])
    first = await take(source(tmp_path, "prompts.jsonl", seed=4), 40)
    epochs = [ids(first[start : start + 8]) for start in range(0, 40, 8)]
    assert all(sorted(epoch) == [f"p{number}" for number in range(8)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert [prompt.epoch for prompt in first] == [number // 8 for number in range(40)]
    assert ids(await take(source(tmp_path, "prompts.jsonl", seed=4), 40)) == ids(first)
    assert ids(await take(source(tmp_path, "prompts.jsonl", seed=5), 40)) != ids(first)


async def test_epochs_end_exactly_and_order_is_kept_without_shuffling(tmp_path):
    write_jsonl(tmp_path, [{"q": 1}, {"q": 2}, {"q": 3}])
    prompts = await take(source(tmp_path, "prompts.jsonl", shuffle=False, epochs=2), 100)
    assert prompts == [Prompt(str(number), epoch, {"q": number + 1}) for epoch in range(2) for number in range(3)]


async def test_text_of_any_character_is_read_as_it_was_written(tmp_path):
    texts = ["\u2028", "\u2029", "\u0085", "\v\f", "\x1c\x1e", "\0", "\r", "😀", "a\nb"]
    write_jsonl(tmp_path, [{"prompt": text} for text in texts])
    prompts = await take(source(tmp_path, "prompts.jsonl", shuffle=False, epochs=1), 100)
    assert [prompt.fields["prompt"] for prompt in prompts] == texts


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"id": 1}\n{"id": 1}\n', 'rows 0 and 1 of prompts.jsonl have the same id "1"'),
        (b'{"id": 1}\n{"id": "1"}\n', "have the same id"),
        (b'{"q": 0}\n{"id": 0}\n', "have the same id"),
        (b'{"id": 1}\n{"id": 2\n', r"prompts\.jsonl:2: each line must be one JSON object"),
        (b"[1]\n", r"prompts\.jsonl:1: each line must be one JSON object"),
        (b'{"x": NaN}\n', "each line must be one JSON object"),
        (b'{"x": "\xff"}\n', "each line must be one JSON object"),
        (b'{"id": true}\n', "an id is a text or an integer"),
        (b'{"id": 1.5}\n', "an id is a text or an integer"),
    ],
)
def test_a_file_that_is_no_list_of_prompts_is_refused_with_the_place(tmp_path, content, says):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        source(tmp_path, "prompts.jsonl")


def test_what_is_not_there_or_holds_no_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        source(tmp_path, "nothing.jsonl")
    (tmp_path / "readme.txt").write_text("hello")
    for name in ("readme.txt", "."):
        with pytest.raises(ConfigError, match="holds no prompts"):
            source(tmp_path, name)


def write_arrow(base: Path, kind: str) -> str:
    table = pa.table({"id": ["a", "b", "c"], "prompt": [[{"role": "user", "content": f"q{number}"}] for number in range(3)]})
    base = base / "data"
    base.mkdir()
    parts = [table.slice(0, 2), table.slice(2)]
    for number, part in enumerate(parts):
        match kind:
            case "parquet":
                pq.write_table(part, base / f"part-{number}.parquet")
            case "arrow file":
                with pa.OSFile(str(base / f"part-{number}.arrow"), "wb") as file, pa.ipc.new_file(file, part.schema) as writer:
                    writer.write_table(part)
            case "arrow stream":
                with pa.OSFile(str(base / f"data-{number}.arrow"), "wb") as file, pa.ipc.new_stream(file, part.schema) as writer:
                    writer.write_table(part)
                (base / "state.json").write_text("{}")
    return "data"


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
async def test_data_sets_of_columns_give_rows(tmp_path, kind):
    name = write_arrow(tmp_path, kind)
    prompts = await take(source(tmp_path, name, shuffle=False, epochs=1), 10)
    assert ids(prompts) == ["a", "b", "c"]
    assert prompts[2].fields == {"id": "c", "prompt": [{"role": "user", "content": "q2"}]}


async def test_a_single_parquet_file_is_a_data_set(tmp_path):
    write_arrow(tmp_path, "parquet")
    assert ids(await take(source(tmp_path, "data/part-0.parquet", shuffle=False, epochs=1), 10)) == ["a", "b"]


def test_a_damaged_data_set_is_refused_by_file(tmp_path):
    write_arrow(tmp_path, "parquet")
    (tmp_path / "data" / "part-1.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"part-1\.parquet cannot be read"):
        source(tmp_path, "data")


async def test_a_function_may_give_a_list(tmp_path):
    write_module(tmp_path, "prompts_list", "def make(): return [{'id': n} for n in range(5)]")
    prompts = await take(source(tmp_path, "prompts_list:make", epochs=2), 100)
    assert len(prompts) == 10
    assert ids(prompts[:5]) != ids(prompts[5:])


async def test_an_endless_generator_is_read_one_row_at_a_time(tmp_path):
    code = """
from itertools import count
made = []
def make():
    for number in count():
        made.append(number)
        yield {"id": f"task-{number}", "n": number}
"""
    write_module(tmp_path, "prompts_endless", code)
    prompts = source(tmp_path, "prompts_endless:make", shuffle=False)
    assert ids(await take(prompts, 5)) == [f"task-{number}" for number in range(5)]
    import prompts_endless  # type: ignore[import-not-found]

    assert prompts_endless.made == list(range(5))


async def test_a_generator_function_is_called_again_for_each_epoch(tmp_path):
    write_module(tmp_path, "prompts_twice", "def make():\n    yield {'n': 1}\n    yield {'n': 2}")
    prompts = await take(source(tmp_path, "prompts_twice:make", shuffle=False, epochs=3), 100)
    assert [(prompt.id, prompt.epoch) for prompt in prompts] == [(str(n), epoch) for epoch in range(3) for n in range(2)]


def test_a_stream_that_is_to_be_shuffled_is_refused(tmp_path):
    write_module(tmp_path, "prompts_stream", "def make():\n    yield {'n': 1}")
    with pytest.raises(ConfigError, match=r"set prompts\.shuffle = false"):
        source(tmp_path, "prompts_stream:make")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def make(): return []", "is empty"),
        ("def make(): return iter([])", "is empty"),
        ("def make(): return 5", "must be a list or an iterator of dicts"),
        ("def make(): return {'id': 1}", "must be a list or an iterator of dicts"),
        ("def make(): return ['a']", "each row must be a dict"),
        ("def make(): return iter(['a'])", "each row must be a dict"),
        ("def make(): raise ValueError('no data')", "raised ValueError: no data"),
        ("def make():\n    raise ValueError('no row')\n    yield", "raised ValueError: no row"),
        ("def make(): return [{'id': 'a', 'x': object()}]", "row 0 of .* cannot be sent to a worker: .*object"),
        ("def make(): yield {'id': 'a', 'x': 2 ** 70}", "row 0 of .* cannot be sent to a worker"),
        ("make = 1 / 0", "does not import: ZeroDivisionError"),
        ("other = 1", 'has no "make"'),
    ],
)
def test_a_function_that_gives_no_prompts_is_refused_at_the_start(tmp_path, code, says):
    name = f"prompts_{abs(hash(code))}"
    write_module(tmp_path, name, code)
    with pytest.raises(ConfigError, match=says):
        source(tmp_path, f"{name}:make", shuffle=False)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("rows = iter([{'n': 1}])", r"used up .* set prompts\.epochs = 1"),
        ("used = iter([{'n': 1}])\ndef rows(): return (row for row in used)", "is empty in epoch 1"),
        ("def rows():\n    yield {'id': 1}\n    yield {'id': 1}", "have the same id"),
        ("def rows():\n    yield {'id': 1}\n    raise OSError('disk')", "raised OSError: disk"),
        ("def rows():\n    yield {'id': 1}\n    yield {'id': 2, 'x': {1}.union}", "row 1 of .* cannot be sent to a worker"),
        ("rows = [{'id': 1}, {'id': 2, 'x': object()}]", "row 1 of .* cannot be sent to a worker"),
    ],
)
async def test_a_stream_that_breaks_later_is_a_prompt_error(tmp_path, code, says):
    name = f"prompts_{abs(hash(code))}"
    write_module(tmp_path, name, code)
    with pytest.raises(PromptError, match=says):
        await take(source(tmp_path, f"{name}:rows", shuffle=False), 10)


async def test_a_generator_that_blocks_does_not_stall_the_loop(tmp_path):
    code = """
import threading
free = threading.Event()
def make():
    yield {"n": 0}
    assert free.wait(120)
    yield {"n": 1}
"""
    write_module(tmp_path, "prompts_blocking", code)
    task = asyncio.create_task(take(source(tmp_path, "prompts_blocking:make", shuffle=False, epochs=1), 10))
    for _ in range(5):
        await asyncio.sleep(0)
    import prompts_blocking  # type: ignore[import-not-found]

    prompts_blocking.free.set()
    assert len(await task) == 2


def test_a_generator_that_never_returns_does_not_hold_the_loop_from_closing(tmp_path):
    code = """
import threading
waiting = threading.Event()
def make():
    yield {"n": 0}
    waiting.set()
    threading.Event().wait()
"""
    write_module(tmp_path, "prompts_stuck", code)

    async def leave_it():
        import prompts_stuck  # type: ignore[import-not-found]

        task = asyncio.create_task(take(prompts, 2))
        await asyncio.to_thread(prompts_stuck.waiting.wait)
        task.cancel()
        await asyncio.wait((task,))

    prompts = source(tmp_path, "prompts_stuck:make", shuffle=False)
    asyncio.run(leave_it())


def test_examples_give_stable_unique_ids():
    examples = Path(__file__).parents[2] / "examples"
    import importlib.util

    for name, count in (("guess", 10), ("copy", 720)):
        spec = importlib.util.spec_from_file_location(f"{name}_environment", examples / name / "environment.py")
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rows = module.prompts()
        assert len({row["id"] for row in islice(rows, None)}) == count == len(rows)


# ---- a run that is taken up again --------------------------------------------------------------------------------------------------


ROWS = "def rows():\n    return [{'id': f'p{number}', 'q': number} for number in range(6)]\n"
STREAM = "def rows():\n    for number in range(6):\n        yield {'id': f'p{number}', 'q': number}\n"
ONE_SHOT = "rows = iter([{'id': f'p{number}', 'q': number} for number in range(6)])\n"


def opened(base, code, **options):
    name = f"prompts_{abs(hash((str(base), code)))}"
    write_module(base, name, code)
    return source(base, f"{name}:rows", **options)


@pytest.mark.parametrize("code", [ROWS, STREAM])
async def test_what_is_left_comes_by_id_with_what_waits_before_the_rest_and_each_once(tmp_path, code):
    prompts = opened(tmp_path, code, shuffle=False, epochs=3)
    position = DataPosition(1, frozenset({"p0", "p1", "p3", "gone"}), {("p4", 0): 2, ("p1", 1): 1})
    left = await take(prompts.after(position), 100)
    assert [(prompt.id, prompt.epoch, prompt.tries) for prompt in left] == [
        ("p4", 0, 2),
        ("p1", 1, 1),
        ("p2", 1, 0),
        ("p4", 1, 0),
        ("p5", 1, 0),
        *((f"p{number}", 2, 0) for number in range(6)),
    ]
    assert left[0].fields == {"id": "p4", "q": 4}


@pytest.mark.parametrize("code", [ROWS, STREAM])
async def test_what_waits_in_an_epoch_that_the_config_no_longer_has_is_still_tried(tmp_path, code):
    prompts = opened(tmp_path, code, shuffle=False, epochs=1)
    left = await take(prompts.after(DataPosition(2, frozenset({"p0", "p1"}), {("p1", 2): 1})), 100)
    assert [(prompt.id, prompt.epoch) for prompt in left] == [("p1", 2)]


async def test_what_is_left_of_a_shuffled_epoch_keeps_its_order_whatever_came_in_between(tmp_path):
    write_jsonl(tmp_path, [{"id": f"p{number}"} for number in range(20)])
    whole = ids(await take(source(tmp_path, "prompts.jsonl", seed=3, epochs=1), 100))
    left = await take(source(tmp_path, "prompts.jsonl", seed=3, epochs=1).after(DataPosition(0, frozenset(whole[:7] + whole[9:11]))), 100)
    assert ids(left) == whole[7:9] + whole[11:]


@pytest.mark.parametrize("code", [ROWS, STREAM, ONE_SHOT])
async def test_prompts_are_found_by_id_and_epoch_and_what_is_gone_is_not(tmp_path, code):
    prompts = opened(tmp_path, code, shuffle=False, epochs=1)
    found = await prompts.find({("p2", 0), ("p4", 0), ("gone", 0)})
    assert found == {("p2", 0): Prompt("p2", 0, {"id": "p2", "q": 2}), ("p4", 0): Prompt("p4", 0, {"id": "p4", "q": 4})}
    assert ids(await take(prompts, 100)) == [f"p{number}" for number in range(6)], "what looked them up has used nothing up"


async def test_an_endless_stream_is_not_searched_for_ever(tmp_path):
    code = "from itertools import count\ndef rows():\n    for number in count():\n        yield {'id': number}\n"
    prompts = opened(tmp_path, code, shuffle=False)
    found = await prompts.find({("30000", 0), ("60000", 0), ("gone", 0)})
    assert set(found) == {("30000", 0), ("60000", 0)}
    left = await take(prompts.after(DataPosition(0, frozenset(str(number) for number in range(40_000)))), 2)
    assert ids(left) == ["40000", "40001"]


async def test_a_stream_in_which_an_id_comes_twice_fails_while_it_is_read_for_what_is_left(tmp_path):
    code = "def rows():\n    yield from ({'id': name} for name in ['a', 'b', 'a'])\n"
    prompts = opened(tmp_path, code, shuffle=False, epochs=1)
    with pytest.raises(PromptError, match="same id"):
        await take(prompts.after(DataPosition(0, frozenset({"a", "b"}))), 10)
