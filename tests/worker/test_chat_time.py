"""Chat templates that write the date, as many do: what messages add is the same whatever the clock does meanwhile."""

import pytest

from headway.errors import ConfigError
from headway.worker.chat import PLACEHOLDER, ChatTemplate

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
BEFORE = [{"role": "user", "content": "q"}]
AFTER = [*BEFORE, {"role": "assistant", "content": PLACEHOLDER}, {"role": "user", "content": "r"}]


def test_a_template_that_writes_the_time_lets_a_history_stand():
    """By the microsecond here; by the day at midnight, with thousands of rollouts in flight."""
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}" + TURNS, {})
    assert [template.added_text(BEFORE, AFTER) for _ in range(20)] == ["<user>r<assistant>"] * 20


def test_a_template_that_writes_earlier_text_otherwise_once_more_follows_is_refused_still():
    template = ChatTemplate("{{ messages | length }}" + TURNS, {})
    with pytest.raises(ConfigError, match="rewrites earlier text when messages follow"):
        template.added_text(BEFORE, AFTER)
