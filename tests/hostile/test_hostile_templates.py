# ruff: noqa: E501 -- templates are written as they come
"""A chat template is a program that came with a model. Hostile ones reach nothing, run no code, end soon and hold little memory."""

import contextlib
import json
import resource
import time

import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.worker.chat import ChatTemplate, read_chat_template
from headway.worker.template_limits import CHARACTERS, MAX_TEMPLATE_CHARACTERS, Meter, OverBudget

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>a</think>b"}, {"role": "user", "content": "1,2"}]
TOOLS = [{"role": "tool", "content": "x", "tool_calls": [{"name": "f", "arguments": {"a": [1, "é"]}}]}]

REACHES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ messages['__class__']['__base__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ range.__self__ }}",
    "{{ (1).__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ lipsum(n=5) }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ environment.call }}{{ tick() }}",
    "{{ messages|pprint|xmlattr }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for x in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
]

RUNS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops over lists": "{% set l = range(100000)|list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
    "loops that filter all out": "{% for a in range(100000) %}{% for b in range(100000) if b < 0 %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a doubling macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a doubling block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{{ loop(range(9)) }}{% endfor %}",
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a number times a text": "{{ 10**10 * 'a' }}",
    "a list times a number": "{{ ([1] * 10**10)|length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "a doubled text": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a doubled text by ~": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled block": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a doubled tuple": "{% set ns = namespace(l=(1,)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ {ns.l: 1} }}",
    "a doubled dict": "{% set ns = namespace(l={}) %}{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l|tojson }}",
    "twins compared": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width by a filter": "{{ '%1000000000d'|format(1) }}",
    "a width by a method": "{{ '{:>1000000000}'.format(1) }}",
    "centred": "{{ 'a'|center(1000000000) }}",
    "justified": "{{ 'a'.ljust(1000000000) }}",
    "filled with zeros": "{{ '1'.zfill(1000000000) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10000000) }}",
    "indented": "{{ 'a\nb'|indent(1000000000) }}",
    "indented JSON": "{{ [[1]]|tojson(indent=1000000000) }}",
    "replaced": "{% set s = 'a' * 10000 %}{{ s.replace('a', s).replace('a', s) }}",
    "replaced by a filter": "{% set s = 'a' * 10000 %}{{ s|replace('a', s)|replace('a', s) }}",
    "joined": "{% set s = 'a' * 100000 %}{{ (range(100000)|list)|join(s) }}",
    "joined by a method": "{% set s = 'a' * 100000 %}{{ s.join('b' * 100000) }}",
    "joined copies": "{% set s = 'a' * 100000 %}{{ ([s] * 100000)|join }}",
    "split": "{% set s = 'a,' * 4000000 %}{% for i in range(100) %}{% set x = s.split(',') %}{% endfor %}",
    "mapped": "{% for i in range(10000) %}{% set x = range(100000)|map('string')|list %}{% endfor %}",
    "sorted": "{% for i in range(10000) %}{% set x = range(100000)|sort|list %}{% endfor %}",
    "written again and again": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "looked for": "{% set s = 'a' * 100000 %}{% set l = [s + 'b'] * 100 %}{% for i in range(100000) %}{{ s + 'c' in l }}{% endfor %}",
    "a deep list": "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
}


def outcome(source, messages):
    """What a template writes, or the error that it ends by."""
    try:
        return ChatTemplate(source, {}).render(messages, add_generation_prompt=True)
    except ConfigError as error:
        return error


def is_one_short_line(error):
    return "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize("source", REACHES)
def test_a_hostile_template_reaches_nothing_of_python(source):
    messages = [dict(message) for message in MESSAGES]
    written = outcome(source, messages)
    assert is_one_short_line(written) if isinstance(written, ConfigError) else not written.strip()  # a name that leads nowhere is empty
    assert messages == MESSAGES


@pytest.mark.parametrize("attack", RUNS)
def test_a_hostile_template_ends_soon_and_holds_little(attack):
    started, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = outcome(RUNS[attack], MESSAGES)
    assert isinstance(error, ConfigError)
    assert is_one_short_line(error)
    assert time.process_time() - started < 20  # two seconds, on a machine that is not shared
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 300 * 1024  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "(" * 100_000,
        "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
        "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
        "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
        "{% for a in b %}" * 100 + "{% endfor %}" * 100,
        "{{ " + "-" * 100_000 + "1 }}",
        "{% nothing %}",
        "{{ x|unheard_of }}",
        "{{ x is unheard_of }}",
        "x" * (MAX_TEMPLATE_CHARACTERS + 1),
        "{{ \ud800 }}",
    ],
    ids=lambda source: source[:20].encode(errors="replace").decode(),
)
def test_a_template_that_cannot_be_compiled_is_refused_by_name(source):
    ended = outcome(source, [])
    assert isinstance(ended, str) or is_one_short_line(ended)


