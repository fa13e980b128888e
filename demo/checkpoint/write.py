"""Put a random checkpoint on disk, with transformers' own classes."""

from pathlib import Path

import torch

from demo.checkpoint import tokens, weights
from demo.checkpoint.geometry import Geometry, text_config
from demo.checkpoint.layout import Layout, read_layout

#: Files a checkpoint is spread over, about: loaders must meet an index, and the n-gram table more than one file.
FILES = 8


def build(out: Path, shape: Geometry, *, seed: int = 0) -> Layout:
    """Write config, weights, tokenizer and generation config into `out`; returns what the files hold."""
    from transformers import Qwen4ExpForCausalLM
    from transformers.utils import logging

    # A progress bar over two seconds of writing would only clutter the demonstration's output.
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokens.make_tokenizer(shape.vocab_size)
    end_of_text, turn_end = tokenizer.convert_tokens_to_ids([tokens.END_OF_TEXT, tokens.TURN_END])
    config = text_config(shape, eos_token_id=end_of_text, pad_token_id=end_of_text)
    model = _empty_model(Qwen4ExpForCausalLM, config)
    weights.fill(model, readable=tokens.readable_ids(tokenizer), seed=seed)

    # An answer ends with its turn or with the text.
    model.generation_config.update(
        eos_token_id=[turn_end, end_of_text], pad_token_id=end_of_text, do_sample=False, _from_model_config=False
    )
    published = _published(model)
    size = sum(tensor.nbytes for tensor in published.values())
    model.save_pretrained(
        out, state_dict=published, save_original_format=False, max_shard_size=max(size // (FILES - 1), 1 << 18)
    )
    tokenizer.save_pretrained(out)
    return read_layout(out)


def _empty_model(cls, config) -> torch.nn.Module:
    """A bfloat16 model whose parameters hold nothing yet; its hash buffers are real.

    The class's own initialisation would draw 10^8 normals for the table, only for `weights.fill` to replace them.
    """
    from transformers.initialization import no_init_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with no_init_weights():
            return cls(config).eval()
    finally:
        torch.set_default_dtype(default)


def _published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict under published names: what `save_pretrained` does itself, each part in memory of its own.

    Left to itself it keeps tensors that share memory in one file, and all shards of the table are views of the table.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.clone() for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
