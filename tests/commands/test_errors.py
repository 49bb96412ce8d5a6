"""Errors of the command line: what the message of each says, with its exit code, and that nothing is written.

To add one, add a row to the group of its command: (command line, exit code, what the message says).

- The command line is written as in a shell: words are quoted, `NAME=value` before it sets a variable, and `< file`
  after it is standard input. It runs in a folder with the FILES. `{run}` is the path of a run of
  tests/trained_runs.py, by the name of its fixture.
- The message contains the parts between ` ... ` in this order. Settings are flags in it, without backticks.
- A message of the library is tested at the library. Here, a row per kind shows that it reaches the user, with flags.
- All rows of a group are one test, which names every row that fails. Rows on runs are in groups of their own, so that
  the others do not wait for their training.

Rows for numbers out of range and for unknown words are made from the options of the commands in LINES.
"""

import gzip
import inspect
import json
import math
import re
import shlex
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.shell import TINY, Result, snapshot, story, tinylm
from tinylm.cli import app
from tinylm.commands.console import long_flag
from tinylm.config.validation import Range, limits_in

CHATS = [
    {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]} for role in ("user", "bot")
]
FILES: dict[str, str | bytes] = {
    "corpus.txt": story(3000),
    "empty.txt": "",
    "x.txt": "x",
    "abcd.txt": "abcd",
    "few.txt": "no joy, no bed",
    "short.txt": "to be or not to be, that is it",
    "greek.txt": story(500) + "λόγος",
    "only greek.txt": "λόγος" * 50,
    "latin.txt": "déjà vu, said the old man".encode("cp1252"),
    "cut.txt.gz": gzip.compress(story(2000).encode())[:-9],
    "bad.jsonl": '{"text": "a"}\n{\n',
    "answers.jsonl": '{"question": "x", "answer": "y"}\n',
    "pairs.tsv": "abc\tcba\n" * 40,
    "bad.tsv": "abc\tcba\nno tab\n",
    "long.tsv": f"{'abc' * 9}\ta b c\n" * 40,
    "accent.txt": "abc\nabé\n",
    "plain.txt": "no mask\n",
    "none.jsonl": "",
    "adapter.jsonl": '{"prompt": "a", "adapter": 3}',
    "surrogate.jsonl": '{"prompt": "a \\ud800"}',
    "top_k.jsonl": '{"prompt": "abc", "top_k": 3, "num_samples": 2}',
    "max_tokens.jsonl": '{"prompt": "a <mask>", "max_tokens": 3}',
    "chats.jsonl": "".join(json.dumps(chat) + "\n" for chat in CHATS),
    "unanswered.jsonl": '{"messages": [{"role": "user", "content": "no answer"}]}\n' * 10,
    "photos/beach.jpg": b"\x89PNG\0\0\0",
    "syntax.toml": "steps = ",
    "large.toml": "# " + "x" * 100_000,
    "deep.toml": "steps = " + "[" * 60_000,
    "another.toml": 'config = "other.toml"',
    "twice.toml": "eval-every = 1\neval_every = 2",
    "near.toml": "learning_rate = 1",
    "unknown.toml": "\n".join(f"k{i} = 1" for i in range(999)),
    "section.toml": "[train]\nsteps = 2",
    "word.toml": 'steps = "some"',
    "steps.toml": "steps = 0",
    "absent.corpus.toml": 'corpus = ["absent.txt"]',
    "heads.toml": "heads = 7",
    "t.txt": "t",
    "sea.txt": "the sea",
    "accents.txt": "the sea é and ü",
    "bytes.txt": b"the \xff sea",
    "accent.jsonl": '{"prompt": "é"}\n',
}
SHAPE = " ".join(TINY)
TRAIN = f"train corpus.txt --steps 2 {SHAPE}"
TUNE = "finetune-lora corpus.txt --steps 2 --batch-size 4 -m {run}"
BOTH = "--architecture encoder-decoder"

