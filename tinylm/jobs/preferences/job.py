"""The job of preferences."""

from tinylm.config.run import DataConfig, RunConfig
from tinylm.jobs.chat.job import ChatJob
from tinylm.jobs.preferences.corpus import PreferenceCorpus, PreferenceTokens
from tinylm.jobs.preferences.evaluation import evaluate_preferences
from tinylm.jobs.preferences.loss import Preferences
from tinylm.jobs.scored import ScoredJob, ScoredSizes
from tinylm.reporter import counted


class PreferenceSizes(ScoredSizes):
    """Preferences, of which both texts are in the same row."""

    # docs/other-objectives.md, "Preferences"
    lr_factor = 0.025
    unvalidated = (1, 50)
    is_brief = True


class PreferencesJob(ChatJob):
    """A decoder learns to prefer one of two answers."""

    tokens_type = PreferenceTokens
    sizes_type = PreferenceSizes
    excerpt = ScoredJob.excerpt
    corpus = PreferenceCorpus
    task = Preferences
    evaluate = staticmethod(evaluate_preferences)

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        """The number of preferences."""
        return counted(data.documents // 2, "preference")


JOB = PreferencesJob()
