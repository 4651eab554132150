"""HTTP routes: parse, hand over to `turns`, write the answer. Nothing is decided here."""
