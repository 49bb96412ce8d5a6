"""tinylm as a model of lm-eval. References: lm-eval on the exported model, and this package's own figures."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.models  # registers the models
import pytest
import tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.shell import run_ok, story
from tinylm.analysis.lm_harness import TinyLM
from tinylm.analysis.minimal_pairs import MinimalPair, measure_minimal_pairs
from tinylm.errors import UsageError
from tinylm.models.load import load

SMALL = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 32, "--steps", 30, "--dtype", "fp32")


@pytest.fixture(scope="module", params=["char", "bpe"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "a.txt").write_text(story(6000))
    sizes = ("--vocab-size", 300) if request.param == "bpe" else ()
    run_ok(
        "train",
        folder / "a.txt",
        "--format",
        "lines",
        "--tokenizer",
        request.param,
        *sizes,
        *SMALL,
        "--out",
        folder / "run",
    )
    run_ok("export", folder / "run", "--to", "hf", "--out", folder / "hf")
    return folder / "run"


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


WORDS = " ".join(story(2000).split())
ENDS = [place for place, character in enumerate(WORDS) if character == " "]
TEXTS = [("", WORDS[:20]), *((WORDS[: ENDS[n]], WORDS[ENDS[n] : ENDS[n + 2]]) for n in (1, 3, 60))]


def test_likelihoods_are_those_of_lm_eval_on_the_exported_model(run: Path) -> None:
    ours = TinyLM(str(run))
    peer = get_model("hf")(pretrained=str(run.parent / "hf"), device="cpu", dtype="float32", batch_size=1)
    for kind, arguments in (("loglikelihood", TEXTS), ("loglikelihood_rolling", [(WORDS[:200],), (WORDS[:5],)])):
        found, expected = (getattr(model, kind)(requests(kind, *arguments)) for model in (ours, peer))
        flat = [value for one in found for value in (one if isinstance(one, tuple) else (one,))]
        assert flat == pytest.approx([v for o in expected for v in (o if isinstance(o, tuple) else (o,))], abs=2e-3)
    settings = {"until": ["\n"], "max_gen_toks": 8}
    found, expected = (m.generate_until(requests("generate_until", (WORDS[:9], settings))) for m in (ours, peer))
    assert found == expected


def test_a_bos_token_of_an_imported_model_comes_before_every_context_as_in_lm_eval(tmp_path: Path) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    start = {"single": "<s> $A", "special_tokens": [("<s>", len(letters))]}
    tokenizer.post_processor = processors.TemplateProcessing(**start)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        tmp_path
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = {"vocab_size": len(letters) + 2, "bos_token_id": len(letters), "eos_token_id": len(letters) + 1}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids, max_position_embeddings=32))
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(tmp_path)
    ours = TinyLM(str(tmp_path), device="cpu", dtype="fp32")
    peer = get_model("hf")(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=1)
    pairs = [("Hello", " world"), ("", " world"), ("a long context beyond " * 3, " world")]
    for one, other in zip(
        *(model.loglikelihood(requests("loglikelihood", *pairs)) for model in (ours, peer)), strict=True
    ):
        assert one == pytest.approx(other, abs=2e-3)
    (rolling,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("Hello",)))
    assert rolling == pytest.approx(ours.loglikelihood(requests("loglikelihood", ("", "Hello")))[0][0], abs=1e-4)


def test_a_task_of_lm_eval_has_the_accuracy_of_our_minimal_pairs(run: Path, tmp_path: Path) -> None:
    texts = [WORDS[start : start + 12] for start in range(0, 800, 10)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"good": good, "bad": bad}) + "\n" for good, bad in pairs))
    task = {
        "task": "pairs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": 0,
        "doc_to_choice": "{{[good, bad]}}",
        "metric_list": [{"metric": "acc"}],
    }
    ours = TinyLM(str(run))
    results = lm_eval.simple_evaluate(model=ours, tasks=[task], bootstrap_iters=0)["results"]["pairs"]
    # lm-eval puts a space before each text, as before the answer to a question.
    overall, *_ = measure_minimal_pairs(ours.model, [MinimalPair(f" {good}", f" {bad}", "") for good, bad in pairs])
    assert results["acc,none"] == pytest.approx(overall.accuracy)
    assert 0 < overall.accuracy < 1


def test_a_continuation_as_long_as_the_context_is_scored_without_the_text_before_and_a_longer_one_is_an_error(
    run: Path,
) -> None:
    """Reference: the sum over the tokens of the whole text that is left, by the model's own logits."""
    ours = TinyLM(str(run))
    ids = ours.tok_encode(WORDS)[: ours.model.context + 6]
    before, end = ids[:5], ids[5:-1]
    ((found, _),) = ours._loglikelihood_tokens([(None, before, end)])
    log_p = ours.model.logits(torch.tensor([ids[4:-2]])).double().log_softmax(-1)[0]
    assert found == pytest.approx(log_p[torch.arange(len(end)), torch.tensor(end)].sum().item(), rel=1e-4)
    with pytest.raises(UsageError, match="A continuation of 33 tokens is longer than the context of the model, 32"):
        ours._loglikelihood_tokens([(None, before, ids[5:])])


def test_only_decoders_of_text_are_models_of_lm_eval_and_score_minimal_pairs(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "label": label}) for text, label in (("a b", "x"), ("b c", "y")) * 8]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run_ok("train", tmp_path / "a.jsonl", "--architecture", "decoder", *SMALL[:-2], "--out", tmp_path / "labels")
    with pytest.raises(UsageError, match=r"lm-eval needs a decoder of text; .* is a classifier"):
        TinyLM(str(tmp_path / "labels"))
    with pytest.raises(UsageError, match=r"Minimal pairs are scored by decoders of text; .* is a classifier"):
        measure_minimal_pairs(load(tmp_path / "labels"), [MinimalPair("a", "b", "")])
    (tmp_path / "a.txt").write_text(story(3000))
    run_ok("train", tmp_path / "a.txt", "--architecture", "encoder", *SMALL[:-2], "--out", tmp_path / "run")
    with pytest.raises(UsageError, match="lm-eval needs a decoder"):
        get_model("tinylm")(path=str(tmp_path / "run"))
    with pytest.raises(TypeError, match="dtpye"):  # a mistake is not ignored
        get_model("tinylm").create_from_arg_string(f"path={tmp_path / 'run'},dtpye=fp32", {"batch_size": 1})
