"""A byte-level BPE tokenizer made on the spot, with a chat template.

Byte level, so that any UTF-8 text comes back unchanged; trained on the lines below, so that nothing is fetched.
"""

from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)

TEXT = """
A stage holds a run of layers, and a token visits every stage once for each step.
The table of n-grams stays on the disk; a few rows of it are read for every token.
Three small cards can serve what one large card could not hold.
The first stage reads the words, the last stage writes the next word, the others pass streams along.
Four residual streams meet before a block and part again after it.
A query looks at the pooled keys of four tokens at a time and keeps the best of these blocks.
Gated delta rules remember with a matrix that fades a little at every step.
An expert is asked only when the router picks it, and the shared expert answers always.
How many rows does a prompt of one hundred tokens read from the table? Sixteen for each token.
Please explain in short sentences how a pipeline keeps every stage busy while several users wait.
Zwei Karten rechnen, eine dritte wartet. Über alle Stufen läuft dasselbe Wort.
Une étape attend la suivante, puis écrit sa réponse.
0 1 2 3 4 5 6 7 8 9 10 16 20 24 32 48 64 100 128 256 512 1000 1024 2048.
"""

# One turn per message, then the opening of the answer: the shape of the published model's template, without tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + TURN_START + "' + message['role'] + '\n' + message['content'] + '" + TURN_END + "\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + TURN_START + "assistant\n' }}{% endif %}"
)


def make_tokenizer(vocab_size: int):
    """A `PreTrainedTokenizerFast` of at most `vocab_size` entries; ids 0, 1, 2 are the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 256 + len(SPECIAL):
        raise ValueError(f"vocab_size {vocab_size} has no room for 256 bytes and {len(SPECIAL)} special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.strip().splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def readable_ids(tokenizer) -> list[int]:
    """Ids whose bytes are printable text by themselves, so that an answer made of them can be shown."""
    ids = []
    for token_id in range(len(SPECIAL), len(tokenizer)):
        text = tokenizer.decode([token_id])
        if text.strip() and text.isprintable() and "\ufffd" not in text:
            ids.append(token_id)
    return ids


def save(tokenizer, out: Path) -> None:
    tokenizer.save_pretrained(out)
