"""What runs inside vLLM's own processes. Only this folder patches the engine, and it checks first what it patches."""
