"""What the random numbers are.

Three demands shape them.

*Every part must matter.*  transformers starts norms, the router's siblings and the PLE convolution at zero, and a
GDN that forgets within a token; a defect in any of these would not show.  Here every norm differs from one, the PLE
convolution is live, GDN heads remember for tens of tokens, attention is sharp enough that leaving out K/V rows
changes its result, and hyper-connection gates differ per stream.  `tests/e2e/test_checkpoint.py` zeroes each part in
turn and demands a change of the logits far above rounding.

*The greedy choice must be decisive.*  With independent random rows in the lm_head the two best of 500 logits lie
about 0.28 standard deviations apart, and bfloat16 moves a logit by some per cent of one: a position in twenty would
be decided by rounding.  So a row of the lm_head is partly the embedding of the token before it in one long cycle
(`successor_cycle`), and the rest is noise.  The context still decides one token in twenty, and every log-probability.

Measured with transformers on 2000 positions, preset tiny and seed 0: best minus second-best logit 3.2 in the median
and under 0.5 at 8 % of positions; bfloat16 against float32 moves a logit by 0.014 (standard deviation) where neither
the router nor the indexer changes its choice and by 0.07 overall; taking a part away moves logits by 0.16 (the shared
expert's gate) to 1.2 (PLE values).  A branch that adds more than these gains makes the last ratio worse, not better:
GDN at twice the gain doubled the rounding noise that reaches router and indexer, and with it their changed choices.

*The same seed gives the same file*, tensor by tensor: each one is drawn from its own generator, seeded with the name,
so that layer 3 is the same in a model of 4 layers and of 12.
"""

import hashlib
import math
import re

import torch

#: How many standard deviations of the other logits the successor's logit lies above zero.  The best of 500 others
#: lies near 3.1.
ALIGNMENT = 4.8
#: Standard deviation of the logits that are not the successor's.
LOGIT_STD = 2.0

_HC = r"(hyper_connection|hyper_connection_mixer)\."


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _std(name: str, shape: torch.Size, *, layers: int, hc_count: int) -> float | None:
    """Standard deviation of a plain normal tensor, None for those with their own rule.

    A matrix has `gain / sqrt(fan_in)`: unit input gives output of size `gain`.  What leaves a block is divided by
    the root of the number of blocks, so that all blocks together add as much as the embedding holds.
    """
    fan_in = shape[-1]
    block = 1.0 / math.sqrt(2 * layers)
    rules: tuple[tuple[str, float], ...] = (
        (r"embed_tokens\.weight$", math.sqrt(fan_in)),
        (r"ngram_embedding\.weight$", math.sqrt(fan_in)),
        (r"ple\.(key_proj|value_proj)\.weight$", 0.7),
        # 4 taps of a depthwise filter; silu halves what it passes
        (r"conv1d\.weight$", 1.0),
        (r"linear_attn\.out_proj\.weight$", 2.0 * block),
        (r"linear_attn\.in_proj_[ab]\.weight$", 1.0),
        (r"self_attn\.o_proj\.weight$", 6.0 * block),
        (r"shared_expert\.down_proj\.weight$", 4.0 * block),
        (r"experts\.down_proj$", 2.0 * block),
        # Routing that is nearly even would make every token a near tie between experts.
        (r"mlp\.gate\.weight$", 3.0),
        # The model divides these two projections' results by the number of streams.
        (_HC + r"(input_mix_weight_down|block_inject_weight)\.weight$", 1.0 * hc_count),
        (_HC + r"input_mix_weight_up\.weight$", 2.0),
        (r"(_proj|in_proj_qkv|in_proj_z|shared_expert_gate|index_qk_proj)\.weight$", 1.0),
        (r"experts\.gate_up_proj$", 1.5),
    )
    for pattern, gain in rules:
        if re.search(pattern, name):
            return gain / math.sqrt(fan_in)
    return None


def _special(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
    """Tensors that are not centred normals: norms and the two decay vectors of a GDN layer."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(shape).uniform_(low, high, generator=generator)

    if name.endswith("A_log"):
        # exp(-A * softplus(.)) with softplus near 0.3: a head keeps between 0.99 and 0.8 of its state at each token.
        return uniform(0.03, 0.7).log()
    if name.endswith("dt_bias"):
        return uniform(-1.5, -0.5)
    if re.search(r"\.(q_norm|k_norm)\.weight$", name):
        # These norms scale by 1 + weight.  Both at 1.5 give attention scores a spread of 2.25 instead of 1.
        return uniform(0.45, 0.85)
    if name.endswith("linear_attn.norm.weight"):
        return uniform(0.7, 1.3)
    if re.search(r"(norm|norm_key|norm_query|norm_conv|layernorm)\.weight$", name):
        return uniform(-0.3, 0.3)
    return None


def lm_head(embedding: torch.Tensor, successor: dict[int, int], seed: int) -> torch.Tensor:
    """[vocab, hidden]: row `successor[t]` leans towards the embedding of t; other rows are zero.

    A zero row's logit is 0, below every winner: special tokens and ids without text never come up, so an answer
    always runs to its length limit.
    """
    vocab, hidden = embedding.shape
    noise = torch.randn(vocab, hidden, generator=_generator(seed, "lm_head.weight"))
    # With unit input of which the embedding is a part a = 1/sqrt(2), the aligned part of weight w adds
    # w * a * sqrt(hidden) standard deviations.
    lean = min(0.95, ALIGNMENT / math.sqrt(hidden / 2))
    head = torch.zeros(vocab, hidden)
    for token, following in successor.items():
        head[following] = lean * embedding[token] + math.sqrt(1 - lean**2) * noise[following]
    return head * (LOGIT_STD / math.sqrt(hidden)) * FINAL_GAIN


#: The last mixer multiplies the normalised streams by gates near one half and averages them; this undoes it.
FINAL_GAIN = 2.0


def successor_cycle(ids: list[int], seed: int) -> dict[int, int]:
    """One cycle through all `ids` in random order; a shorter one would let the answer repeat itself."""
    order = torch.randperm(len(ids), generator=_generator(seed, "successor")).tolist()
    return {ids[a]: ids[b] for a, b in zip(order, order[1:] + order[:1], strict=True)}


@torch.no_grad()
def fill(model: torch.nn.Module, *, readable: list[int], seed: int) -> None:
    """Overwrite every parameter of a `Qwen4ExpForCausalLM`.  Buffers (hash constants) are left alone."""
    config = model.config
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            continue
        generator = _generator(seed, name)
        value = _special(name, parameter.shape, generator)
        if value is None:
            std = _std(name, parameter.shape, layers=config.num_hidden_layers, hc_count=config.hc_count)
            if std is None:
                raise ValueError(f"no rule for {name} {tuple(parameter.shape)}; add one to demo/checkpoint/weights.py")
            value = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
        parameter.copy_(value)
    successor = successor_cycle(readable, seed)
    # Every id outside the cycle keeps its embedding, but no row leads to it.
    model.lm_head.weight.copy_(lm_head(model.model.embed_tokens.weight.float(), successor, seed))
