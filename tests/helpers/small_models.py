"""Tokenizer directories for tests: what a worker needs of a model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "ab"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, *, chat_template: str = "", adds_bos: bool = False) -> Path:
    """Write a tokenizer of characters, in which "ab" is one token too: the ids of "a" and "b" do not survive decoding and encoding."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": {"content": "<bos>"}} | ({"chat_template": chat_template} if chat_template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def ids_of(text: str) -> list[int]:
    """Return the ids of a text's characters; "ab" only where two characters are given as one."""
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


BOS, EOS, IM_START, IM_END = 1, 2, 3, 4
AB = len(SPECIAL) + CHARACTERS.index("ab")