Row = tuple[str, int, str]
# fmt: off
ERRORS: dict[str, list[Row]] = {
    "train: the text": [
        ("train", 2, "tinylm train corpus.txt ... standard input"),
        ("train absent.txt",
         2, "There is no file or folder 'absent.txt'; check the path, or use - for standard input."),
        (f"train {'x' * 3000}", 2, "File name too long"),
        ("train empty.txt", 2, "empty.txt contains no text; give a file that does."),
        ("train abcd.txt --val-fraction 0.1",
         2, "abcd.txt leaves 1 token for validation, and at least 2 are needed; give more text"),
        ("train x.txt", 2, "x.txt leaves 1 token for training, and at least 3 are needed; give more text."),
        ("train short.txt --context 64", 2, "30 tokens ... needs 65 ... at most 29"),
        ("train latin.txt",
         2, "latin.txt is not valid UTF-8 (byte 0xE9 at offset 1) ... looks ... such as cp1252 ... --encoding"),
        ("train cut.txt.gz", 2, "cut.txt.gz is damaged or not gzip data (it ends too early)"),
        ("train photos", 2, "The folder photos contains no text files (skipped: 1"),
        ("train bad.jsonl", 2, "bad.jsonl, line 2: invalid JSON"),
        ("train answers.jsonl", 2, "(found: question, answer); name the key with --text-key. ... 'completion'"),
        ("train - < empty.txt", 2, "standard input contains no text"),
        ("train - corpus.txt - < corpus.txt", 2, "named twice"),
        ("train - --val-data - < corpus.txt", 2, "Standard input ... --val-data"),
        ("train corpus.txt --text-key body", 2, "--text-key is for JSONL, Parquet and CSV, and no file"),
        ("train corpus.txt --encoding utf-9", 2, "--encoding is 'utf-9', which is unknown"),
        ("train https://x.org/a.txt", 2, " is an address ... curl -fL https://x.org/a.txt | tinylm train -."),
        ("train corpus.txt --val-data https://x.org/b", 2, "fetch it first: curl -fLO https://x.org/b."),
        (f"train pairs.tsv --format lines {BOTH}", 2, "--format lines does not fit ... takes pairs"),
        ("train pairs.tsv --format pairs", 2, "--format pairs does not fit the model, which takes plain text"),
        (f"train pairs.tsv {BOTH} --text-key body", 2, "--text-key is for plain text and texts ... not for pairs"),
        (f"train bad.tsv {BOTH}", 2, "bad.tsv, line 2: expected a source, a tab and a target"),
        (f"train long.tsv --val-data pairs.tsv {BOTH} --tokenizer char --context 16",
         2, "No training pair fits the context of 16 tokens; the shortest needs 28."),
        (f"train pairs.tsv --val-data long.tsv {BOTH} --tokenizer char --context 16",
         2, "No validation pair fits the context of 16 tokens; the shortest needs 28."),
        ("train chats.jsonl", 2, "chats.jsonl, line 2, message 1: 'role' is 'bot'"),
        ("train unanswered.jsonl", 2, "Nothing is scored in the training conversations"),
        (f"{TRAIN} --train-on last", 2, "--train-on is for conversations"),
        (f"{TRAIN} --show-examples 1", 2, "--show-examples is for conversations"),
    ],
    "train: the options": [
        (f"{TRAIN} --epochs 1", 2, "--steps and --epochs contradict each other"),
        (f"{TRAIN} --val-data x.txt --val-fraction 0.5", 2, "--val-data and --val-fraction contradict each other"),
        (f"{TRAIN} --micro-batch 5", 2, "--micro-batch is 5; it must be at most --batch-size (4)"),
        (f"{TRAIN} --warmup-steps 3", 2, "--warmup-steps is more than the whole run"),
        (f"{TRAIN} --kv-heads 3", 2, "--kv-heads is 3; it must divide --heads (2)"),
        (f"{TRAIN} --width 33 --heads 11", 2, "--position rope needs an even head dimension ... --width 33 divided"),
        (f"{TRAIN} --local-window 4 --local-layers a", 2, "--local-layers ... 'a' is not a list of layer numbers"),
        (f"{TRAIN} --tokenizer absent.json", 2, "--tokenizer is 'absent.json'; it must be auto"),
        (f"{TRAIN} --tokenizer char --vocab-size 300", 2, "--vocab-size is for BPE, and the tokenizer is 'char'"),
        (f"{TRAIN} --dtype fp16 --device cpu", 2, "--dtype fp16 needs a GPU"),
        (f"{TRAIN} --unknown skip",
         2, "--unknown is for a given vocabulary, that of --init-from or of --tokenizer PATH"),
        (f"{TRAIN} --extend-vocab", 2, "name it with --init-from"),
        ("train corpus.txt --init-from a --extend-vocab --unknown skip",
         2, "--extend-vocab and --unknown skip contradict"),
        (f"{TRAIN} --out photos --force", 2, "photos contains files that do not belong to a run (beach.jpg) ... --out"),
        (f"{TRAIN} --out .", 2, "--out"),
        (f"{TRAIN} --out x.txt", 2, "x.txt is a file; choose another --out"),
        (f"{TRAIN} --out x.txt/run", 1, "Cannot write x.txt/run: cannot create ... --out"),
        (f"{TRAIN} --report absent/a.html", 2, "There is no folder absent; choose another --report."),
        (f"{TRAIN} --report .", 2, ". is not an earlier report: it is not a regular file; choose another --report."),
        (f"{TRAIN} --log-to mlflow", 2, "--log-to is 'mlflow'; it must be tensorboard, tensorboard=DIR or wandb."),
        (f"{TRAIN} --log-to wandb=x", 2, "--log-to is 'wandb=x'; only tensorboard=DIR has a value."),
        (f"{TRAIN} --log-to tensorboard=", 2, "only tensorboard=DIR has a value."),
        (f"TINYLM_CACHE=x.txt/cache {TRAIN}", 1, "Cannot create ... set TINYLM_CACHE to another folder"),
    ],
    "train: values of another type and huge numbers": [
        (f"{TRAIN} --steps many", 2, "Invalid value for '--steps': ... integer"),
        (f"{TRAIN} --no-layers 1", 2, "No such option: --no-layers"),
        *(
            (f"train corpus.txt --time={time}", 2, "is not a length of time ... 1h30m")
            for time in ("soon", "'5 minutes'", "-5", "''", "x" * 10_000)
        ),
        (f"train corpus.txt --vocab-size 1{'0' * 400}",
         2, "--vocab-size is a number of more than 40 digits; it must be "),
        (f"train corpus.txt --seed {2**63}", 2, "--seed is 9223372036854775808; it must be "),
        (f"train corpus.txt --time {'9' * 400}h", 2, "--time is inf; it must be "),
        ("train corpus.txt --time=0", 2, "--time is 0.0; it must be greater than 0"),
        ("train corpus.txt --epochs nan", 2, "--epochs is nan; it must be greater than 0"),
    ],
    "train: variables and files": [
        ("TINYLM_TRAIN_STEPS=few train corpus.txt",
         2, "'--steps' ... in the environment variable TINYLM_TRAIN_STEPS: 'few'"),
        ("TINYLM_TRAIN_FORCE=maybe train corpus.txt",
         2, "'--force' ... environment variable TINYLM_TRAIN_FORCE: 'maybe'"),
        ("TINYLM_TRAIN_SEED=-1 train absent.txt",
         2, "--seed is -1 ... --seed comes from the environment variable TINYLM_TRAIN_SEED."),
        ("TINYLM_TRAIN_OUT=x.txt train corpus.txt",
         2, "x.txt ... comes from the environment variable TINYLM_TRAIN_OUT."),
        ("TINYLM_TRAIN_CONFIG=a.toml train corpus.txt", 2, "a.toml ... the environment variable TINYLM_TRAIN_CONFIG."),
        ("TINYLM_TRAIN_WIDTH=16 train corpus.txt --config heads.toml",
         2, "--heads comes from the file heads.toml; --width comes from the environment variable TINYLM_TRAIN_WIDTH."),
        ("TINYLM_TRAIN_INIT_FROM=absent train corpus.txt",
         2, "absent ... --init-from comes from the environment variable TINYLM_TRAIN_INIT_FROM."),
        ("TINYLM_TRAIN_TEACHER=absent train corpus.txt",
         2, "absent ... --teacher comes from the environment variable TINYLM_TRAIN_TEACHER."),
        ("TINYLM_TRAIN_VAL_DATA=absent train corpus.txt",
         2, "absent ... --val-data comes from the environment variable TINYLM_TRAIN_VAL_DATA."),
        ("TINYLM_TRAIN_TOKENIZER=absent.json train corpus.txt",
         2, "absent ... --tokenizer comes from the environment variable TINYLM_TRAIN_TOKENIZER."),
        ("TINYLM_TRAIN_REPORT=absent/r.html train corpus.txt --dry-run",
         2, "absent ... --report comes from the environment variable TINYLM_TRAIN_REPORT."),
        ("TINYLM_TRAIN_LOG_TO=absent train corpus.txt --dry-run",
         2, "absent ... --log-to comes from the environment variable TINYLM_TRAIN_LOG_TO."),
        ("TINYLM_TRAIN_RESUME=absent train",
         2, "absent ... --resume comes from the environment variable TINYLM_TRAIN_RESUME."),
        ("TINYLM_FINETUNE_LORA_MODEL=absent finetune-lora corpus.txt",
         2, "absent ... --model comes from the environment variable TINYLM_FINETUNE_LORA_MODEL."),
        ("TINYLM_SAMPLE_MODEL=absent sample abc",
         2, "absent ... --model comes from the environment variable TINYLM_SAMPLE_MODEL."),
        ("TINYLM_SAMPLE_ADAPTER=absent sample abc",
         2, "absent ... --adapter comes from the environment variable TINYLM_SAMPLE_ADAPTER."),
        ("TINYLM_SAMPLE_PROMPT_FILE=absent sample",
         2, "absent ... --prompt-file comes from the environment variable TINYLM_SAMPLE_PROMPT_FILE."),
        ("TINYLM_EVAL_MODEL=absent eval corpus.txt",
         2, "absent ... --model comes from the environment variable TINYLM_EVAL_MODEL."),
        ("export --to gguf --out a.gguf", 2, "There is no trained model under checkpoints/; ... name one with MODEL."),
        ("train --config absent.corpus.toml", 2, "absent.txt ... CORPUS comes from the file absent.corpus.toml."),
        ("train corpus.txt --config steps.toml", 2, "--steps is 0; ... --steps comes from the file steps.toml."),
        ("train corpus.txt --config word.toml", 2, "'--steps' ... in the file word.toml: 'some'"),
        ("train corpus.txt --config absent.toml", 2, "Cannot read --config absent.toml: No such file"),
        ("train corpus.txt --config /dev/zero", 2, "--config /dev/zero: it is not a regular file."),
        ("train corpus.txt --config syntax.toml", 2, "syntax.toml is not valid TOML"),
        ("train corpus.txt --config deep.toml", 2, "deep.toml is not valid TOML: it is nested too deeply."),
        ("train corpus.txt --config large.toml", 2, "large.toml is larger than 64 kB"),
        ("train corpus.txt --config another.toml",
         2, "another.toml sets config; a config file cannot name another one."),
        ("train corpus.txt --config twice.toml", 2, "sets eval_every twice"),
        ("train corpus.txt --config near.toml",
         2, "near.toml sets learning_rate, which tinylm train does not have; use lr."),
        ("train corpus.txt --config section.toml", 2, "section.toml sets train, ... tinylm train --help"),
        ("train corpus.txt --config unknown.toml", 2, "sets k0, k1, k2 and 996 more, which"),
    ],
    "train: of a run": [
        ("train corpus.txt --init-from {run} --layers 2 --tokenizer bpe", 2, "--tokenizer, --layers"),
        ("train greek.txt --init-from {run}",
         2, "5 of the text's ... 'λ' (U+03BB) ... --unknown skip ... --extend-vocab"),
        ("train 'only greek.txt' --init-from {run} --unknown skip", 2, "None of the characters of only greek.txt"),
        ("train --resume {run} --lr 0.1", 2, "--resume fixes --lr"),
        ("train --resume {run} --init-from {run}", 2, "--resume fixes --init-from"),
        ("train x.txt --resume {run}", 2, "is not the text that"),
        ("train --resume {adapter}", 2, "To continue it: tinylm finetune-lora --resume "),
        ("train --resume absent", 2, "There is no run at absent. List the runs with: tinylm runs."),
    ],
    "finetune-lora": [
        ("finetune-lora", 2, "tinylm finetune-lora corpus.txt ... standard input"),
        ("finetune-lora corpus.txt", 2, "no trained model under checkpoints/"),
    ],
    "finetune-lora: of a run": [
        (f"{TUNE} --rank 17", 2, "--rank is 17; "),
        (f"{TUNE} --alpha nan", 2, "--alpha is nan; it must be "),
        (f"{TUNE} --target brain", 2, "--target is 'brain'; it must be one of: attention"),
        (f"{TUNE} --target embedding --dropout 0.1", 2, "--dropout and --share-b are for linear layers"),
        (f"{TUNE} --out {{run}} --force", 2, "is the base model, which is never written to"),
        (f"{TUNE}/last --out {{run}} --force", 2, "is the base model, which is never written to"),
        (f"{TUNE} --out {{run}}/last --force", 2, "is the base model, which is never written"),
        ("train corpus.txt --init-from {run}/last --out {run} --force", 2, "is the base model, which is never written"),
        (TUNE.replace("corpus", "greek"), 2, "has no id for 5 of the text's characters, 'γ' (U+03B3), 'λ' (U+03BB)"),
        (f"{TUNE.replace('corpus', 'few')} --val-data corpus.txt --sequence-length 16",
         2, "has 14 tokens ... a context of 16 needs 17; give more text."),
        ("finetune-lora --resume {adapter} --rank 4", 2, "--resume fixes --rank"),
        ("finetune-lora corpus.txt -m {run} --resume {adapter}", 2, "is not the text that"),
        ("finetune-adapter corpus.txt -m {run} --bottleneck 17", 2, "--bottleneck is 17; it must be from 1 to "),
    ],
    "sample with adapters": [
        ("sample -m {run} -f bad.jsonl", 2, "bad.jsonl, line 1: expected an object with a string under 'prompt'"),
        ("sample -m {run} -f none.jsonl", 2, "none.jsonl has no prompt in it"),
        ("sample -m {run} -f surrogate.jsonl", 2, "line 1: a lone surrogate at character 2"),
        ("sample -m {run} -f adapter.jsonl", 2, "line 1: 'adapter' is 3; it must be a string"),
        ("sample --adapter {adapter}=half", 2, "'half' is not a number ... =0.5"),
        ("sample --adapter {adapter}=", 2, "'' is not a number ... =0.5"),
    ],
    "sample and eval of an encoder or encoder-decoder": [
        ("sample -m {encoder} -p 'no mask'", 2, "The prompt has no <mask> to fill"),
        ("sample -m {encoder} -p - --format lines < plain.txt", 2, "Standard input, line 1 has no <mask> to fill"),
        ("sample -m {encoder} -p 'a <mask>é'", 2, "'é' (U+00E9)"),
        (f"sample -m {{encoder}} -p '{'<mask>' * 17}'", 2, "The prompt has 17 tokens, and the model's context is 16"),
        ("sample -m {encoder} -p 'a <mask>' --stream",
         2, "An encoder fills all masks at once, each with its most likely token: leave out --stream."),
        ("sample -m {encoder} -p 'a <mask>' -t 1 --no-echo --no-cache",
         2, "leave out --temperature, --no-cache, --no-echo"),
        ("sample -m {encoder} -p - --format jsonl < max_tokens.jsonl",
         2, "leave out 'max_tokens' of Standard input, line 1."),
        ("sample -m {translator}", 2, "There is no source text; give it with --prompt"),
        ("sample -m {translator} -f - < accent.txt", 2, "Source 2 has a character ... offset 2"),
        (f"sample -m {{translator}} -p {'abc' * 100} --strict", 2, "Source 1 has 300 tokens"),
        ("sample -m {translator} -p abc --stream", 2, "and printed when it is complete: leave out --stream."),
        ("sample -m {translator} -p abc --beams 2 -t 1",
         2, "targets are sampled, without beam search: leave out --beams."),
        ("sample -m {translator} -p abc --num-samples 2", 2, "beam search, without sampling: leave out --num-samples."),
        ("sample -m {translator} -p abc --top-k 3 --repeat-penalty 2", 2, "leave out --top-k, --repeat-penalty."),
        ("sample -m {translator} -p - --format jsonl < top_k.jsonl",
         2, "leave out 'top_k', 'num_samples' of Standard input, line 1."),
        ("sample -m {run} --beams 2", 2, "continues a prompt: leave out --beams."),
        ("eval -m {run} --beams 2", 2, "--beams is for pairs, not for this model; leave it out."),
        ("eval -m {encoder} --stride 3", 2, "--stride is for decoders ... not for encoders of plain text"),
        ("eval -m {translator} --baselines", 2, "--baselines is for decoders ... not for pairs; leave it out."),
    ],
    "eval without a text": [
        (f"eval -m {{run}} {option}", 2, f"{option.split()[0]} has no effect without a text")
        for option in ("--text-key body", "--format lines", "--unknown skip", "--encoding latin-1")
    ],
    "train-tokenizer": [
        ("train-tokenizer absent.txt", 2, "'absent.txt'"),
        ("train-tokenizer corpus.txt --out x.txt", 2, "x.txt is already there ... --force ... --out"),
        ("train-tokenizer corpus.txt --out corpus.txt --force", 2, "corpus.txt is not an earlier tokenizer; ... --out"),
        ("train-tokenizer corpus.txt --out . --force", 2, ". is not an earlier tokenizer: ... choose another --out"),
        ("train-tokenizer corpus.txt --out no/t.json", 1, "Cannot write no/t.json: No such file"),
        ("train-tokenizer corpus.txt --vocab-size 256", 2, "--vocab-size is 256; a BPE tokenizer needs 257"),
        ("train-tokenizer corpus.txt --text-key body", 2, "--text-key is for JSONL, Parquet and CSV, and no file"),
    ],
    "other commands": [
        ("dance", 2, "Usage: tinylm ... --help ... No such command 'dance'."),
        ("train --dance", 2, "Usage: tinylm train ... --help ... No such option: --dance"),
        ("merge-lora", 2, "Usage: tinylm merge-lora ... Missing argument"),
        ("runs a b", 2, "Got unexpected extra argument(s) (b)"),
        ("sample -n", 2, "Option '-n' requires an argument"),
        ("cache models", 2, "'models' ... tokens"),
        ("TINYLM_INFO_CONFIG=a.toml info", 2, "a.toml ... comes from the environment variable TINYLM_INFO_CONFIG."),
    ],
    "names of other tools": [
        ("train a.txt --learning-rate 1", 2, "No such option: --learning-rate. Did you mean --lr?"),
        ("train a.txt --widht 8", 2, "No such option: --widht. Did you mean --width?"),
        ("train a.txt --block-size 64", 2, "Did you mean --context or --sequence-length?"),
        ("train --data a.txt", 2, "It is an argument without a flag: tinylm train CORPUS."),
        ("generate", 2, "No such command 'generate'. Did you mean: tinylm sample?"),
        ("server", 2, "Did you mean: tinylm serve?"),
        ("trian", 2, "No such command 'trian'. Did you mean: tinylm train?"),
        ("'only greek.txt'", 2, "Did you mean: tinylm train 'only greek.txt'?"),
        ("sample once upon", 2, 'Quote a prompt of several words: tinylm sample "Once upon a time".'),
        ("chat hello", 2, 'To answer a single question: tinylm sample --chat "QUESTION".'),
        ("export a b --to gguf --out c", 2, "The path to write is given with --out."),
        ("eval FTP://x.org/a.txt", 2, "curl -fL ftp://x.org/a.txt | tinylm eval -."),
        ("sample -m https://huggingface.co/a/b-1.5", 2, "a model of the Hugging Face hub is written hf:a/b-1.5."),
        ("info https://x.org/m.gguf", 2, "fetch it first: curl -fLO https://x.org/m.gguf."),
    ],
    "sample": [
        ("sample --temp 0.5", 2, "No such option: --temp. Did you mean --temperature?"),
        ("sample", 2, "no trained model under checkpoints/ ... --model. Train one with: tinylm train corpus.txt."),
        ("sample the --prompt ''", 2, "--prompt contradict each other; give one of them"),
        ("sample -f absent.txt", 2, "--prompt-file absent.txt ... No such file"),
        ("sample -f 'a\0b'", 2, "'--prompt-file' ... embedded null"),
        ("sample -f bytes.txt", 2, "bytes.txt is not valid UTF-8 (byte 0xff at offset 4)"),
        ("sample -p 'the \udcff sea'", 2, "The prompt is not valid UTF-8 (byte 0xff at offset 4)"),
        ("sample -p 'the \ud800'", 2, "The prompt contains a lone surrogate at offset 4"),
        ("sample --stop ''", 2, "--stop is empty; give the text to stop at"),
        (r"sample --stop '\d'", 2, r"--stop has a backslash before 'd'; write \n (line feed)"),
        (r"sample --separator '\'", 2, "--separator has a backslash at its end"),
        (f"sample --top-k {'1' * 5000}", 2, "'--top-k'"),
    ],
    "sample of a run": [
        ("sample -m {run} -n 0", 2, "--max-tokens is 0"),
        ("sample -m {run} --unknown drop", 2, "--unknown is 'drop'; it must be one of: error, skip"),
        ("sample -m {run} -p 'the sea é'", 2, "'é' (U+00E9) at offset 8 ... --unknown skip"),
        ("sample -m {run} -f accent.jsonl", 2, "accent.jsonl, line 1 has a character ... 'é' (U+00E9) at offset 0"),
        (f"sample -m {{run}} --strict -p {'a' * 17}", 2, "17 tokens, and the context of 16 has no room ... --strict"),
        ("sample --adapter {run}", 2, "is a model, not an adapter ... --model"),
        ("sample --model {adapter}", 2, "is an adapter, not a model ... --adapter ... merge-lora"),
        (f"sample --adapter {{adapter}}={'9' * 400}", 2, "is not a number from -1000 to 1000 ... =0.5"),
    ],
    "eval of a run": [
        ("eval -m {run} --stride 0", 2, "--stride is 0; it must be from 1 to"),
        ("eval -m {run} absent.txt", 2, "'absent.txt'"),
        ("eval -m {run} empty.txt", 2, "empty.txt contains no text"),
        ("eval -m {run} t.txt", 2, "fewer than 2 tokens (1) ... give more text"),
        ("eval -m {run} accents.txt", 2, "has no id for 2 of the text's characters, 'é' (U+00E9), 'ü' (U+00FC)"),
        ("eval -m {encoder} sea.txt --baselines", 2, "--baselines is for decoders ... not for encoders"),
        ("eval -m {run} sea.txt --sequence-length 17", 2, "--sequence-length is 17"),
        ("eval -m {run} sea.txt --sequence-length 4 --stride 5", 2, "--stride is 5"),
        (f"eval -m {{run}} sea.txt --batch-size {10**400}", 2, "--batch-size is a number of more than 40 digits"),
        ("eval -m {run} corpus.txt --train-data x.txt", 2, "--train-data ... without --memorisation"),
        ("eval --memorisation -m {run} --stride 4", 2, "--stride has no effect with --memorisation"),
        ("eval --memorisation -m {run} --train-data x.txt", 2, "--train-data needs a held-out text"),
        ("eval --memorisation -m {encoder} sea.txt --train-data corpus.txt", 2, "is measured for decoders"),
        ("eval --memorisation -m {run} sea.txt --train-data corpus.txt", 2, "held-out text has no document of at"),
        ("eval --memorisation -m {run} corpus.txt --train-data corpus.txt --min-match 900", 2, "--min-match is 900"),
    ],
    "info": [
        ("info absent", 2, "There is no run at absent. List the runs with: tinylm runs."),
        ("info --model a", 2, "It is an argument without a flag: tinylm info RUN."),
        ("info photos", 2, "photos is not a run directory: it has no config.json"),
        (f"info {' '.join(f'run{i}' for i in range(27))}", 2, "name at most 26"),
    ],
    "runs": [
        ("runs absent", 2, "There is no folder absent"),
        ("runs --sort speed", 2, "--sort has no key 'speed' ... loss ... preset"),
    ],
    "report": [
        ("report absent", 2, "absent"),
        ("report {run} --device abacus", 2, "--device is 'abacus' ... cuda"),
        ("report {run} --out absent/a.html", 2, "There is no folder absent; choose another --out."),
        ("report {run} --out photos", 2, "photos is not an earlier report: it is not a regular file"),
    ],
    "compare": [
        ("compare {run} absent sea.txt", 2, "There is no run at absent"),
        ("compare {run} {run} absent.txt", 2, "'absent.txt'"),
        ("compare {run} {run} -m {run} sea.txt", 2, "--model has no effect ... an adapter"),
        ("compare {run} {run} --format lines", 2, "--format ... has no effect without a text"),
        ("compare {run} {run} t.txt", 2, "too short to compare"),
        ("compare {run} {encoder} sea.txt", 2, "Only decoders are compared; ... /enc is an encoder"),
        ("compare {bpe_run} {run} accents.txt", 2, "has no id for 2 of the text's characters, 'é'"),
        (
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 "
            "compare {run} {run} sea.txt",
            2,
            "in one process ... without torchrun",
        ),
    ],
    "merge-lora": [
        ("merge-lora absent --out merged", 2, "There is no run at absent"),
        ("merge-lora {run} --out merged", 2, "is a model, not an adapter"),
        ("merge-lora {adapter} --undo --out undone", 2, "--undo takes the adapter out of a merged model"),
        ("merge-lora {adapter} --undo --model {run} --out undone", 2, "was not made by merging"),
    ],
    "export of a run": [
        ("export {run} --to onnx --out new", 2, "--to is 'onnx'; it must be one of: hf, gguf, html, peft"),
        ("export {run} --to hf --out new --base {run}", 2, "--base"),
        ("export {run} --to hf --out sea.txt/new", 2, "Cannot write to"),
        ("export {run} --to gguf --out sea.txt/a.gguf", 2, "Cannot write to"),
    ],
}
# fmt: on


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands
LINES = {  # of each command that has options of numbers or of a few words
    "train": "train corpus.txt",
    "sample": "sample -m {run}",
    "chat": "chat -m {run}",
    "serve": "serve -m {run}",
    "eval": "eval corpus.txt -m {run}",
    "compare": "compare {run} {bpe_run} corpus.txt",
    "finetune-lora": "finetune-lora corpus.txt -m {run}",
    "finetune-adapter": "finetune-adapter corpus.txt -m {run}",
    "merge-lora": "merge-lora {adapter} --out merged",
    "export": "export {run} --to gguf --out exported",
    "train-tokenizer": "train-tokenizer corpus.txt",
    "doctor": "doctor",
}


