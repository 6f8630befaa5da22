"""The demo's model: a Mixtral-architecture checkpoint made from a small dense one, without a network.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv:2212.05055): every expert starts as the trained feed-forward layer plus
a little noise, so the sparse model speaks as well as the dense one did and its experts still differ.
"""

import functools
import inspect
import os
import shutil
import subprocess

PAD, START, END, CALL = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_tokenizer(size: int = 1000):
    """A byte-level BPE tokenizer with a ChatML template, trained on a few docstrings of the standard library.

    size: tokens in all, at least 260 (256 bytes and 4 special tokens); ValueError below. Any text survives encode and
    decode.
    """
    if size < 260:
        raise ValueError(f"a tokenizer of {size} tokens: 256 bytes and 4 special tokens need 260")
    import argparse
    import json
    import random
    import statistics
    import textwrap

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    modules = [argparse, inspect, json, os, random, shutil, statistics, subprocess, textwrap]
    text = [inspect.getdoc(member) or "" for module in modules for _, member in sorted(vars(module).items())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END, CALL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=CALL,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
