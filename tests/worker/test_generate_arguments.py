"""What an environment gives to `generate`: numbers of any kind that are numbers, and none that an engine would take for something else."""

import math

import numpy as np
import pytest
from scripted_engine import Tokens

from headway import Outcome
from headway.types import Rollout


async def test_numbers_of_numpy_are_numbers(bench):
    async def environment(prompt, policy):
        talk = await policy.open(np.array([5]))
        await talk.generate(stop=list(np.array([77])), max_tokens=np.array([3])[0], temperature=np.array([0.5])[0])
        return Outcome(1.0)

    async with bench(environment, Tokens([30, 77])) as b:
        rollout = await b.attempt()
    assert isinstance(rollout, Rollout), rollout
    sampling = b.engine.requests[0]["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["max_tokens"], sampling["temperature"]) == ([77], 3, 0.5)


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
async def test_a_temperature_that_is_none_is_refused_before_it_is_sent(bench, temperature):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        with pytest.raises(ValueError, match="temperature is"):
            await talk.generate(temperature=temperature)
        await talk.generate()
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        assert isinstance(await b.attempt(), Rollout)