def annotation_of(command: str, name: str) -> Any:
    """The annotation of an option of a command."""
    return inspect.signature(COMMANDS[command].callback).parameters[name].annotation


def number_type(command: str, name: str) -> type | None:
    """int or float for an option that takes a number, else `None`."""
    annotation = annotation_of(command, name)
    found = {int, float} & {annotation.__origin__, *typing.get_args(annotation.__origin__)}
    return found.pop() if found else None


def words_of(option: Any) -> list[str]:
    """The values of an option that takes one of a few words."""
    words = (option.metavar or "").split("|")
    return words if len(words) > 1 and not any(word.isupper() for word in words) else []


def rows_of(command: str) -> Iterator[Row]:
    """For each option of the command, a value just below its range, or that is none of its words."""
    for option in COMMANDS[command].params:
        kind = number_type(command, option.name) if option.param_type_name == "option" else None
        if kind is not None:
            bounds = limits_in(annotation_of(command, option.name))
            assert isinstance(bounds, Range)
            below = bounds.low - 1 if kind is int else math.nextafter(bounds.low, -math.inf)
            value = bounds.low if not bounds.contains(bounds.low) else below
            says = f"{long_flag(option)} is  ... ; it must be {bounds}."
            yield f"{LINES[command]} {long_flag(option)}={value}", 2, says
        elif words := words_of(option):
            says = " ... ".join((long_flag(option), "'nonsense'", *words))
            yield f"{LINES[command]} {long_flag(option)} nonsense", 2, says


