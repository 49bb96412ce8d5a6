from pathlib import Path

import pytest

from tests.variants import small
from tinylm.adapters.load import add_adapter
from tinylm.device import can_compile
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.compile_policy import Workload, choose_code
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.run_config import AdapterConfig

CONFIG = small()
MANY = Workload(tokens=10**6)


def model_with_adapter() -> Transformer:
    model = build_model(CONFIG)
    add_adapter(
        model, AdapterConfig(kind="lora", base="", base_digest="", rank=2, alpha=2.0, dropout=0.0, targets=("q_proj",))
    )
    return model


@pytest.mark.parametrize(
    ("make", "dtype", "workload", "reason"),
    [
        (model_with_adapter, "fp32", MANY, "merge the adapter into the model"),
        (lambda: build_model(small(architecture="encoder")), "fp32", MANY, "it is for decoders"),
        (lambda: build_model(CONFIG), "bf16", MANY, "it is for fp32"),
        (lambda: build_model(CONFIG), "fp32", Workload(10**6, num_samples=2), "it is for one sample at a time"),
        (lambda: build_model(CONFIG), "fp32", Workload(10**6, cache=False), "it needs the cache"),
    ],
)
def test_a_model_or_workload_that_rules_out_compiled_code_is_an_error_only_if_compile_is_on(
    make: object, dtype: str, workload: Workload, reason: str
) -> None:
    model = make()
    assert choose_code(model, CONFIG, dtype, "auto", workload, int8=False) is None
    with pytest.raises(UsageError, match=f'`compile="on"` is not possible: .*{reason}.*; leave it out'):
        choose_code(model, CONFIG, dtype, "on", workload, int8=False)


def test_without_a_cache_folder_no_compiled_code_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home_folder(name: str) -> Path:
        raise TinyLMError("There is no home folder for the cache; set TINYLM_CACHE to a folder.")

    monkeypatch.setattr("tinylm.generation.compile_policy.private_folder", no_home_folder)
    assert choose_code(build_model(CONFIG), CONFIG, "fp32", "auto", MANY, int8=False) is None
    with pytest.raises(UsageError, match="There is no home folder for the cache; set TINYLM_CACHE to a folder"):
        choose_code(build_model(CONFIG), CONFIG, "fp32", "on", MANY, int8=False)


@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
def test_code_is_compiled_from_100_000_tokens_or_if_compile_is_on() -> None:
    model = build_model(CONFIG)

    def chosen(compile: str, tokens: int, int8: bool = False) -> bool:
        return choose_code(model, CONFIG, "fp32", compile, Workload(tokens), int8=int8) is not None

    assert chosen("auto", 100_000) and chosen("auto", 100_000, int8=True) and chosen("on", 1)
    assert not chosen("auto", 99_999) and not chosen("off", 10**6)
