"""A jinja environment for templates that nobody has read: sandboxed, and limited in what one rendering may do and hold.

jinja's sandbox keeps a template from attributes that lead into Python. It does not keep it from running for ever or from filling the
memory. Here each rendering has a budget of steps and of characters, and everything that could outgrow what it was made from is weighed
before it is made: loops by their length, texts and lists by their unfolded size (a list that holds another twice holds it twice). What
cannot be weighed (formats with widths, `lipsum`, most filters that pad) is not there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

STEPS = 400_000  # of a rendering: a second or two at worst
CHARACTERS = 16 * 1024**2  # beside SHARE times those of the messages
SHARE = 64
MAX_TEMPLATE_CHARACTERS = 1024**2
_MOST_BITS = 4096  # of a whole number
_WIDEST_INDENT = 32

_LOOKING = frozenset(  # filters that look at each item once, and make no text
    {"count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map", "max", "min", "reject", "rejectattr"}
    | {"reverse", "select", "selectattr", "sort", "unique"}
)
_WRITING = frozenset(
    {"abs", "capitalize", "float", "indent", "int", "join", "lower", "replace", "round", "string", "title", "tojson", "trim", "upper"}
)
_COMPARING = frozenset(  # tests
    {"==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", ">", "gt", "greaterthan", "<=", "le", ">=", "ge", "in", "lower", "upper"}
)
_TEXT_METHODS = frozenset(
    {"capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower"}
    | {
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
    }
    | {"rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"}
)


class OverBudget(jinja2.TemplateError):
    """A template does more than any chat needs."""


class Meter:
    """What is left of one rendering's budget."""

    def __init__(self, steps: int = STEPS, characters: int = CHARACTERS) -> None:
        self._steps = steps
        self._characters = characters

    def spend(self, steps: int, characters: int = 0) -> None:
        """Take from the budget. Raises OverBudget."""
        self._steps -= steps
        self._characters -= characters
        if self._steps < 0 or self._characters < 0:
            raise OverBudget("it does more than any chat needs")

    def weigh(self, value: Any) -> int:
        """Spend what a value amounts to, unfolded, and return its characters."""
        total, pending = 0, [value]
        while pending:
            item = pending.pop()
            size, steps = 1, 1
            if isinstance(item, str):
                size = len(item)
            elif isinstance(item, int):
                size = item.bit_length() // 3 + 1
            elif isinstance(item, (list, tuple, Mapping)):
                steps += len(item)
            self.spend(steps, size)
            total += size
            if isinstance(item, Mapping):
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                pending += item
        return total


