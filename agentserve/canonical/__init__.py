"""The canonicaliser: named rules that keep a prompt's head the same tokens while clients change what does not matter in it.

Rules touch system text and tools only, and of these only content that is known to be volatile. `table` lists the rules.
"""
