"""Presets and sizes: each preset has the layers of the model it is named after, and any field can be replaced."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tinylm.config.model import ModelConfig
from tinylm.config.presets import PRESETS, SIZES, find_preset, make_model_config
from tinylm.errors import UsageError


def made(**choices: Any) -> ModelConfig:
    """The configuration of a small modern model with these choices."""
    return make_model_config(**{"vocab_size": 50, "preset": "modern", "size": "nano", **choices})


def test_the_presets_are_the_models_they_are_named_after() -> None:
    modern, gpt2, original = (made(preset=preset, size="micro") for preset in ("modern", "gpt2", "original"))
    for model in (modern, gpt2, original):
        assert (model.layers, model.heads, model.width) == (4, 4, 128)
        assert model.tie and model.norm_gain and model.dropout == 0
    parts = (modern.position, modern.norm, modern.norm_placement, modern.activation)
    assert parts == ("rope", "rmsnorm", "pre", "swiglu")
    assert modern.qk_norm and not modern.bias and not modern.norm_bias and modern.kv_heads == 2
    assert (gpt2.position, gpt2.norm, gpt2.norm_placement, gpt2.activation) == ("learned", "layernorm", "pre", "gelu")
    assert not gpt2.qk_norm and gpt2.bias and gpt2.norm_bias and gpt2.kv_heads == 4 and not gpt2.scale_embedding
    assert (original.position, original.norm, original.norm_placement) == ("sinusoidal", "layernorm", "post")
    assert original.activation == "relu" and original.bias and original.norm_bias and original.scale_embedding
    assert not original.qk_norm and original.kv_heads == 4


def test_ffn_width_is_4_width_or_for_swiglu_8_thirds_of_it() -> None:
    """8/3 * 96 is 256, and 8/3 * 128 is 341.3, which is rounded up to a multiple of 32."""
    for width, activation, expected in ((96, "swiglu", 256), (128, "swiglu", 352), (96, "gelu", 384)):
        assert made(width=width, activation=activation).ffn_width == expected


def test_a_choice_overrides_size_and_preset_and_a_number_of_heads_is_never_replaced() -> None:
    chosen = made(preset="gpt2", layers=7, norm_bias=False, tie=False, ffn_width=50, width=None, dropout=None)
    assert (chosen.layers, chosen.norm_bias, chosen.tie, chosen.ffn_width) == (7, False, False, 50)
    assert (chosen.width, chosen.dropout, chosen.vocab_size) == (96, 0.0, 50)
    assert made(width=100, heads=10).heads == 10
    with pytest.raises(UsageError, match=r"`heads` is 7; it must divide `width` \(100\)"):
        made(width=100, heads=7)
    assert made(preset="gpt2", width=12, kv_heads=4).heads == 4
    assert [made(preset="gpt2", size="mini", width=width).heads for width in (255, 251)] == [3, 1]


@given(
    width=st.integers(1, 400),
    preset=st.sampled_from(sorted(PRESETS)),
    size=st.sampled_from(sorted(SIZES)),
    kv_heads=st.none() | st.integers(1, 4),
)
@settings(deadline=None, max_examples=300)
def test_the_default_number_of_heads_is_the_nearest_that_fits(
    width: int, preset: str, size: str, kv_heads: int | None
) -> None:
    """It divides the width, is a multiple of `kv_heads` and gives an even head dimension for RoPE."""
    wanted = SIZES[size]["heads"]
    fitting = [heads for heads in range(1, width + 1) if width % heads == 0 and heads % (kv_heads or 1) == 0]
    if preset == "modern":
        fitting = [heads for heads in fitting if width // heads % 2 == 0]
    else:
        assume(preset == "gpt2" or width % 2 == 0)  # sinusoidal positions need an even width
    if not fitting:
        with pytest.raises(UsageError):
            made(width=width, preset=preset, size=size, kv_heads=kv_heads)
        return
    model = made(width=width, preset=preset, size=size, kv_heads=kv_heads)
    assert model.width == width
    assert model.heads in fitting
    assert abs(model.heads - wanted) == min(abs(heads - wanted) for heads in fitting)
    assert model.kv_heads == (
        kv_heads or (model.heads // 2 if preset == "modern" and model.heads % 2 == 0 else model.heads)
    )


CONTEXTS = {"nano": (256, 64), "micro": (512, 128), "tiny": (512, 256), "mini": (512, 256), "small": (512, 512)}
CONTEXTS |= {"medium": (512, 512), "base": (1024, 1024)}  # of decision 037, with and without RoPE


def test_without_rope_small_sizes_have_shorter_contexts() -> None:
    assert list(CONTEXTS) == list(SIZES)
    for size, (with_rope, without) in CONTEXTS.items():
        assert made(size=size).context == made(size=size, architecture="encoder").context == with_rope
        for others in ({"preset": "gpt2"}, {"preset": "original"}, {"position": "none"}):
            assert made(size=size, **others).context == without
            assert made(size=size, context=48, **others).context == 48


NEEDS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"preset": "huge"}, "`preset`", ("modern, gpt2, original",)),
    ({"size": "huge"}, "`size`", ("nano, micro, tiny, mini, small, medium, base",)),
    ({"heads": 5}, "`heads`", ("`width` (96)", "1, 2, 3, 4, 6")),
    ({"width": 33}, "`position`", ("`width` 33", "even", '`position="learned"`')),
    ({"relative_clip": 16}, "`relative_clip`", ('`position="relative"`', "leave it out")),
    ({"relative_clip": 3}, "`relative_clip`", ('`position="relative"`', "leave it out")),
    ({"rope_theta": 1e4, "position": "learned"}, "`rope_theta`", ('`position="rope"`', "leave it out")),
    ({"local_window": 64, "context": 64}, "`local_window`", ("a `context` above 64", "leave it out")),
    ({"experts_per_token": 2}, "`experts_per_token`", ("`experts`", "leave it out")),
    ({"expert_mode": "merge", "experts": 1}, "`expert_mode`", ("`experts`", "leave it out")),
    ({"expert_balance": 0.1}, "`expert_balance`", ("`experts`", "leave it out")),
    ({"expert_balance": 0.1, "experts": 2}, "`expert_balance`", ("more `experts` than `experts_per_token`",)),
    ({"relative_clip": 99, "position": "relative", "context": 64}, "`relative_clip`", ("`context` of at least 99",)),
    ({"norm": "none", "norm_bias": True}, "`norm_bias`", ("a `norm`", "leave it out")),
]


def test_the_error_names_the_setting_and_what_it_needs() -> None:
    for choices, setting, words in NEEDS:
        with pytest.raises(UsageError) as caught:
            made(**choices)
        message = str(caught.value)
        assert setting in message or f"{setting[:-1]}=" in message
        assert all(word in message for word in words), message


@pytest.mark.parametrize("preset", PRESETS)
def test_the_preset_of_a_model_is_found_and_its_sizes_are_in_ascending_order(preset: str) -> None:
    for choices in ({}, {"size": "mini", "heads": 8}, {"dropout": 0.1}, {"tie": False}):
        assert find_preset(made(preset=preset, **choices)) == preset
        assert find_preset(made(preset=preset, norm="none", **choices)) is None
    parameters = [made(preset=preset, size=size).approximate_parameters for size in SIZES]
    assert parameters == sorted(parameters)
