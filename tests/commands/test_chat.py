"""tinylm chat: the conversation on standard input and output, its commands, and Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from tests.formats.peers import edit_json, save_peer
from tests.shell import CHILD_LIMIT, assert_error, child_process, default_signals, environment, records, run_ok
from tests.shell import tinylm as shell
from tinylm.commands.chat import _print_answer, _read_lines
from tinylm.commands.console import Console

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
SYSTEM_FIRST = "{% if messages[0].role == 'system' and not messages[1:] %}{{ raise_exception('say it') }}{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "llama"
    save_peer("llama", folder)
    (folder / "chat_template.jinja").write_text(SYSTEM_FIRST + TEMPLATE)
    return folder


def test_questions_come_from_standard_input_and_answers_go_to_standard_output(model: Path) -> None:
    options = ("--model", model, "-n", 5, "-t", 0)
    both = run_ok("chat", *options, stdin="hi\n\nyou\n").stdout
    first = run_ok("chat", *options, stdin="hi").stdout
    assert both.startswith(first) and len(both) > len(first) and first.endswith("\n")
    lines = records(run_ok("chat", *options, "--json", stdin="hi\nyou\n"))
    assert [line["content"] for line in lines] == both.removesuffix("\n").split("\n") or len(lines) == 2
    assert lines[0]["content"] + "\n" == first and lines[0]["finish_reason"] in ("length", "end")


def test_an_answer_is_shown_without_line_breaks_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Session:
        dropped, finish_reason = 0, "end"

    answer = (chunk for chunk in ("\n", "\r\n\na", "\n", "\nb\n", "\n"))
    _print_answer(Session(), answer, Console())  # type: ignore[arg-type]
    assert capsys.readouterr().out == "a\n\nb\n"


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_question_that_is_not_utf_8_is_a_usage_error_that_names_the_byte(model: Path, locale: str) -> None:
    command = [sys.executable, "-m", "tinylm", "chat", "--model", str(model), "-n", "3", "--quiet"]
    env = {**environment(), "LC_ALL": locale}
    ran = subprocess.run(command, input=b"caf\xe9?\n", capture_output=True, timeout=CHILD_LIMIT, env=env, check=False)
    assert ran.returncode == 2 and ran.stdout == b""
    assert b"Error: Standard input is not valid UTF-8 (byte 0xE9); convert it." in ran.stderr


def test_commands_save_and_reset_the_conversation(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": []}')  # without the end of the line
    typed = f"hi\n/save {file}\n/system Be brief.\nhi\n/save {file}\n/reset\n/no\n/save\n/save {tmp_path}\n/exit\nx"
    result = run_ok("chat", "--model", model, "-n", 3, "--seed", 1, stdin=typed)
    before, *saved = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert before == []
    assert [[m["role"] for m in messages] for messages in saved] == [
        ["user", "assistant"],
        ["system", "user", "assistant"],
    ]
    assert saved[1][0]["content"] == "Be brief."
    assert result.stdout == "".join(f"{messages[-1]['content']}\n" for messages in saved)
    assert "/no is not a command" in result.stderr and "Cannot write" in result.stderr


def test_a_saved_conversation_is_resumed_where_it_ended(model: Path, tmp_path: Path) -> None:
    """Reference: the same conversation without the pause."""
    file, whole = tmp_path / "chat.jsonl", tmp_path / "whole.jsonl"
    options = ("--model", model, "-n", 3, "--seed", 1)
    run_ok("chat", *options, "--system", "Be brief.", stdin=f"hi\n/save {file}\nyou\n/save {whole}\n")
    resumed = run_ok("chat", *options, "--resume", file, stdin=f"you\n/save {file}\n")
    first, second = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert second == json.loads(whole.read_text())["messages"] and second[:3] == first
    assert resumed.stdout == f"{second[-1]['content']}\n"
    assert f"Continuing a conversation of 2 messages; the last answer: {first[-1]['content']}" in resumed.stderr
    run_ok("chat", *options, "--resume", file, "--system", "Be long.", stdin=f"you\n/save {file}\n")
    last = json.loads(file.read_text().splitlines()[-1])["messages"]
    assert last[0]["content"] == "Be long." and last[1:5] == second[1:]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "Cannot read"),
        ("", "has no conversation in its last line"),
        ("no json\n", "has no conversation in its last line"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n\n', "line 1 is not a conversation of questions"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "line 1 is not a conversation of questions"),
        ('{"messages": 3}', "'messages' must be a list"),
        (b"\xff\n", "chat.jsonl, line 1: byte 0xFF at offset 0 is not UTF-8"),
        pytest.param(b"x" * (1 << 25), "chat.jsonl, line 1, has more than 16 MB", id="a line of 32 MB"),
    ],
)
def test_a_file_without_a_conversation_to_resume_is_an_error(
    model: Path, tmp_path: Path, text: str | bytes | None, problem: str
) -> None:
    file = tmp_path / "chat.jsonl"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_error(shell("chat", "--model", model, "--resume", file, stdin="hi\n"), 2, problem)


def test_another_answer_takes_the_place_of_the_last_one(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    options = ("--model", model, "-n", 6, "--seed", 1)
    typed = f"hi\n/again\n/again\n/save {file}\nyou\n/save {file}\n"
    answers = [line["content"] for line in records(run_ok("chat", *options, "--json", stdin=typed))]
    assert len(set(answers[:3])) == 3
    first, second = [[m["content"] for m in json.loads(line)["messages"]] for line in file.read_text().splitlines()]
    assert first == ["hi", answers[2]] and second == ["hi", answers[2], "you", answers[3]]
    repeated = shell("chat", *options[:4], "-t", 0, "--json", stdin="/again\nhi\n/again\n")
    assert repeated.exit_code == 2
    assert [line["content"] for line in records(repeated)] == 2 * [records(repeated)[0]["content"]]
    assert "There is no question yet." in repeated.stderr


def test_a_line_that_ends_in_a_backslash_continues_on_the_next_line_if_there_is_one(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jsonl"
    run_ok("chat", "--model", model, "-n", 2, stdin=f"a\\\nb\n/save {file}\n")
    assert json.loads(file.read_text())["messages"][0]["content"] == "a\nb"
    result = run_ok("chat", "--model", model, "-n", 2, "-t", 0, stdin="hi\\")
    assert result.stdout == run_ok("chat", "--model", model, "-n", 2, "-t", 0, stdin="hi\\\n").stdout != ""


def test_a_question_that_cannot_be_asked_is_an_error_and_the_next_is_answered(model: Path) -> None:
    result = shell("chat", "--model", model, "-n", 3, "-t", 0, stdin="a b c d " * 60 + "\nhi\n/exit\n")
    assert result.exit_code == 2
    assert result.stdout == run_ok("chat", "--model", model, "-n", 3, "-t", 0, stdin="hi\n").stdout
    assert "the context of 64" in result.stderr


def test_a_model_that_cannot_chat_is_refused(model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save_peer("llama", plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    assert_error(shell("chat", "--model", plain, stdin="hi\n"), 2, "--chat-template")
    assert run_ok("chat", "--model", plain, "--chat-template", "chatml", "-n", 2, stdin="hi\n").stdout
    assert_error(
        shell("chat", "--model", plain, "--chat-template", tmp_path / "none", stdin="hi\n"), 2, "--chat-template"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_conversation_that_does_not_fit_on_the_disk_leaves_no_part_of_a_line(model: Path, tmp_path: Path) -> None:
    import resource

    file = tmp_path / "chat.jsonl"
    file.write_text(first := '{"messages": []}\n')

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + 9, len(first) + 9))

    command = [sys.executable, "-m", "tinylm", "chat", "--model", str(model), "-n", "3"]
    with child_process(command, preexec_fn=limit_files, **PIPES) as process:
        _, errors = process.communicate(f"hi\n/save {file}\n")
    assert process.returncode == 0 and f"Cannot write {file}: No space left" in errors
    assert file.read_text() == first


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_stops_the_answer_and_not_the_program(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, endless := tmp_path / "endless")
    tensors = safetensors.torch.load_file(endless / "model.safetensors")
    tensors["lm_head.weight"][1] = 0  # </s>, which greedy sampling then never takes
    safetensors.torch.save_file(tensors, endless / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-m", "tinylm", "chat", "--model", str(endless), "-n", "100000", "-t", "0"]
    with child_process(command, preexec_fn=default_signals, **PIPES) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate("/reset\n")
    assert process.returncode == 0 and "A new conversation." in errors


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX terminal")
def test_ctrl_c_at_the_prompt_hints_and_the_second_in_a_row_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the first ended the program, and the conversation was gone."""
    typed = iter(["hi", "", "you", "", ""])  # "" is Ctrl-C

    def type_line(prompt: str) -> str:
        line = next(typed)
        if not line:
            os.kill(os.getpid(), signal.SIGINT)
        return line

    monkeypatch.setattr("builtins.input", type_line)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    ended = signal.getsignal(signal.SIGINT)
    lines = _read_lines(Console())
    assert [next(lines), next(lines)] == ["hi", "you"]
    assert capsys.readouterr().err.count("Ctrl-D") == 1
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().err.count("Ctrl-D") == 1 and signal.getsignal(signal.SIGINT) is ended


