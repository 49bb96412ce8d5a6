"""Chat templates in the formats of published models, and conversations for them."""

import functools
from typing import Any

from tinylm.text.chat_template import ChatTemplate

# As Llama 2: no generation prompt, the end token by name, contents trimmed, the system turn inside of the user's.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As Llama 3: a bos token, headers, an end token that is not the eos token of the tokenizer.
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# As Qwen 2.5 and SmolLM2: ChatML without generation blocks, with tools, and with a system turn that it adds itself.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As Qwen 3: the last answer gets an empty chain of thought, which disappears when the conversation goes on.
QWEN_3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_TOKENS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

System, User, Assistant = ("system", "user", "assistant")


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> ChatTemplate:
    """A template with the special tokens; its process is used by many tests."""
    return ChatTemplate(source, SPECIAL)


def messages(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS = [
    messages((User, "Hello"), (Assistant, "Hi!")),
    messages(
        (System, "Be brief."), (User, "1 + 1?\n"), (Assistant, "2"), (User, "  And é – 你好?"), (Assistant, "你好 é\n")
    ),
    messages((User, "a"), (Assistant, "b  "), (User, "c"), (Assistant, "d"), (User, "e"), (Assistant, "f, g")),
]
