"""Block and chunk names: processes that share cached content must give it the same names."""

from __future__ import annotations

from agentserve.doctor.facts import Facts, ProcessFacts
from agentserve.doctor.verdict import WHERE_TO_ASK, Check, Verdict, apart, fine, found, unknown

SEED = "PYTHONHASHSEED"
SAME_SEED = f"start vLLM's and LMCache's processes with the same {SEED}, such as {SEED}=0"
SAME_ALGORITHM = "start every vLLM with the same --prefix-caching-hash-algo, such as sha256_cbor"


def hash_seed(facts: Facts) -> Verdict:
    """Names differ between processes where their algorithm or seed does, and where the seed is random for each."""
    processes = [engine.process for engine in facts.engines] + [one.process for one in facts.lmcache]
    shares = bool(facts.lmcache) or len(facts.engines) > 1 or bool(facts.engine.connectors)
    if not shares and facts.engine.connectors is None:
        return unknown("vLLM does not say over HTTP whether it has a KV connector that shares its block names", WHERE_TO_ASK)
    if not shares:
        return apart("one engine without a connector: nobody shares its block names")
    read = [process for process in processes if process is not None and process.environment is not None]
    seeds = {(process.environment or {}).get(SEED) for process in read}
    if len(seeds) > 1:
        return found(f"{SEED} differs: {_seeds(read)}", SAME_SEED)
    mixed = _mixed_algorithms(facts)
    if mixed is not None:
        return mixed
    random = _random_names(facts)
    if random and (seeds == {None} or seeds == {"random"}):
        return found(f"{random} draws its names from a random seed, as {SEED} is not set", SAME_SEED)
    if len(read) < len(processes):
        return unknown(
            f"the environment of {len(processes) - len(read)} processes cannot be read", "run the doctor on their host, as their user"
        )
    return fine(f"{len(read)} processes name blocks alike")


def _mixed_algorithms(facts: Facts) -> Verdict | None:
    """The verdict where engines, or LMCache servers, hash by different algorithms; one that nobody tells may be the same."""
    engines = [(told, engine.url) for engine in facts.engines if (told := engine.told("prefix-caching-hash-algo", "sha256"))]
    if len({told for told, _ in engines}) > 1:
        shown = ", ".join(f"{algorithm} at {url}" for algorithm, url in engines)
        return found(f"vLLM's hash algorithm differs: {shown}", SAME_ALGORITHM)
    servers = {told for one in facts.lmcache if (told := one.told("hash_algorithm", "hash-algorithm", "blake3"))}
    if len(servers) > 1:
        fix = "start every LMCache with the same --hash-algorithm"
        return found(f"LMCache's hash algorithm differs: {', '.join(sorted(servers))}", fix)
    return None


def _random_names(facts: Facts) -> str:
    """What names content by a hash that is seeded for each process, in words."""
    algorithm = facts.engine.told("prefix-caching-hash-algo", "sha256") or ""
    if algorithm.startswith("xxhash"):
        return f"vLLM's {algorithm}"
    if any(one.told("hash_algorithm", "hash-algorithm", "blake3") == "builtin" for one in facts.lmcache):
        return "LMCache's builtin hash"
    if any(one["kv_connector"] == "LMCacheConnectorV1" for one in facts.engine.connectors or ()):
        return "LMCache's in-process connector"
    return ""


def _seeds(processes: list[ProcessFacts]) -> str:
    return ", ".join(f"{(process.environment or {}).get(SEED, 'unset')} in process {process.pid}" for process in processes)


def sizes(facts: Facts) -> Verdict:
    """LMCache's chunk must be whole blocks, and the events' block the engine's."""
    block = facts.engine.block_size
    if block is None:
        return unknown("the engine does not say its block size", "check that /metrics is served (vllm:cache_config_info)")
    told = [one.told("chunk_size", "chunk-size", "256") for one in facts.lmcache]
    for chunk in filter(None, told):
        if not chunk.isdecimal() or int(chunk) % block:
            return found(
                f"LMCache's chunk of {chunk} tokens is no multiple of the block of {block}", f"--chunk-size {2 * block} for LMCache"
            )
    mirror = facts.server.mirror if facts.server else None
    events = mirror.get("event_block_size") if mirror else None
    if events not in (None, block):
        return found(f"KV events carry blocks of {events} tokens, the engine's are of {block}", "give the server the events of this engine")
    if None in told:
        return unknown("LMCache does not say its chunk size", "name its HTTP address with --lmcache-url")
    return fine(f"block of {block} tokens" + (f", chunk of {told[0]}" if told else ""))


CHECKS = (
    Check("hash_seed", f"{SEED} of each process, hash algorithms", hash_seed),
    Check("block_and_chunk", "block size, chunk size, the events' block size", sizes),
)