def test_sample_answers_questions_and_conversations_as_chat_does(model: Path, tmp_path: Path) -> None:
    options = ("--model", model, "-n", 5, "-t", 0)
    answer = run_ok("chat", *options, stdin="hi\n").stdout
    result = run_ok("sample", *options, "--chat", "-p", "hi", "--seed", 7)
    assert result.stdout == answer and "Seed 7." in result.stderr
    file = tmp_path / "questions.jsonl"
    lines = [
        {"prompt": "hi"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}], "max_tokens": 2},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = records(run_ok("sample", *options, "--chat", "--json", "-f", file))
    assert [one["text"] + "\n" for one in answers[:2]] == [answer, answer]
    assert answers[2]["tokens"] <= 2 and answers[2]["prompt"].startswith("s:x</s>u:hi</s>a:")


def test_sample_refuses_conversations_that_it_cannot_answer(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert_error(shell("sample", "--model", model, "-f", file), 2, "--chat", "line 1")
    assert_error(shell("sample", "--model", model, "--chat", "-p", "a b c d " * 60), 2, "no room for an answer")
    assert_error(shell("sample", "--model", model, "-p", "a", "--chat-template", "chatml"), 2, "--chat")
    for bad in ({"messages": []}, {"messages": [{"role": "robot", "content": "a"}]}, {"messages": 3}):
        file.write_text(json.dumps(bad))
        assert_error(shell("sample", "--model", model, "--chat", "-f", file), 2, "line 1")


def test_a_chat_model_that_ends_a_plain_prompt_at_once_hints_at_chat(model: Path, tmp_path: Path) -> None:
    """Regression: it printed nothing. The end token of this model is made its likeliest one."""
    ending = tmp_path / "ending"
    shutil.copytree(model, ending)
    options = ("-p", "hi", "-t", 0, "--no-echo")
    (first,) = records(run_ok("sample", "--model", model, *options, "-n", 1, "--logprobs", 1, "--json"))
    for name in ("config.json", "generation_config.json"):
        edit_json(ending / name, eos_token_id=[1, first["logprobs"][0]["id"]])
    result = run_ok("sample", "--model", ending, *options)
    assert result.stdout == "\n" and "--chat answers prompts" in result.stderr
    assert "--chat" not in run_ok("sample", "--model", model, *options, "-n", 5).stderr
    assert "--chat" not in run_ok("sample", "--model", ending, *options, "--chat").stderr
    assert run_ok("sample", "--model", ending, *options, "--quiet").stderr == ""
