"""The server's answers beside logits in float64, and streams beside whole answers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.formats.test_gguf_writer import own_model
from tests.published import published
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_model import write_gguf
from tinylm.generation.llama_cpp import LlamaCpp
from tinylm.generation.prompts import Prompt, encode_prompt
from tinylm.generation.torch_engine import TorchEngine
from tinylm.reporter import SilentReporter
from tinylm.serving.completions import Completions
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char
from tinylm.transformer.architectures import Decoder

CONTEXT = 64
BYTES = train_bpe(["the old man said 中文 to him, é “so” it went and the man was old"] * 9, 300)
CHARACTERS = train_char("the oldman")
TEXT = "the old man 中é"


class Served(NamedTuple):
    """A random model in torch and its answers by llama.cpp."""

    tokenizer: Tokenizer
    network: Decoder
    completions: Completions

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """After each id, of all next ones: (T, V), in float64."""
        with torch.no_grad():
            logits = self.network.logits(self.network(torch.tensor([ids])).hidden)[0]
        return logits[:, : self.tokenizer.vocab_size].double().log_softmax(-1)

    def whole(self, body: dict[str, Any], is_chat: bool = False) -> Any:
        """The answer."""
        request = self.completions.parse(body, is_chat=is_chat)
        return self.completions.join(request, list(filter(None, self.completions.chunks(request))))

    def streamed(self, body: dict[str, Any], is_chat: bool = False) -> tuple[list[str], list[Any]]:
        """The joined text of each choice, and the events."""
        request = self.completions.parse({**body, "stream": True}, is_chat=is_chat)
        events = json.loads(json.dumps(list(filter(None, self.completions.events(request)))))
        texts = [""] * len(request.prompts) * request.n
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "") if is_chat else choice["text"]
        return texts, events


def llama2() -> Tokenizer:
    """A tokenizer of SentencePiece whose texts begin with a BOS token."""
    special = SpecialTokens(end_of_text="<unk>", bos="<bos>", add_bos=True)
    return Tokenizer.parse(json.dumps(published()["llama2"]), special, Path("llama2"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tokenizer], Served]]:
    """Opens a model with this tokenizer, once."""
    known: dict[int, Served] = {}
    engines = []

    def open(tokenizer: Tokenizer) -> Served:
        if id(tokenizer) not in known:
            file = tmp_path_factory.mktemp("model") / "model.gguf"
            network, exported = own_model("modern", tokenizer, context=CONTEXT)
            write_gguf(file, exported, "f32", end_id=tokenizer.end_of_text_id)
            sizes: Any = {"samples": 4, "slots": CONTEXT}
            engines.append(LlamaCpp(file, CONTEXT, tokenizer, network.vocab_size, True, **sizes))

            completions = Completions(
                *("model", engines[-1], tokenizer, None, CONTEXT, None), lambda: TorchEngine(network, tokenizer)
            )
            known[id(tokenizer)] = Served(tokenizer, network, completions)
        return known[id(tokenizer)]

    yield open
    for engine in engines:
        engine.close()


LLAMA2 = llama2()


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA2], ids=["bytes", "llama2"])
def test_log_probabilities_of_a_prompt_and_its_answer_are_those_of_the_logits(
    serve: Callable[[Tokenizer], Served], tokenizer: Tokenizer
) -> None:
    """Also of an end token within the prompt, and of characters that consist of several tokens."""
    served, end = serve(tokenizer), tokenizer.end_of_text_id
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*begin, *(int(i) for i in tokenizer.encode(TEXT))]
    for prompt in (TEXT, ids, [*ids, end, *ids[:3], end, end, ids[0]]):
        given = ids if prompt is TEXT else prompt
        choice = served.whole({"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 3, "echo": True})[
            "choices"
        ][0]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        answer: list[int] = []
        for position, logprob in enumerate(found["token_logprobs"][1:], start=1):
            expected = served.logprobs([*given, *answer])[position - 1]
            token = int(expected.argmax()) if position >= len(given) else given[position]
            answer += [token] if position >= len(given) else []
            assert logprob == pytest.approx(float(expected[token]), abs=2e-5)
            best = max(found["top_logprobs"][position].values())
            assert best == pytest.approx(float(expected.max()), abs=2e-5)
            assert (logprob == best) == (token == int(expected.argmax()))
        assert len(found["tokens"]) == len(given) + len(answer) and (len(answer) == 4 or answer[-1] == end)
        assert choice["text"].startswith(TEXT)


def test_scores_of_completions_have_the_texts_and_places_of_their_tokens(serve: Callable[[Tokenizer], Served]) -> None:
    """A character of several tokens has all of them, as bytes; tokens of SentencePiece keep their leading space."""
    text = f"{TEXT}日"
    request = {"prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = serve(BYTES).whole(request)
    assert answer["choices"][0]["text"] == text and answer["choices"][0]["finish_reason"] == "length"
    found = answer["choices"][0]["logprobs"]
    spelled = b"".join(
        bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in found["tokens"]
    )
    assert spelled == text.encode() and any(token.startswith("bytes:\\x") for token in found["tokens"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    found = serve(LLAMA2).whole({**request, "prompt": "the cat"})["choices"][0]["logprobs"]
    assert found["tokens"][0] == "<bos>" and "".join(found["tokens"][1:]) == " the cat"
    assert found["text_offset"][:2] == [0, 0] and found["text_offset"][-1] < len("the cat")
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    for seed in range(5):
        (choice,) = serve(BYTES).whole({**chat, "seed": seed}, is_chat=True)["choices"]
        scores = choice["logprobs"]["content"]
        content = [score for score in scores if score["id"] != BYTES.end_of_text_id]
        spelled = b"".join(bytes(score["bytes"]) for score in content)
        assert spelled.decode(errors="replace") == choice["message"]["content"]
        assert all(len(score["top_logprobs"]) == 2 for score in scores)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA2], ids=["bytes", "llama2"])
def test_a_stream_has_the_text_of_the_whole_answer(
    serve: Callable[[Tokenizer], Served], tokenizer: Tokenizer, is_chat: bool
) -> None:
    """Also the text that is held back for a stop string at the end, and a character that is cut there."""
    served = serve(tokenizer)
    prompt = {"messages": [{"role": "user", "content": "the cat"}]} if is_chat else {"prompt": "the cat"}
    cut = held = 0
    for seed in range(12):
        request = {**prompt, "max_tokens": 6, "n": 2, "seed": seed, "temperature": 1.5, "top_k": 0, "top_p": 1}
        plain = [c["message"]["content"] if is_chat else c["text"] for c in served.whole(request, is_chat)["choices"]]
        for stop in (None, plain[0][-2:] + "never", plain[0][1:3] or None):
            choices = served.whole({**request, "stop": stop}, is_chat)["choices"]
            whole = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
            texts, events = served.streamed({**request, "stop": stop}, is_chat)
            expected = [text.partition(stop)[0] for text in plain] if stop else plain
            assert texts == whole == expected
            last = {c["index"]: c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]}
            assert last == {choice["index"]: choice["finish_reason"] for choice in choices}
            held += stop is not None and stop.endswith("never") and len(plain[0]) > 1
        cut += plain[0].endswith("\ufffd")
    assert held and cut


def test_usage_counts_all_prompts_and_all_answers_with_their_end_tokens(serve: Callable[[Tokenizer], Served]) -> None:
    served, end = serve(CHARACTERS), CHARACTERS.end_of_text_id
    request = {"prompt": ["the", "old man"], "n": 3, "max_tokens": 5, "logit_bias": {str(end): -100}}
    usage = {"prompt_tokens": 10, "completion_tokens": 30, "total_tokens": 40}
    assert served.whole(request)["usage"] == usage
    _, events = served.streamed({**request, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == usage and events[-1]["choices"] == []
    ended = served.whole({"prompt": "the", "max_tokens": 5, "logprobs": 0, "logit_bias": {str(end): 100}})
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"
    (logprob,) = ended["choices"][0]["logprobs"]["token_logprobs"]
    ids = [int(i) for i in CHARACTERS.encode("the")]
    assert logprob == pytest.approx(float(served.logprobs(ids)[-1, end]), abs=2e-5)
    assert ended["choices"][0]["logprobs"]["tokens"] == [CHARACTERS.control_tokens[0]]
    for body in ({"prompt": "the"}, {"prompt": [2, 3, 4]}):
        nothing = served.whole({**body, "max_tokens": 0, "n": 2})
        assert nothing["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
        assert [choice["text"] for choice in nothing["choices"]] == ["", ""]


def test_an_empty_prompt_begins_a_text_as_in_sample(serve: Callable[[Tokenizer], Served]) -> None:
    for tokenizer in (BYTES, LLAMA2):
        served = serve(tokenizer)
        start = encode_prompt(Prompt(""), tokenizer, CONTEXT, None, SilentReporter()).start
        request = {"max_tokens": 8, "temperature": 0}
        expected = served.whole({**request, "prompt": start})["choices"][0]["text"]
        for body in ({"prompt": ""}, {}, {"prompt": None}, {"prompt": [""]}):
            answer = served.whole({**request, **body})
            assert answer["choices"][0]["text"] == expected and answer["usage"]["prompt_tokens"] == 1


def test_a_character_outside_the_vocabulary_is_refused_as_on_the_command_line_or_skipped(
    serve: Callable[[Tokenizer], Served],
) -> None:
    served, message = serve(CHARACTERS), "the ölder man"
    with pytest.raises(UsageError) as expected:
        encode_prompt(Prompt(message), CHARACTERS, CONTEXT, None, SilentReporter())
    with pytest.raises(UsageError) as found:
        served.completions.parse({"prompt": message}, is_chat=False)
    assert str(found.value) == str(expected.value)
    chat = {"messages": [{"role": "user", "content": message}]}
    for body, is_chat in (({"prompt": ["the", message]}, False), (chat, True)):
        with pytest.raises(UsageError, match=r"not in the vocabulary: 'ö'.* at offset 4"):
            served.completions.parse(body, is_chat=is_chat)
        request = served.completions.parse({**body, "unknown": "skip"}, is_chat=is_chat)
        assert request.prompts[-1].text == "the lde man"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "a JSON object"),
        ({"prompt": {"a": 1}}, "The prompt must be a text, or ids"),
        ({"prompt": [1, 5000]}, "ids of tokens from 0 to"),
        ({"prompt": []}, "1 to 128"),
        ({"prompt": [[]]}, "has no tokens"),
        ({"prompt": "the " * 30}, "The prompt has 120 tokens, and the context of 64"),
        ({"max_tokens": -2}, "'max_tokens'"),
        ({"max_tokens": True}, "'max_tokens'"),
        ({"n": 0}, "'n'"),
        ({"prompt": ["a"] * 20, "n": 20}, "128 answers"),
        ({"n": 1, "best_of": 2}, "'best_of'"),
        ({"temperature": "hot"}, "'temperature'"),
        ({"temperature": float("nan")}, "'temperature'"),
        ({"top_k": 10**20}, r"'top_k' is 1\d+; it must be a number greater than -2147483648 and below 2147483648"),
        ({"logprobs": 1000}, "'logprobs'"),
        ({"stop": [1]}, "'stop'"),
        ({"logit_bias": {"the": 3}}, "'logit_bias'"),
        ({"unknown": "drop"}, "`unknown`"),
        ({"grammar": "root ::= 1"}, "'grammar' is not supported; give a JSON Schema"),
        ({"suffix": "end"}, "'suffix' is not supported"),
        ({"tools": [{"type": "function"}]}, "'tools' is not supported"),
        ({"response_format": {"type": "yaml"}}, "'response_format'"),
        ({"json_schema": {"type": "lion"}}, "`json_schema` cannot be used"),
        ({"json_schema": {"enum": ["a"]}, "frequency_penalty": 1}, "'frequency_penalty' has no effect"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_name_of_the_setting(
    serve: Callable[[Tokenizer], Served], body: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        serve(CHARACTERS).completions.parse({"prompt": "the", **body} if body else body, is_chat=False)


def test_settings_that_only_llama_cpp_can_check_are_refused_before_a_stream_begins(
    serve: Callable[[Tokenizer], Served],
) -> None:
    completions = serve(CHARACTERS).completions
    request = completions.parse({"prompt": "the", "repeat_last_n": -5, "stream": True}, is_chat=False)
    with pytest.raises(UsageError):
        next(completions.events(request))


def test_json_of_a_schema_is_generated_as_by_sample(serve: Callable[[Tokenizer], Served]) -> None:
    served, schema = serve(BYTES), {"enum": ["the old", {"man": 1}]}
    formats: list[dict[str, Any]] = [{"json_schema": schema}]
    formats.append({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    for format in formats:
        for is_chat in (False, True):
            prompt = {"messages": [{"role": "user", "content": "the"}]} if is_chat else {"prompt": "the"}
            texts, _ = served.streamed({**prompt, **format, "max_tokens": 40, "n": 2}, is_chat)
            assert all(json.loads(text) in schema["enum"] for text in texts)


def test_a_failure_of_the_engine_is_not_called_too_many_requests(
    serve: Callable[[Tokenizer], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(served.completions, "_generate", fail)
        with pytest.raises(RuntimeError, match="the engine broke"):
            served.whole({"prompt": TEXT, "max_tokens": 2})
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", fail)
        with pytest.raises(TinyLMError, match="too many requests; try again later"):
            served.whole({"prompt": TEXT, "max_tokens": 2})
    assert served.whole({"prompt": TEXT, "max_tokens": 2})["choices"][0]["text"]


def fail(*_: object) -> None:
    raise RuntimeError("the engine broke")