def test_what_a_template_says_against_messages_is_one_short_line():
    loud = ChatTemplate("{{ raise_exception('no\nno ' * 100000) }}", {})
    with pytest.raises(ConfigError, match="refuses these messages: no no no") as refused:
        loud.render([], add_generation_prompt=True)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "content", ["[1", '{"chat_template": 3}', '{"chat_template": [{"name": "x"}]}', '{"chat_template": [1]}', "[" * 99999]
)
def test_a_tokenizer_config_that_is_no_such_thing_is_refused_by_name_or_has_no_template(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with contextlib.suppress(ConfigError):
        assert read_chat_template(tmp_path) is None


ORDINARY = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content']|trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ messages[::-1]|map(attribute='role')|join(', ') }}{{ messages|length - 1 }}{{ '%d' }}",
    (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not m.content.startswith('x') %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.last + 1 }}"
    ),
    (
        "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}"
        "{{ m.content.rstrip() ~ '|' ~ loop.index }}{% endif %}{% endfor %}"
    ),
    "{% for m in messages if m.role in ['user', 'tool'] %}{{ m|tojson }}{{ m|tojson(indent=4) }}{% endfor %}",
    "{% macro show(m, sep=' ') %}{{ m.role + sep + m.content }}{% endmacro %}{% for m in messages %}{{ show(m, sep='>') }}{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ key }}={{ value|upper }}{{ ',' if not loop.last }}{% endfor %}",
    (
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}{{ c.arguments|items|list }}"
        "{{ c.arguments is mapping }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "{% set system %}{{ messages[0].content }}{% endset %}{{ system|replace('h', 'H')|title }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{% for i in range(10) %}{% if i == 3 %}{% break %}{% endif %}{{ 'ab' * i }}{{ i ** 2 % 3 }}{{ i // 2 }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{% if m.children %}{{ loop(m.children) }}{% endif %}{% endfor %}{{ messages[0].get('x', 1) }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}{{ messages|first }}{{ (messages|last).role|default('z') }}{{ nothing }}",
]


def _to_json(value, *, ensure_ascii=False, indent=None):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@pytest.mark.parametrize("source", ORDINARY)
def test_an_ordinary_template_writes_what_jinja_alone_writes(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = _to_json
    for messages in (MESSAGES, MESSAGES + TOOLS, MESSAGES * 40):
        expected = plain.from_string(source).render(messages=messages, add_generation_prompt=True, bos_token="<s>")
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True) == expected


def test_long_conversations_are_within_the_budget():
    messages = [{"role": "user", "content": "word " * 20_000} for _ in range(100)]
    for source in ORDINARY:
        assert isinstance(ChatTemplate(source, {}).render(messages, add_generation_prompt=True), str)


nested = st.recursive(
    st.text(max_size=5) | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3) | st.tuples(inner), max_leaves=9
)


@given(nested)
def test_what_is_weighed_is_at_least_its_characters(value):
    def characters(item):
        return len(item) if isinstance(item, str) else sum(map(characters, item)) if isinstance(item, (list, tuple)) else 0

    assert Meter().weigh(value) >= characters(value)


def test_a_budget_ends():
    meter = Meter(steps=5)
    with pytest.raises(OverBudget):
        meter.weigh([1] * 6)
    with pytest.raises(OverBudget):
        Meter().weigh(["x" * (CHARACTERS // 2)] * 3)


pieces = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if messages %}",
        "{% else %}",
        "{% endif %}",
        "{{ messages }}",
        "{{ m.content * 9 }}",
        "{%",
        "}}",
        "{% set x = messages[0] %}",
        "{{ x|tojson }}",
        "{{ x.y.z }}",
        "{{ x[1:] }}",
        "{{ x + 1 }}",
        "text",
        "{# #}",
        "{% generation %}",
        "{{ 1 / 0 }}",
        "{% macro f(a) %}",
        "{{ f(1) }}",
        "{% endmacro %}",
        "{{ x|join|upper|int }}",
        "{{ x is in messages }}",
        "{{ x ~ messages }}",
        "{{ -x }}",
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(pieces, max_size=9).map("".join) | st.text(max_size=30))
def test_any_template_renders_or_is_refused_by_name(source):
    ended = outcome(source, MESSAGES)
    assert isinstance(ended, str) or is_one_short_line(ended)