def _sized(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


class _Instrument(jinja2.visitor.NodeTransformer):
    """Puts a weighing before whatever repeats, joins, builds or compares; its methods are named as jinja names its nodes."""

    def visit_For(self, node: jinja2.nodes.For) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return self._body(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> Any:  # noqa: N802
        return self._body(self.generic_visit(node))

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> Any:  # noqa: N802
        return self._body(self.generic_visit(node))

    def visit_Block(self, node: jinja2.nodes.Block) -> Any:  # noqa: N802
        return self._body(self.generic_visit(node))

    def visit_Concat(self, node: jinja2.nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenated", *node.nodes)

    def visit_List(self, node: jinja2.nodes.List) -> Any:  # noqa: N802
        return _call("weighed", self.generic_visit(node))

    def visit_Dict(self, node: jinja2.nodes.Dict) -> Any:  # noqa: N802
        return _call("weighed", self.generic_visit(node))

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> Any:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("weighed", node)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.expr = _call("compared", node.expr)
        for operand in node.ops:
            if operand.op in {"in", "notin"}:
                operand.expr = _call("searched", operand.expr)
        return node

    @staticmethod
    def _body(node: Any) -> Any:
        written = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        tick = _call("tick", jinja2.nodes.Const(written))
        node.body.insert(0, jinja2.nodes.ExprStmt(tick, lineno=node.lineno))
        return node


def _call(name: str, *arguments: Any) -> jinja2.nodes.Call:
    # by the environment: a template can give no other meaning to it
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=1)


@jinja2.pass_context
def _weigh_output(context: jinja2.runtime.Context, value: Any) -> Any:
    return context.environment.weighed(value)  # type: ignore[attr-defined]  # ours


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Renders within `meter`, which `ChatTemplate` renews for each rendering."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, *, to_json: Callable[..., str], **options: Any) -> None:
        super().__init__(optimized=False, finalize=_weigh_output, **options)
        self.meter = Meter()
        known: Any = {**self.filters, "tojson": to_json}
        self.filters = {name: self._limited(name, known[name]) for name in _LOOKING | _WRITING}
        self.filters["safe"] = lambda text: text  # nothing is escaped
        tests: Any = {**self.tests}
        self.tests = {name: self._limited(name, test) if name in _COMPARING else test for name, test in tests.items()}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    # ------------------------------------------------------------------------------------------- what an instrumented template calls

    def tick(self, characters: int) -> str:
        """Spend a step, and the characters that stand in the body about to be rendered."""
        self.meter.spend(1, characters)
        return ""

    def counted(self, items: Any) -> Any:
        """Return what is looped over, its steps spent."""
        if not isinstance(items, Iterator):
            self.meter.spend(_sized(items))
            return items
        return self._drained(items)

    def weighed(self, value: Any) -> Any:
        """Return a value that is to be built or written, weighed."""
        self.meter.weigh(value)
        return value

    compared = weighed

    def searched(self, value: Any) -> Any:
        """Return what something is looked for in, weighed."""
        value = self._drained(value) if isinstance(value, Iterator) else value
        self.meter.weigh(list(value) if isinstance(value, Mapping) else value)
        return value

    def concatenated(self, *parts: Any) -> str:
        """Return the parts as one text."""
        self.meter.weigh(parts)
        return "".join(map(str, parts))

    def _drained(self, items: Iterable[Any]) -> list[Any]:
        taken = []
        for item in items:
            self.meter.spend(1)
            taken.append(item)
        return taken

    # ----------------------------------------------------------------------------------------------------------- jinja's own hooks

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute +, *, % and ** of what was weighed."""
        if operator == "%" and isinstance(left, str):
            raise OverBudget("formats by % are not rendered")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MOST_BITS:
            raise OverBudget("a number has more digits than any chat needs")
        weight = self.meter.weigh((left, right))
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    self.meter.spend(_sized(sequence) * max(0, times) // 8, weight * max(0, times))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_BITS:
                raise OverBudget("a number has more digits than any chat needs")
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscribe by what takes no time to find."""
        if isinstance(argument, (list, tuple, Mapping)):
            raise OverBudget("a key is no text and no number")
        if isinstance(argument, slice):
            self.meter.spend(_sized(obj) // 8)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Leave `format` to `is_safe_attribute`, which has none of it."""
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether an attribute leads nowhere; of texts, only methods whose result can be foretold."""
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox allows; methods of texts and lists are weighed."""
        self.meter.spend(1)
        owner = getattr(obj, "__self__", None) if isinstance(obj, types.BuiltinMethodType) else None
        if isinstance(owner, (str, list, tuple)):
            args = tuple(self._drained(each) if isinstance(each, Iterator) else each for each in args)
            self._foretell(obj.__name__, owner, *args)
        return super().call(context, obj, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------------ filters and methods

    def _foretell(self, name: str, value: Any, *args: Any) -> None:
        """Spend what a filter or a method of a text makes of its arguments."""
        weight = self.meter.weigh((value, *args))
        text = value if isinstance(value, str) else ""
        if name == "replace" and len(args) > 1:
            new = str(args[1])
            self.meter.spend(1, text.count(str(args[0])) * len(new) if text else weight * len(new))
        elif name == "join":
            between = value if text else "".join(map(str, args[:1]))
            items = args[0] if text and args else value
            self.meter.spend(_sized(items), _sized(items) * len(between))
        elif name in {"split", "rsplit", "splitlines"}:
            self.meter.spend(len(text) // 8 if not args or args[0] is None else text.count(str(args[0])))
        elif name in {"indent", "tojson"}:
            self._foretell_indented(weight, *args)

    def _foretell_indented(self, weight: int, *args: Any) -> None:
        for width in args:
            wide = len(width) if isinstance(width, str) else width or 0
            if wide > _WIDEST_INDENT:
                raise OverBudget(f"it indents by {wide}")
            self.meter.spend(1, weight * int(wide))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or a test that weighs its arguments first."""
        takes_place = hasattr(function, "jinja_pass_arg")  # the first argument is jinja's

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            first, given = args[:takes_place], args[takes_place:]
            given = tuple(self._drained(each) if isinstance(each, Iterator) else each for each in given)
            if name in _LOOKING:
                self.meter.spend(sum(map(_sized, given)))
            else:
                self._foretell(name, *given, *kwargs.values())
            return function(*first, *given, **kwargs)

        return limited
