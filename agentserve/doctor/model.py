"""The model: the same tokens on both sides, answers that end, and fast paths that are not only configured."""

from __future__ import annotations

from agentserve.doctor.facts import Facts
from agentserve.doctor.launch import find
from agentserve.doctor.verdict import WHERE_TO_ASK, Check, Verdict, apart, fine, found, unknown


def tokenizer(facts: Facts) -> Verdict:
    """The server's ids must mean to the engine what they mean here."""
    ours = facts.model.probe_ids if facts.model else None
    theirs = facts.engine.probe_ids
    if ours is None or theirs is None:
        who = "the engine does not tokenise (no /tokenize)" if theirs is None else "no model folder is known here"
        return unknown(who, "name the folder with --model-folder, and the address of vLLM itself with --engine-url")
    if ours != theirs:
        at = next(
            (number for number, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
        )
        return found(
            f"the folder's tokenizer and the engine's part at token {at} of a probe",
            "name the served model's own folder with --engine-model-folder",
        )
    return fine(f"{len(ours)} tokens of a probe are the same on both sides")


def generation_config(facts: Facts) -> Verdict:
    """What the model folder changes of every request that does not say otherwise, and whether answers end."""
    mode = facts.engine.told("generation-config", "auto")
    if facts.model is None:
        return unknown("no model folder is known here", "name it with --model-folder")
    folder = facts.model.generation_config
    ends = folder.get("eos_token_id", find(facts.model.config, "eos_token_id"))
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    missing = set(facts.model.stop_ids) - ends
    if ends and missing:
        return found(
            f"token {min(missing)} ends a turn in the chat format, but is no eos_token_id: answers run on",
            "add it to generation_config.json",
        )
    limit = folder.get("max_new_tokens")
    if limit is None:
        return fine("the folder cuts no answers, and they end")
    if mode is None:
        return unknown(f"max_new_tokens {limit} in generation_config.json; vLLM does not say whether it is used", WHERE_TO_ASK)
    if mode != "vllm":
        return found(
            f"generation_config.json cuts every answer at {limit} tokens", "--generation-config vllm, or remove max_new_tokens there"
        )
    return fine("generation_config.json is not used")


def fast_path(facts: Facts) -> Verdict:
    """A fast path that is configured and never taken costs its memory and gives nothing."""
    speculative, overrides = facts.engine.told_json("speculative-config"), facts.engine.told_json("hf-overrides")
    if speculative is None or overrides is None:
        return unknown("vLLM does not say over HTTP which fast paths it was given", WHERE_TO_ASK)
    reuses_index = find(overrides, "use_index_cache") is True
    parts = (("speculative decoding", speculative), ("index reuse", reuses_index), ("a connector", facts.engine.connectors))
    configured = [name for name, is_on in parts if is_on]
    if not configured:
        return apart("none is configured")
    if "use_index_cache" in overrides and facts.model is not None and "text_config" in facts.model.config:
        return found(
            "use_index_cache stands beside text_config in --hf-overrides and is not read",
            'put it inside: {"text_config": {"use_index_cache": …}}',
        )
    served = facts.engine.count("vllm:generation_tokens_total")
    if not served:
        return unknown(f"{', '.join(configured)}: the engine has served nothing yet", "ask again after some turns")
    if speculative and not facts.engine.count("vllm:spec_decode_num_drafts_total"):
        return found(
            f"speculative decoding is configured, and {served:,.0f} tokens came without a draft",
            "see vLLM's log for why it is off, or remove it",
        )
    if facts.engine.connectors and not facts.engine.count("vllm:external_prefix_cache_queries_total"):
        return found(
            "a KV connector is configured and was never asked",
            "see vLLM's log: a connector that fails at start is left out without a failure",
        )
    if reuses_index:
        return unknown(
            "index reuse is configured; no counter of vLLM shows whether it runs", "compare the decode time of a long prompt without it"
        )
    return fine(f"shown to run: {', '.join(configured)}")


CHECKS = (
    Check("tokenizer", "/tokenize, the model folder", tokenizer),
    Check("generation_config", "generation_config.json, config.json, launch options", generation_config),
    Check("fast_path", "launch options, /metrics", fast_path),
)
