"""The Modelfile of ollama beside a GGUF file: story.Modelfile for story.gguf."""

from pathlib import Path

from tinylm.errors import UsageError
from tinylm.formats.imported import ForeignModel
from tinylm.system.files import is_unicode

SUFFIX = ".Modelfile"  # after the name of the model, so that a folder can hold several
CHATML_TURN = "<|im_start|>"
CHATML = """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def modelfile_path(gguf: Path) -> Path:
    """The path of the Modelfile of a GGUF file."""
    return gguf.with_suffix(SUFFIX)


def check_name(gguf: Path) -> None:
    """Raise UsageError if a Modelfile cannot contain the name of the GGUF file."""
    if "\n" in gguf.name or not is_unicode(gguf.name):
        raise UsageError("The name of a GGUF file must be UTF-8 without a line break.")


def from_line(gguf: Path) -> str:
    """The FROM instruction of the Modelfile of a GGUF file."""
    return f"FROM ./{gguf.name}"


def make_modelfile(gguf: Path, model: ForeignModel) -> str:
    """The text of a Modelfile: context length, EOS tokens, and TEMPLATE for ChatML or if there is no chat template.

    EOS tokens with a quote, a backslash or a line break are left out.
    """
    lines = [from_line(gguf), f"PARAMETER num_ctx {model.config.context}"]
    template = _template(model.chat_template)
    if template is None:
        lines.insert(0, "# Without TEMPLATE, ollama uses the chat template in the GGUF file if it supports that one.")
    else:
        lines.append(f'TEMPLATE """{template}"""')
    ends = model.special.eos or (model.special.end_of_text,)
    lines += [f'PARAMETER stop "{end}"' for end in ends if not set('"\\\n') & set(end)]
    return "\n".join(lines) + "\n"


def _template(chat_template: str | None) -> str | None:
    """ollama's template: only the prompt if there is no chat template; ChatML; `None` for other chat templates."""
    if chat_template is None:
        return "{{ .Prompt }}"
    return CHATML if CHATML_TURN in chat_template and "<|im_end|>" in chat_template else None
