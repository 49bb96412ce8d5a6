"""The Modelfile of ollama."""

from dataclasses import replace
from pathlib import Path

from tests.formats.test_gguf_writer import own_model
from tinylm.formats.gguf_writer import make_modelfile, modelfile_path

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_for_a_base_model_the_modelfile_hands_the_prompt_over_as_it_is() -> None:
    _, model = own_model("modern")
    assert modelfile_path(Path("models/story.gguf")) == Path("models/story.Modelfile")
    assert make_modelfile(Path("models/story.gguf"), model) == (
        'FROM ./story.gguf\nPARAMETER num_ctx 48\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "<|endoftext|>"\n'
    )


def test_a_chat_model_with_chatml_has_its_template_and_any_other_is_left_to_ollama() -> None:
    _, model = own_model("modern")
    text = make_modelfile(Path("chat.gguf"), replace(model, chat_template=CHATML))
    turns = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    assert turns + "<|im_start|>assistant\n" in text
    text = make_modelfile(Path("chat.gguf"), replace(model, chat_template="{{ x }}"))
    assert "TEMPLATE " not in text.replace("# Without TEMPLATE,", "")
