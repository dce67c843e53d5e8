"""Measures which branches of `headway.rules` the tests in this directory take: `python tests/rules/branches.py`, and `make fuzz`.

A branch is a conditional jump of the bytecode, and both of its ways must be taken: every `if`, every part of an `and` or `or`, every loop
that ends and every one that does not. Ways that lead to `assert_never` cannot be taken and do not count. Prints what is missing and exits 1
if anything is; needs nothing but the standard library and pytest.
"""

import dis
import itertools
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType

import pytest

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "src" / "headway" / "rules"
SLOW = [
    "Histories",
    "histories_reach",
    "small_run",
    "break_nothing",
    "nothing_is_stuck",
    "over_the_bound",
    *(f"leaks[{n}]" for n in range(1, 10)),
]


class Branches:
    """A tracer that looks at instructions of the rules only, and remembers where each conditional jump went on."""

    def __init__(self):
        self.taken = defaultdict(set)
        self._jumps = {}

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(str(RULES)):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._local(jumps(frame.f_code), self.taken[key(frame.f_code)])

    def _local(self, conditional, taken):
        before = None

        def local(frame, event, _):
            nonlocal before
            if event == "opcode":
                if before is not None:
                    taken.add((before, frame.f_lasti))
                before = frame.f_lasti if frame.f_lasti in conditional else None
            return local

        return local


def key(code):
    return code.co_filename, code.co_qualname, code.co_firstlineno


_known = {}


def jumps(code):
    """Return {offset of a conditional jump: (line, the two offsets at which it may go on)}."""
    if code not in _known:
        instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
        following = {one.offset: after.offset for one, after in itertools.pairwise(instructions)}
        line, found = code.co_firstlineno, {}
        for one in instructions:
            line = one.starts_line if type(one.starts_line) is int else getattr(one, "line_number", None) or line
            if one.opname == "FOR_ITER" or "JUMP_IF" in one.opname or "JUMP_FORWARD_IF" in one.opname or "JUMP_BACKWARD_IF" in one.opname:
                found[one.offset] = (line, (following[one.offset], one.argval))
        _known[code] = found
    return _known[code]


def codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def impossible(code, offset):
    """Whether the way that begins at this offset leads to assert_never without a choice."""
    for one in dis.get_instructions(code):
        if one.offset < offset:
            continue
        if one.opname == "JUMP_FORWARD":
            return impossible(code, one.argval)
        if "assert_never" in str(one.argval):
            return True
        if "JUMP" in one.opname or "RETURN" in one.opname:
            return False
    return False


def functions():
    """Return (path, source lines, code) of everything that the rules define, as it is on disk now."""
    found = []
    for path in sorted(RULES.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        module = compile(source, str(path), "exec", dont_inherit=True)
        found += [(path.name, source.splitlines(), code) for code in codes(module) if code is not module]
    return found


def missing(rules, taken):
    for name, source, code in rules:
        for offset, (line, ways) in jumps(code).items():
            for way in ways:
                if (offset, way) not in taken[key(code)] and not impossible(code, way):
                    lost = "never false" if way == ways[1] else "never true"
                    yield f"{name}:{line}: {lost} (or never reached): {source[line - 1].strip()}"


class Profile:
    """Makes hypothesis patient with traced code, and gives it few examples, the same every time."""

    def pytest_configure(self):
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "traced",
            deadline=None,
            max_examples=30,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        settings.load_profile("traced")


def main():
    os.environ["HEADWAY_SEEDS"] = "60"
    rules, branches = functions(), Branches()
    sys.settrace(branches.trace)
    failed = pytest.main(
        ["-q", "-p", "no:cacheprovider", str(HERE), "-k", f"not ({' or '.join(SLOW)})", *sys.argv[1:]], plugins=[Profile()]
    )
    sys.settrace(None)
    lines = list(missing(rules, branches.taken))
    total = 2 * sum(len(jumps(code)) for _, _, code in rules)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"headway.rules: {total - len(lines)} of {total} ways of its branches are taken\n")
    return int(bool(failed or lines))


if __name__ == "__main__":
    sys.exit(main())
