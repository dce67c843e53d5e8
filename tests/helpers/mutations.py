"""Valid things with something wrong in them: a value swapped, a key lost, a byte changed, an end missing."""

import copy
import json

from hypothesis import strategies as st

from headway.errors import HeadwayError

NESTED = "[" * 100_000

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**30, -(2**63), 1e300, -1e300, 0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["\u2028", "\x00", "../../etc/passwd", "/etc/passwd", "a" * 5000, "1" * 5000, "\ud7ff\U0001f600", "nan"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.recursive(st.none(), lambda inner: st.lists(inner, min_size=1, max_size=1), max_leaves=40),
)


def ended(work, *arguments, **named):
    """What a call returns, or the named error that it ends by; anything else that it raises fails the test."""
    try:
        return work(*arguments, **named)
    except HeadwayError as error:
        return error


def is_one_short_line(error, *, longest=1000):
    return "\n" not in str(error) and 0 < len(str(error)) < longest


def places(value, path=()):
    """Every place in a JSON value, as the keys that lead there."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@st.composite
def mutated(draw, value, *, most=3):
    """The value with one to `most` places replaced, removed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(sorted(places(value), key=str)))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "remove", "double"]))
        if how == "replace":
            parent[path[-1]] = draw(junk)
        elif how == "remove":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.append(parent[path[-1]])
        else:
            parent[str(path[-1]) + "_"] = parent[path[-1]]
    return value


@st.composite
def damaged(draw, data):
    """Bytes cut short, changed somewhere, or with something put in."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "nest", "replace"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if how == "cut":
        return data[:at]
    if how == "flip":
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + draw(st.binary(max_size=8)) + data[at:]
    if how == "nest":
        return data[:at] + NESTED.encode() + data[at:]
    return draw(st.binary(max_size=64))


def hostile_json(value):
    """JSON of a mutated value, or damaged JSON of the value itself."""
    text = json.dumps(value).encode()
    return st.one_of(mutated(value).map(lambda wrong: json.dumps(wrong).encode()), damaged(text))
