"""tinylm report, and the content of the report for each kind of model."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

import tinylm as api
from tests.run_report.test_page import data_of
from tests.shell import assert_error, copied, edit_config, records, run_ok, tinylm
from tests.trained_runs import BOTH, pairs_file

pytestmark = pytest.mark.usefixtures("shelf_cache")


def report(*arguments: object, memorisation: str = "--no-memorisation") -> Any:
    """The runs in the content of a report, by default without memorisation, which takes a second per run."""
    options = [*arguments, *filter(None, [memorisation])]
    out = Path(run_ok("report", *options, "--out", "r.html").stdout.strip())
    assert out == Path("r.html")
    content: Any = data_of(out.read_text(encoding="utf-8"))
    return content["runs"]


def test_a_decoder_has_curves_settings_plan_attention_evaluation_and_the_loss_of_each_token(run: Path) -> None:
    (found,) = report(run)
    assert found["problems"] == []
    assert found["name"] == "run"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["curves"]["val"]["step"] == [0, 50, 100, 150, 200]
    losses = [record["loss"] for record in logged if "loss" in record]
    assert found["curves"]["train"]["loss"] == pytest.approx(losses, rel=1e-4)
    assert found["curves"]["train"]["tokens"] == [50 * 64, 100 * 64, 150 * 64, 200 * 64]
    assert found["parts"]["total"] == found["parameters"]
    assert found["settings"]["model.width"] == "16"
    assert ["steps", "200", "200"] in found["plan"]
    metrics = found["evaluation"]["metrics"]
    assert metrics["loss"] == pytest.approx(api.load(run).evaluate().loss, rel=1e-4)
    assert set(found["evaluation"]["baselines"]) == {"gzip", "xz", "PPMd"}
    (attention,) = found["attention"]
    assert len(attention["layers"]) == 1
    assert attention["rows"] == attention["columns"]
    tokens = found["passage"]["tokens"]
    text = "".join(token["text"] for token in tokens)
    assert len(tokens) > 3 * 16
    assert "loss" not in tokens[0]
    model = api.load(run)
    ids = model.encode(text)
    for start in range(0, len(ids) - 1, 16):
        window = ids[start : start + 17]
        log_p = model.logits([window[:-1]])[0].double().log_softmax(dim=-1)
        for position, target in enumerate(window[1:]):
            token = tokens[start + position + 1]
            assert token["loss"] == pytest.approx(-log_p[position, target].item(), rel=1e-3, abs=1e-6)
            likeliest = log_p[position].topk(5)
            assert [p for _, p in token["likeliest"]] == pytest.approx(likeliest.values.exp().tolist(), rel=0.01)
            assert token["likeliest"][0][0] == model.decode([int(likeliest.indices[0])])


def test_an_encoder_has_masked_guesses(encoder: Path) -> None:
    (found,) = report(encoder)
    assert found["passage"]["kind"] == "masked"
    scored = [token for token in found["passage"]["tokens"] if "loss" in token]
    assert 0 < len(scored) < len(found["passage"]["tokens"]) / 4
    assert all(sum(p for _, p in token["likeliest"]) <= 1.001 for token in scored)
    assert 0 <= found["evaluation"]["metrics"]["accuracy"] <= 1


def test_a_translator_has_the_alignment_of_its_cross_attention_and_the_scores_of_evaluation(translator: Path) -> None:
    (found,) = report(translator, "--prompt", "abc")
    assert found["problems"] == []
    kinds = {attention["kind"]: attention for attention in found["attention"]}
    assert set(kinds) == {"self-attention", "self-attention of the encoder", "cross-attention"}
    assert kinds["cross-attention"]["columns"][:3] == ["a", "b", "c"]
    assert "".join(kinds["cross-attention"]["rows"][1:]) == "c b a"
    assert found["passage"]["kind"] == "target"
    metrics, expected = found["evaluation"]["metrics"], api.load(translator).evaluate()
    assert metrics["pairs"] == expected.pairs == 40
    for name in ("loss", "exact_match", "bleu", "chrf"):
        assert metrics[name] == pytest.approx(getattr(expected, name), rel=1e-4)


def test_the_bleu_of_a_translator_stands_beside_that_of_baselines(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation pairs are training pairs, so that the target of the nearest training source is right."""
    sources = ("one two three four five", "two three four five six")
    pairs = [(source, " ".join(reversed(source.split()))) for source in sources]
    file = pairs_file(here / "pairs.tsv", pairs)
    run_ok("train", file, "--val-data", file, "--steps", 2, "--out", "mt", *BOTH)
    (found,) = report("mt")
    assert found["evaluation"]["compared"] == "bleu"
    expected = sacrebleu.corpus_bleu(
        [source for source, _ in pairs * 4], [[target for _, target in pairs * 4]], force=True
    )
    assert found["evaluation"]["baselines"] == {
        "source itself": pytest.approx(expected.score, rel=1e-4),
        "target of the nearest training source": pytest.approx(100.0),
    }
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as if it were not installed
    (found,) = report("mt")
    assert "exact_match" in found["evaluation"]["metrics"] and "bleu" not in found["evaluation"]["metrics"]
    assert found["evaluation"]["baselines"] == {}


