"""How an engine is set up, in vLLM's terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Of one engine. `num_blocks` are usable ones: vLLM's `num_gpu_blocks` less the null block."""

    num_blocks: int
    block_size: int = 128
    max_num_batched_tokens: int = 32_768
    max_num_seqs: int = 256
    num_speculative_tokens: int = 0
    acceptance_length: float = 1.0
    """Tokens a decode step yields on average, the sampled one among them; at most `num_speculative_tokens` + 1."""
    drops_last_block: bool = False
    """EAGLE and MTP compute the last matched block again."""
    full_prompt_must_fit: bool = True
    watermark: float = 0.0
    """Share of the pool kept free when a waiting request joins running ones."""
    max_fused_steps: int = 1 << 30
    """Decode steps that may pass at one look; how often tokens come out of a simulated engine that serves."""
