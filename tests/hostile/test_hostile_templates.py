# ruff: noqa: E501 -- templates are written as they come
"""A chat template is a program that came with a model. Hostile ones reach nothing and run no code."""

import contextlib
import json

import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.worker.chat import MAX_TEMPLATE_CHARACTERS, ChatTemplate, read_chat_template

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
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ environment.call }}{{ tick() }}",
    "{{ messages|pprint|xmlattr }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for x in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
]


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
