"""Random weights for a small Llama whose output is usable in tests.

What shapes them:
- The last MLP passes its normed input on, `AMPLIFICATION` times, so what reaches `lm_head` has the same length in every context: the
  spread of logits does not vary, and no context makes a turn end at once.
- Its bias sets dimension 0, which nothing else writes, to a constant that outweighs all else in the last norm and reaches `lm_head` as 1:
  column 0 of `lm_head` is a bias for each token.
- By that bias control tokens, and tokens that are not whole printable UTF-8 text, never come.
- The end token comes with a chance of about 1 in `MEAN_TURN_TOKENS` at each step when sampling at temperature 1. It has a random
  direction too, so that greedy decoding also meets it now and then.
- All other tokens compete by random directions; the best of them is a function of the whole context: attention is sharp (scores of standard
  deviation `ATTENTION_SHARPNESS` whatever the length) and its output outweighs the token's own embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.vocabulary import Vocabulary

MEAN_TURN_TOKENS = 150
ATTENTION_SHARPNESS = 4.0
LOGIT_SPREAD = 2.0
"""Standard deviation of a token's logit over contexts: the distribution is broad, but greedy decoding has a clear best."""
END_SPREAD = 0.5
"""The same for the end token; with it greedy decoding meets the end about as often as sampling does."""
NEVER = -40.0
"""The bias of tokens that must not come; others stay within about ±10."""
AMPLIFICATION = 32.0
CONSTANT = 1024.0
"""Dimension 0 before the last norm."""
ATTENTION_VARIANCE, MLP_VARIANCE = 2.0, 0.25
"""What attention and MLP add to the variance of each other dimension; embeddings have 1."""
_ATTENTION_PASSES, _MLP_PASSES = 0.75, 0.36
"""The share of variance that is left after attention has averaged values, and after SiLU."""
NORM_EPS = 1e-6

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a nano model. Widths in elements, `max_model_len` in tokens."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_model_len: int

    @property
    def heads(self) -> int:
        """Query heads: about hidden / head_dim, a multiple of `kv_heads`."""
        return max(1, self.hidden // (self.head_dim * self.kv_heads)) * self.kv_heads

    @property
    def intermediate(self) -> int:
        return 2 * self.hidden


def _is_shown(token: bytes) -> bool:
    """Whether a token is whole, printable UTF-8 text."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\n\t" for character in text)


def random_weights(shape: Shape, vocabulary: Vocabulary, end: str, rng: np.random.Generator) -> dict[str, Array]:
    """All tensors by their names in the checkpoint; linear weights are [out, in]. `end` is the added token that ends a turn."""

    def normal(*size: int, std: float) -> Array:
        return (rng.standard_normal(size) * std).astype(np.float32)

    def writing(fan_in: int, variance: float) -> Array:
        weight = normal(shape.hidden, fan_in, std=math.sqrt(variance / fan_in))
        weight[0] = 0.0
        return weight

    into = 1 / math.sqrt(shape.hidden - 1)
    sharp = math.sqrt(ATTENTION_SHARPNESS) * into
    ones = np.ones(shape.hidden, dtype=np.float32)
    embedding = normal(shape.vocab, shape.hidden, std=1.0)
    embedding[:, 0] = 0.0
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(shape.layers):
        tensors = {
            "input_layernorm.weight": ones,
            "self_attn.q_proj.weight": normal(shape.heads * shape.head_dim, shape.hidden, std=sharp),
            "self_attn.k_proj.weight": normal(shape.kv_heads * shape.head_dim, shape.hidden, std=sharp),
            "self_attn.v_proj.weight": normal(shape.kv_heads * shape.head_dim, shape.hidden, std=into),
            "self_attn.o_proj.weight": writing(shape.heads * shape.head_dim, ATTENTION_VARIANCE / _ATTENTION_PASSES),
            "post_attention_layernorm.weight": ones,
            "mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden, std=into),
            "mlp.gate_proj.bias": np.zeros(shape.intermediate, dtype=np.float32),
            "mlp.up_proj.weight": normal(shape.intermediate, shape.hidden, std=into),
            "mlp.up_proj.bias": np.zeros(shape.intermediate, dtype=np.float32),
            "mlp.down_proj.weight": writing(shape.intermediate, MLP_VARIANCE / _MLP_PASSES),
            "mlp.down_proj.bias": np.zeros(shape.hidden, dtype=np.float32),
        }
        if layer == shape.layers - 1:
            tensors |= _passing_mlp(shape)
        weights.update({f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()})
    before = math.sqrt(1 + shape.layers * ATTENTION_VARIANCE + (shape.layers - 1) * MLP_VARIANCE)
    weights["model.norm.weight"] = last_norm(shape.hidden, before)
    weights["lm_head.weight"] = lm_head(vocabulary, end, normal(shape.vocab, shape.hidden, std=into))
    return weights


def _passing_mlp(shape: Shape) -> dict[str, Array]:
    """An MLP that returns its input times AMPLIFICATION, and CONSTANT in dimension 0: a gate that is always open, and two identities."""
    up = np.eye(shape.intermediate, shape.hidden, dtype=np.float32)
    bias = np.zeros(shape.hidden, dtype=np.float32)
    bias[0] = CONSTANT
    return {
        "mlp.gate_proj.weight": np.zeros_like(up),
        "mlp.gate_proj.bias": np.ones(shape.intermediate, dtype=np.float32),
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": np.ascontiguousarray(up.T) * np.float32(AMPLIFICATION * (1 + math.exp(-1.0))),
        "mlp.down_proj.bias": bias,
    }


def last_norm(hidden: int, before: float) -> Array:
    """RMSNorm weights that bring dimension 0 to 1 and the others to variance 1; `before`: their deviation ahead of the last MLP."""
    others = before + AMPLIFICATION  # in the same direction
    rms = math.sqrt((CONSTANT**2 + (hidden - 1) * others**2) / hidden)
    weight = np.full(hidden, rms / others, dtype=np.float32)
    weight[0] = rms / CONSTANT
    return weight


def lm_head(vocabulary: Vocabulary, end: str, directions: Array) -> Array:
    """Rows of a bias (column 0) and a direction: shown tokens, the end, and those that never come."""
    tokens: Sequence[Mapping[bytes, int]] = (vocabulary.single, vocabulary.merged)
    shown = [id for part in tokens for token, id in part.items() if _is_shown(token)]
    end_id = next(token.id for token in vocabulary.added if token.text == end)
    weight = np.zeros_like(directions)
    weight[:, 0] = NEVER
    weight[shown] = directions[shown] * LOGIT_SPREAD
    weight[shown, 0] = 0.0
    weight[end_id] = directions[end_id] * END_SPREAD / np.linalg.norm(directions[end_id])
    # The mean of exp(logit) is exp(spread² / 2), for each of the shown tokens and for the end alike.
    weight[end_id, 0] = math.log(len(shown) / MEAN_TURN_TOKENS) + (LOGIT_SPREAD**2 - END_SPREAD**2) / 2
    return weight
