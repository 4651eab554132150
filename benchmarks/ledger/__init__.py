"""The ledger under generated sessions: exactness, hits under disturbance, disconnects, long histories, a frozen state store."""
