"""Keys of records to which other tools give a meaning that tinylm does not learn, with what to do instead.

A record with such a key means something else without it: a bad answer would be learned as a good one. Other keys that
tinylm does not know, such as an identifier or a source, have no effect.
"""

from collections.abc import Mapping
from typing import Any

from tinylm.errors import UsageError

_PREFERENCE = "for preferences, name the question 'prompt' and its two answers 'chosen' and 'rejected'"
_GRADE = (
    "it marks an answer as good or bad, and all answers would be learned as good ones; keep the good ones without this "
    "key, or make preferences of 'prompt', 'chosen' and 'rejected'"
)
_MEDIA = "only texts are read; leave the record out, or the key if its text is complete without it"
_TEXTS_ALONE = 'to read the texts alone, use `format="jsonl"`'

# The worse of two answers. Argilla, NeMo, ms-swift; ms-swift; torchtune; OpenAI
REJECTED = dict.fromkeys(
    ("rejected_response", "rejected_messages", "rejected_conversations", "non_preferred_output"), _PREFERENCE
)
# Of conversations and preferences.
REFUSED = {
    "functions": "describe the functions under 'tools'",
    "documents": "put the documents into a message",
    "chat_template_kwargs": "write its values into a `chat_template`",
    "history": "put the earlier questions and answers into 'messages'",
    # LLaMA-Factory, ms-swift, trl: conversations with images and sounds
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    **REJECTED,
}
# Of conversations. trl, axolotl, ms-swift: KTO, classifiers, and steps of an answer; LLaMA-Factory: KTO.
REFUSED_IN_CONVERSATIONS = {**REFUSED, "rejected": _PREFERENCE, **dict.fromkeys(("label", "labels", "kto_tag"), _GRADE)}
REFUSED_IN_MESSAGES = {
    "function_call": "put the call into 'tool_calls'",
    **dict.fromkeys(("train", "train_detail", "loss", "loss_mask", "train_on_turn"), "use 'weight', which is 0 or 1"),
}
# Of texts with labels or without, in addition to second texts. The name in batches of transformers.
REFUSED_IN_TEXTS = {"labels": f"for a classifier, name the one label of a text 'label'; {_TEXTS_ALONE}"}
# The second text of a record, by the key of the first, as in GLUE and sentence-transformers.
SECOND_TEXTS = {
    "text": ("text_pair", "text2"),
    "text1": ("text2",),
    "text_a": ("text_b",),
    "sentence1": ("sentence2",),
    "question1": ("question2",),
    "premise": ("hypothesis",),
}


def refused_in_texts(text_key: str) -> dict[str, str]:
    """The keys that are refused in records whose text is under `text_key`."""
    advice = f"it is a second text, and one is read; join the two; {_TEXTS_ALONE}"
    return {**REFUSED_IN_TEXTS, **dict.fromkeys(SECOND_TEXTS.get(text_key, ()), advice)}


def refuse_keys(values: Mapping[str, Any], refused: Mapping[str, str], location: str) -> None:
    """Raise UsageError, with the location and advice, for a key in `refused` that has a value."""
    for key, advice in refused.items():
        if values.get(key) not in (None, "", [], {}):
            raise UsageError(f"{location}: {key!r} is not supported; {advice}.")