@pytest.fixture
def files(here: Path) -> Path:
    for name, content in FILES.items():
        path = here / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return here


def run_line(line: str, runs: dict[str, Path]) -> Result:
    """The result of a command line of a row."""
    for name, path in runs.items():
        line = line.replace(f"{{{name}}}", str(path))
    words = shlex.split(line)
    env = {"COLUMNS": "1000"}
    while re.match("[A-Z_]+=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    stdin = b""
    if words[-2:-1] == ["<"]:
        stdin = Path(words.pop()).read_bytes()
        words.pop()
    return tinylm(*words, stdin=stdin, env=env)


def message_of(result: Result) -> str:
    """The line of an error of tinylm, or the text in the box of an error of the option parser."""
    line = result.stderr.splitlines()[-1] if result.stderr else ""
    return line if line.startswith("Error: ") else " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


def complaints(line: str, result: Result, code: int, says: str) -> list[str]:
    """What is wrong with an error."""
    message = message_of(result)
    wrong = {
        f"the exit code is {result.exit_code}": result.exit_code != code,
        f"stdout is {result.stdout!r}": bool(result.stdout),
        f"it does not say {says!r}": not re.search(".*".join(map(re.escape, says.split(" ... "))), message),
        "it is no line that ends as a sentence": message.startswith("Error: ") and not re.search(r"[^.]\.$", message),
        "it has more than 1000 characters": len(message) > 1000,
        "there is a traceback": "Traceback" in result.stderr,
        "it names a setting in place of a flag": "`" in message,
        "it names the source of a value that was typed": not re.search("TINYLM_|--config", line)
        and re.search(r"comes from the |\(in the ", message),
    }
    return [f"{line}\n    {problem}: {message!r}" for problem, found in wrong.items() if found]


def check(rows: Iterable[Row], files: Path, request: pytest.FixtureRequest) -> None:
    """Run the command line of each row, which must write nothing, into the folder of a run neither."""
    rows = list(rows)
    assert rows
    names = {name for line, *_ in rows for name in re.findall(r"\{(\w+)\}", line)}
    runs = {name: request.getfixturevalue(name) for name in sorted(names)}
    folders = [files, *runs.values()]
    before = [snapshot(folder) for folder in folders]
    wrong = []
    for line, code, says in rows:
        wrong += complaints(line, run_line(line, runs), code, says)
        if [snapshot(folder) for folder in folders] != before:
            before = [snapshot(folder) for folder in folders]
            wrong.append(f"{line}\n    something was written")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", ERRORS)
def test_an_error_has_its_message_and_writes_nothing(group: str, files: Path, request: pytest.FixtureRequest) -> None:
    check(ERRORS[group], files, request)


@pytest.mark.parametrize("command", LINES)
def test_a_wrong_number_or_word_is_an_error_with_its_flag(
    command: str, files: Path, request: pytest.FixtureRequest
) -> None:
    check(rows_of(command), files, request)


def test_every_option_of_a_number_has_a_range_and_a_row() -> None:
    numbers = {
        (command, option.name)
        for command, found in COMMANDS.items()
        for option in found.params
        if option.param_type_name == "option" and number_type(command, option.name) is not None
    }
    assert all(isinstance(limits_in(annotation_of(*number)), Range) for number in numbers)
    assert {command for command, _ in numbers} <= set(LINES)
