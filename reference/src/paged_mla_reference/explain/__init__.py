"""Explaining a dump: the first rule that breaks, where, and which known bug breaks it so."""
