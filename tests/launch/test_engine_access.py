"""A login in engine.urls is sent to that engine, also where the address says what is spoken there."""

import pytest

from headway.adapters.engines.credentials import Credentials
from headway.launch.access import engine_access
from headway.settings import Config, EngineSection, EnvironmentSection, PromptsSection


@pytest.mark.parametrize("prefix", ["", "sglang+", "vllm+"])
def test_a_login_goes_with_the_address_that_it_stands_in(prefix):
    engine = EngineSection(launch="none", urls=(f"{prefix}http://ann:sesame@engines.example:8000/a",))
    config = Config(prompts=PromptsSection(source="p.jsonl"), environment=EnvironmentSection(entry="a:b"), engine=engine)
    with engine_access(config):
        given = Credentials()
        assert given.authorization("http://engines.example:8000/a/generate").startswith("Basic ")
        assert given.authorization("http://other.example:8000") == ""
