#!/usr/bin/env bash
# lmcache-servers NUM_RANKS [flags of lmcache server]: one server per rank; all end when one ends, so that the container is restarted.
set -euo pipefail

num_ranks=$1
shift
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT

for ((rank = 0; rank < num_ranks; rank++)); do
  lmcache server --port $((5555 + rank)) --http-port $((8180 + rank)) "$@" &
done

wait -n
echo "an LMCache server ended" >&2
exit 1
