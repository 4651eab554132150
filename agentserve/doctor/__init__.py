"""What will cost hits or crash: read from the engine, LMCache, the host and the server itself."""
