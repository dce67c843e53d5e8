"""What a real vLLM makes of a completions request, where the model's generation_config.json has defaults of its own: as for most models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from headway.adapters.engines.generation import Ask
from headway.adapters.engines.vllm.completions import encode_request

DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
}
MADE_BY_VLLM = """
import json, sys
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
defaults = json.loads(sys.argv[2])
made = CompletionRequest(**json.loads(sys.argv[1])).to_sampling_params(8, defaults)
print(json.dumps({name: getattr(made, name) for name in defaults}))
"""


def test_a_run_samples_as_it_says_and_not_as_the_model_suggests(python: Path) -> None:
    request = encode_request(Ask("r", [1], max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, seed=1))
    said = subprocess.run(
        [str(python), "-c", MADE_BY_VLLM, request.decode(), json.dumps(DEFAULTS)], capture_output=True, check=True, text=True, timeout=300
    ).stdout
    made = json.loads(said.splitlines()[-1])
    assert made == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
