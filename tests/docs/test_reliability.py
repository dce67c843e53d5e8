"""The table of docs/reliability.md and the tests of fault cases agree: every case has its test, or says what it waits for."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-P]\d\d) \| (.+?) \| (.*?) \| (.+?) \|$", re.MULTILINE)
CASES = 101  # of the collection that headway was started with


def rows():
    return ROW.findall((ROOT / "docs" / "reliability.md").read_text())


@functools.cache
def cases_tested():
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (match := re.match(r"test_((?:[A-P]\d\d_)+)", node.name)):
                for case in match[1].strip("_").split("_"):
                    found.setdefault(case, set()).add(node.name)
    return found


def test_every_case_is_in_the_table_once():
    names = [case for case, *_ in rows()]
    assert len(names) == len(set(names)) == CASES


def test_the_table_names_the_tests_that_there_are():
    for case, _, tests, status in rows():
        named = set(re.findall(r"`(test_\w+)`", tests))
        assert named == cases_tested().get(case, set()), case
        assert named or status.startswith("waits for"), case


def test_no_test_of_a_case_is_missing_from_the_table():
    assert cases_tested().keys() <= {case for case, *_ in rows()}
