"""The table of constants is complete, and the decisions that it names exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from tinylm.model_config import INITIALISATIONS
from tinylm.planning import recipes
from tinylm.presets import PRESETS
from tinylm.run_config import ADAPTER_KINDS
from tinylm.training_config import TrainingConfig

ROOT = Path(__file__).parents[2]
TABLE = Path(recipes.__file__).read_text(encoding="utf-8")


def test_every_decision_that_the_table_names_is_in_docs() -> None:
    named = {
        n
        for group in re.findall(r"[Dd]ecisions? ((?:\d{3}(?:, | and )?(?:\([^)]*\) and )?)+)", TABLE)
        for n in re.findall(r"\d{3}", group)
    }
    assert len(named) >= 5
    for number in sorted(named):
        assert list((ROOT / "docs" / "decisions").glob(f"{number}-*.md")), f"decision {number} does not exist"


def test_there_is_a_recipe_for_every_preset_initialisation_and_kind_of_adapter() -> None:
    assert set(recipes.RECIPES) == {*PRESETS, *INITIALISATIONS, *ADAPTER_KINDS}


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=list(recipes.RECIPES))
def test_a_recipe_has_fields_of_the_training_config(recipe: recipes.Recipe) -> None:
    assert set(recipe.settings) <= {field.name for field in dataclasses.fields(TrainingConfig)}
    assert 0 <= recipe.settings["warmup"] <= 1
    assert recipe.lr > 0 and recipe.lr_exponent > 0