def test_memorisation_has_the_figures_of_evaluation_and_places_in_the_training_text(run: Path, shelf: Path) -> None:
    (found,) = report(run, memorisation="")
    measured = found["memorisation"]
    assert (measured["min_match"], measured["sample_length"], measured["prefix_length"]) == (50, 500, 100)
    evaluated = records(run_ok("eval", "-m", run, "--memorisation", "--num-samples", 20, "--json"))
    assert [source["source"] for source in measured["sources"]] == [record["source"] for record in evaluated]
    names = {"copied": "copied", "low": "copied_low", "high": "copied_high", "longest": "longest", "samples": "samples"}
    for source, record in zip(measured["sources"], evaluated, strict=True):
        for name, key in names.items():
            assert source[name] == (None if record[key] is None else pytest.approx(record[key], rel=1e-4))
    text = (shelf / "one.txt").read_text()
    for match in (match for source in measured["sources"] for match in source["matches"]):
        assert text[match["character"] :].startswith(match["text"])
        assert match["line"] == text[: match["character"]].count("\n") + 1
        assert match["name"] == "one.txt"


def test_costly_memorisation_needs_a_request(run: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinylm.run_report import predictions as copied_text

    assert "memorisation" not in report(run)[0]
    assert "memorisation" not in report(encoder, memorisation="")[0]
    monkeypatch.setattr(copied_text, "MAX_FLOPS", 1.0)
    assert report(run, memorisation="")[0]["memorisation"] == {"left_out": "the model is large"}
    monkeypatch.setattr(copied_text, "MAX_CHARACTERS", 100)
    assert report(run, memorisation="")[0]["memorisation"] == {"left_out": "the training text is long"}
    samples, *_ = report(run, memorisation="--memorisation")[0]["memorisation"]["sources"]
    assert samples["samples"] == 50
    (found,) = report(encoder, memorisation="--memorisation")
    assert found["problems"] == [f"No memorisation: Memorisation is measured for decoders; {encoder} is an encoder."]


def test_an_adapter_has_the_norm_of_each_update(adapter: Path) -> None:
    (found,) = report(adapter)
    assert found["kind"] == "lora adapter"
    model = api.load(adapters=[adapter])
    for update in found["updates"]:
        layer = model.adapters[0].layers[update["layer"]]
        product = (layer.lora_B.double() @ layer.lora_A.double()) * layer.scale
        norm = math.sqrt((product**2).sum().item())
        assert update["norm"] == pytest.approx(norm, rel=1e-4)
        base = layer.base.weight.double().flatten()
        assert update["relative"] == pytest.approx(norm / math.sqrt((base @ base).item()), rel=1e-4)


def test_only_an_earlier_report_or_an_empty_file_is_replaced(run: Path, here: Path) -> None:
    file, link = here / "r.html", here / "link.html"
    file.touch()
    link.symlink_to(file)
    for out in (file, file, link):
        run_ok("report", run, "--no-memorisation", "--out", out)
    text = here / "notes.txt"
    text.write_text("not a report")
    for command, setting in ((("report", run, "--out"), "--out"), (("train", text, "--report"), "--report")):
        for other in (text, run / "model.safetensors"):
            before = other.read_bytes()
            message = f"{other.name} is not an earlier report; choose another {setting}."
            assert_error(tinylm(*command, other), 2, message)
            assert other.read_bytes() == before


def test_without_its_text_or_a_damaged_run_the_rest_is_there(
    run: Path, here: Path, monkeypatch: Any, bpe_run: Path
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(here / "empty"))
    (found,) = report(run, "--prompt", "the sea")
    assert [text.partition(":")[0] for text in found["problems"]] == ["No passage, no evaluation and no memorisation"]
    assert found["attention"]
    assert "passage" not in found
    damaged = copied(run, here / "damaged")
    (damaged / "config.json").write_text("{")
    result = run_ok("report", run, bpe_run, damaged, "--no-memorisation", "--out", "r.html", "--json")
    assert records(result) == [{"report": "r.html", "runs": ["run", "bpe"]}]
    assert "damaged is left out" in result.stderr
    assert_error(tinylm("report", damaged), 1, "config.json")


def test_forged_strings_and_logs_neither_end_the_report_nor_reach_the_page_as_markup(run: Path, here: Path) -> None:
    forged = copied(run, here / "<img src=x onerror=alert(1)>")
    edit_config(forged, data={"text_key": "</script><script>alert(1)</script>", "corpus": ["<b>" * 1000] * 1000})
    (forged / "metrics.jsonl").write_text('{"step": 1, "loss": 1e308, "lr": -1e999}\n' * 50 + "\0" * 9999)
    (forged / "samples.jsonl").write_text('{"step": 1, "text": "</script><script>alert(1)</script>"}\n')
    (found,) = report(forged)
    assert found["samples"][0]["text"] == "</script><script>alert(1)</script>"
    page = Path("r.html").read_text()
    assert page.count("<script") == 3
    assert "<img" not in page
    assert len(page) < 2_000_000
