"""Sessions in Redis or Valkey, so that any server can take the next turn. Memory stays the truth; without the store turns go on from it."""
